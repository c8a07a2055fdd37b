"""The first of each kind among thousands of waiting members: those with which a decision about places is made.

Members of one kind (flotilla and need) are alike to whoever places them, and the first ones are placed first. So a
decision with some of each kind is that with all, as long as it does not place half of those of a kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence, Set
from itertools import islice
from operator import itemgetter

from ensemble.spec import Identity

#: Members of a kind that are looked at, at first.
FIRST = 32


class WaitingWindow:
    """Waiting members by kind, in the order in which they are to be placed."""

    def __init__(self, waiting: Sequence[Identity], find_kind: Callable[[Identity], Hashable]) -> None:
        self._kinds: dict[Hashable, deque[tuple[int, Identity]]] = {}
        for number, identity in enumerate(waiting):
            self._kinds.setdefault(find_kind(identity), deque()).append((number, identity))

    def head(self, most: int) -> list[Identity]:
        """The first of each kind, at most so many, in their order."""
        first = [item for kind in self._kinds.values() for item in islice(kind, most)]
        return [identity for _, identity in sorted(first, key=itemgetter(0))]

    def hides(self, most: int) -> bool:
        """Whether `head` leaves out any."""
        return any(len(kind) > most for kind in self._kinds.values())

    def remove(self, members: Set[str], most: int) -> None:
        """Take out members that `head(most)` has."""
        for kind in self._kinds.values() if members else ():
            first = [kind.popleft() for _ in range(min(most, len(kind)))]
            kind.extendleft(item for item in reversed(first) if item[1].member not in members)
