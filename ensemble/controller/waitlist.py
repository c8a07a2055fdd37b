"""The members of a run that have no place: the lists, and the transitions between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from ensemble.spec import Identity

#: A member to be placed again, and its cohort; None: it prepares its own batches.
PendingRetry = tuple[Identity, int | None]


def leave_out(waiting: Sequence[Identity], members: Set[str]) -> list[Identity]:
    """Thousands of members without some, of which most are among the first: the others are copied as they are."""
    searched, first, end = set(members), list[Identity](), 0
    while searched and end < len(waiting):
        identity, end = waiting[end], end + 1
        if identity.member in searched:
            searched.remove(identity.member)
        else:
            first.append(identity)
    return [*first, *waiting[end:]]


@dataclass(slots=True)
class Waitlist:
    """Members without a place. Others read the lists; only these methods change them.

    Attributes:
        waiting: to be placed in a new cohort, in order.
        returning: to be placed again, each in its cohort.
        deferred: to be placed again later, each with the time, in seconds of the controller's clock.
        paused: by a user.
        changes: how often members were added, or withdrawn, since the start.
        trials_left: members that can still be proposed.
        trials_ready: those of them that can be proposed now; the others wait for the end of further members.
    """

    trials_left: int = 0
    trials_ready: int = 0
    changes: int = 0
    waiting: list[Identity] = field(default_factory=list)
    returning: list[PendingRetry] = field(default_factory=list)
    deferred: list[tuple[float, PendingRetry]] = field(default_factory=list)
    paused: list[PendingRetry] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether members wait for a place, are paused, or can still be proposed."""
        return bool(self.waiting or self.returning or self.paused or self.trials_left)

    def __iter__(self) -> Iterator[Identity]:
        """The members to be placed, returning ones behind the others."""
        yield from self.waiting
        yield from (identity for identity, _ in self.returning)

    def list_all(self) -> list[Identity]:
        """As iteration, at once: there may be thousands."""
        return [*self.waiting, *(identity for identity, _ in self.returning)]

    def is_paused(self, member: str) -> bool:
        """Whether a member is among the paused ones."""
        return any(identity.member == member for identity, _ in self.paused)

    def add(self, identity: Identity) -> None:
        """A member waits for a place in a new cohort."""
        self.changes += 1
        self.waiting.append(identity)

    def add_returning(self, items: Iterable[PendingRetry]) -> None:
        """Members wait for a place in their cohorts."""
        self.changes += 1
        self.returning += items

    def defer(self, item: PendingRetry, until: float) -> None:
        """A member waits until then before it waits for a place."""
        self.deferred.append((until, item))

    def return_due(self, now_s: float) -> bool:
        """Members whose wait is over wait for a place in their cohorts; whether there are any."""
        due = [item for item in self.deferred if item[0] <= now_s]
        self.deferred = [item for item in self.deferred if item not in due]
        self.changes += bool(due)
        self.returning += [item for _, item in due]
        return bool(due)

    @property
    def cohorts(self) -> set[int | None]:
        """The cohorts to which members will return."""
        return {cohort for _, cohort in (*self.returning, *(item for _, item in self.deferred))}

    def add_paused(self, item: PendingRetry) -> None:
        """A member has no processes any more, and is paused."""
        self.paused.append(item)

    def propose(self, count: int) -> None:
        self.trials_left -= count
        self.trials_ready -= count

    def arrange(self, waiting: Sequence[Identity], returning: Sequence[PendingRetry]) -> None:
        """The same members in another order, or with other declarations, or in the other list."""
        self.waiting, self.returning = list(waiting), list(returning)

    def remove(self, placed: Set[str]) -> None:
        """Members have been placed."""
        self.waiting = leave_out(self.waiting, placed)
        self.returning = [item for item in self.returning if item[0].member not in placed]

    def withdraw(self, member: str) -> PendingRetry | None:
        """Take out a member that returns, now or later, or is paused; None where it does nothing of that."""
        deferred = [item for _, item in self.deferred]
        withdrawn = next(
            (pending for pending in (*self.returning, *deferred, *self.paused) if pending[0].member == member),
            None,
        )
        if withdrawn is None:
            return None
        self.changes += 1
        self.returning = [item for item in self.returning if item is not withdrawn]
        self.deferred = [pending for pending in self.deferred if pending[1] is not withdrawn]
        self.paused = [item for item in self.paused if item is not withdrawn]
        return withdrawn

    def withdraw_waiting(self, member: str) -> Identity:
        """Take out a member that waits for a place in a new cohort."""
        withdrawn = next(identity for identity in self.waiting if identity.member == member)
        self.changes += 1
        self.waiting.remove(withdrawn)
        return withdrawn
