"""Worker actors that have done their work and may do more: starting one costs a second or two, keeping it little.

They hold their share of the node in Ray's books meanwhile, so they are kept for seconds only, and make way for an
actor of another share at once.
"""

from __future__ import annotations

import time
from typing import Any

KEPT_S = 10.0

#: Node, cores and bytes of memory of one actor.
Share = tuple[str, float, int | None]


class IdleActors:
    """Actors without work, by what they hold."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, Share, Any]] = []  # since when

    def keep(self, share: Share, actor: Any) -> None:
        """This one has nothing to do any more."""
        self._kept.append((time.monotonic(), share, actor))

    def take(self, share: Share) -> Any | None:
        """One that holds this; None where there is none, and then others of that node hold nothing any more."""
        for item in self._kept:
            if item[1] == share:
                self._kept.remove(item)
                return item[2]
        self.end(share[0])
        return None

    def end(self, node: str | None = None, *, older_than_s: float = 0.0) -> None:
        """End those of one node, or of all, that have been without work for so long."""
        import ray

        before = time.monotonic() - older_than_s
        for item in list(self._kept):
            if node in (None, item[1][0]) and item[0] <= before:
                self._kept.remove(item)
                ray.kill(item[2])
