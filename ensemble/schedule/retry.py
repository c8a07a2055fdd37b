"""Whether a member that failed is tried again, and what changes for it: decisions only, nobody acts here."""

from __future__ import annotations

from dataclasses import dataclass

REASONS = ("error", "nan", "lost", "oom", "hang", "disk")


@dataclass(frozen=True)
class RetryPolicy:
    """Restarts from the last checkpoint, at most `retries` times in a session.

    A loss that is not a number is never tried again: by law 1 the same batches would give the same loss. A disk
    that is full is not tried again at once, but by the resume that comes after room was made.
    """

    retries: int

    def again(self, reason: str, failures: int) -> bool:
        """Whether to try again after the `failures`-th failure (counted from 1) for this reason."""
        return reason not in ("nan", "disk") and failures <= self.retries


def lowered(reason: str, together: int, limit: int | None) -> int | None:
    """Most members at one time on a node after a failure there, None for no limit.

    Args:
        reason: out of memory ("oom") lowers the packing by one; nothing else changes it.
        together: members that were on the node, the failed one included.
        limit: what held before.
    """
    if reason != "oom":
        return limit
    fewer = max(1, together - 1)
    return fewer if limit is None else min(limit, fewer)
