"""Chooses the positions that a reader compares: pure functions of numbers and a name.

Two lie in the first batch that it reads. Then there is one in an epoch, and at most one in `SAMPLES` samples: a
short epoch has none until so many samples were read. Readers with other names compare other positions.
"""

from __future__ import annotations

import hashlib

SAMPLES = 2000
AT_START = 2


def choose_first(name: str, epoch: int, start: int, stop: int) -> list[int]:
    """The places of an epoch, out of [start, stop), that are compared before the first step, in order.

    Args:
        name: of the reader.
        epoch: of the stream.
        start, stop: of its first batch.
    """
    count = stop - start
    if count <= AT_START:
        return list(range(start, stop))
    first = _draw(f"{name}/first/{epoch}", count)
    second = (first + 1 + _draw(f"{name}/second/{epoch}", count - 1)) % count
    return sorted((start + first, start + second))


def choose_later(name: str, epoch: int, n: int) -> int | None:
    """The place of an epoch that is compared, out of its n; None if the epoch has none."""
    if (epoch + 1) * n // SAMPLES == epoch * n // SAMPLES:
        return None
    return _draw(f"{name}/{epoch}", n)


def _draw(text: str, below: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % below
