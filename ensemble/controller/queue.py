"""The queue of members waiting to be placed, and user requests about single members.

A member is declared in the log before it waits here. The controller takes from the line what `schedule.place` has
found room for; `Attempts` has the members that hold a place, are to be tried again, or were paused.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ensemble.controller.attempts import Attempts
from ensemble.controller.failures import PendingRetry
from ensemble.search.trials import ImpossibleError, Trials
from ensemble.spec import Identity, Member, SpecError
from ensemble.store import MemberState, RunState
from ensemble.store.member import ENDED

NO_COHORT = -1  # of a member that was paused before it had a place

Emit = Callable[..., None]


class RefusedError(Exception):
    """What was asked cannot be done, and why, in a line for the one who asked."""


class MemberQueue:
    """The members that wait, in order; logs through `emit`.

    Args:
        explain_unplaceable: of a member's number and declaration, why no node can hold it; None where one can.

    Attributes:
        waiting: members that hold no place and belong to no cohort that is under way.
    """

    def __init__(
        self,
        state: RunState,
        trials: Trials,
        attempts: Attempts,
        emit: Emit,
        explain_unplaceable: Callable[[int, Member], str | None],
    ) -> None:
        self.waiting: list[Identity] = []
        self._state, self._trials, self._attempts, self._emit, self._explain_unplaceable = (
            state,
            trials,
            attempts,
            emit,
            explain_unplaceable,
        )
        self._all_paused = False

    def open(self) -> None:
        """Let those of a run that goes on wait again; of a fixed list all are declared at once."""
        if not self._trials.streaming:
            for _ in range(self._trials.left()):
                self._next()
        for member in list(self._state.members.values()):
            if member.state == "waiting" or member.in_vain:
                self._redeclare(member)
            if member.state == "waiting":
                first_epoch = {"first_epoch": member.first_epoch}
                self.waiting.append(_identity(member.identity | first_epoch))

    def _redeclare(self, member: MemberState) -> None:
        """Who has nothing to go on from is what the ensemble declares now."""
        begins = member.checkpoint is None and not member.identity.get("added")
        now = self._trials.listed(member.number) if begins else None
        if now is not None and not now.matches(member.identity):
            self._declare(now)

    def left(self) -> int:
        """Trials that may be proposed now: none while the whole run is paused."""
        return 0 if self._all_paused else self._trials.left()

    def propose(self) -> None:
        """Let the next trial of a search wait; proposals that are impossible fail, and make way for others."""
        while self._trials.left() and not self._trials.abort_reason:
            identity = self._next()
            if identity is not None:
                self.waiting.append(identity)
                return

    def _next(self) -> Identity | None:
        """The next member, declared; None where it has failed already."""
        try:
            identity = self._trials.next()
        except ImpossibleError as error:
            self._declare(error.identity)
            self._emit(
                "failed",
                member=error.identity.member,
                attempt=0,
                error=str(error),
                reason="impossible",
                retry=False,
            )
            return None
        self._declare(identity)
        return identity

    def remove(self, placed: set[str]) -> None:
        """These wait no longer."""
        self.waiting = [identity for identity in self.waiting if identity.member not in placed]

    def give_up(self, member: str, why: str) -> None:
        """A member that can never be placed has failed; a resume, maybe on other nodes, tries it again."""
        self._leave(member)
        known = self._state.members[member]
        self._emit("failed", member=member, attempt=known.attempt, error=why, reason="error", retry=False)
        self._trials.ended(known.number, "failed", {})
        self._attempts.changed = True

    def __bool__(self) -> bool:
        """Whether somebody is still to come, now or once they are asked to go on."""
        return bool(self.waiting or self._attempts.returning or self._attempts.paused or self._trials.left())

    # -- what is asked ------------------------------------------------------------------------------------------

    def answer(self, request: dict[str, Any], now: float, until: float, *, stopping: bool) -> str:
        """Do what was asked about one member, or about all of them; says what was done.

        Args:
            until: how long a member may take to write a checkpoint.
            stopping: whether the run is about to end, resumably.

        Raises:
            RefusedError: it cannot be done.
        """
        verb, member = request["verb"], request.get("member")
        if verb not in ("cancel", "pause", "resume", "add"):
            raise RefusedError(f"there is no request {verb!r} (valid: stop, cancel, pause, resume, add)")
        if stopping and verb != "cancel":
            raise RefusedError("the run is being stopped; `ensemble resume` goes on with it")
        if verb == "add":
            return self._add(request)
        if member is not None and member not in self._state.members:
            raise RefusedError(f"there is no member {member!r}")
        asked = [str(member)] if member is not None else list(self._state.members)
        if verb == "cancel":
            return self._cancel(asked, now, every=member is None and not stopping)
        if verb == "pause":
            return self._pause(asked, until, every=member is None)
        return self._resume(asked, every=member is None)

    def _declare(self, identity: Identity) -> None:
        self._emit("member", **identity.as_dict())

    def _cancel(self, members: list[str], now: float, *, every: bool) -> str:
        done = []
        for member in self._open(members):
            if not self._attempts.cancel(member, now):
                self.remove({member})
                known = self._state.members[member]
                self._emit("cancelled", member=member, attempt=known.attempt)
                self._trials.ended(known.number, "cancelled", {})
            done.append(member)
        while every and self._trials.left():
            identity = self._next()
            if identity is not None:
                self._emit("cancelled", member=identity.member, attempt=0)
                self._trials.ended(identity.number, "cancelled", {})
                done.append(identity.member)
        self._attempts.changed = True
        return f"cancelling {_names(done)}" if done else "nothing is left to cancel"

    def _pause(self, members: list[str], until: float, *, every: bool) -> str:
        self._all_paused |= every
        done = [member for member in self._open(members) if not self._attempts.holds(member)]
        for member in done:
            if not self._attempts.pause(member, until):
                self._attempts.paused.append(self._leave(member))
                self._emit("paused", member=member, attempt=self._state.members[member].attempt)
        self._attempts.changed = True
        return f"pausing {_names(done)}" if done else "paused already"

    def _resume(self, members: list[str], *, every: bool) -> str:
        done = [member for member in self._open(members) if self._attempts.holds(member)]
        held_back = every and self._all_paused and bool(self._trials.left())
        self._all_paused &= not every
        for member in done:
            if not self._attempts.unpause(member):
                self._return(*self._leave(member))
                self._emit("resumed", member=member, attempt=self._state.members[member].attempt)
        self._attempts.changed = True
        if not done and not held_back:
            raise RefusedError("nothing is paused" if every else f"{members[0]} is not paused")
        return f"{_names(done)} in line again" if done else "trials are proposed again"

    def _add(self, request: dict[str, Any]) -> str:
        number = 1 + max((known.number for known in self._state.members.values()), default=-1)
        try:
            given = Member(**request["declared"])
            unplaceable = self._explain_unplaceable(number, given)
            if unplaceable is not None:
                raise RefusedError(unplaceable)
            identity = self._trials.add(given)
        except (SpecError, TypeError, KeyError) as error:
            raise RefusedError(str(error)) from None
        cohorts = Counter(cohort for _, cohort in self._attempts.reading())
        self._declare(identity)
        request["member"] = identity.member
        if cohorts and not self.waiting and not self._trials.streaming:
            # The stream that most read, and which it joins at the boundary of an epoch.
            self._attempts.returning.append((identity, cohorts.most_common(1)[0][0]))
        else:
            self.waiting.append(identity)
        self._attempts.changed = True
        strange = _strange(given.params, [known.params for known in self._state.members.values()])
        unheard = f"; no other member has {strange}" if strange and not self._trials.streaming else ""
        unheard += f"; the search learns nothing from it, {identity.outside}" if identity.outside else ""
        return f"{identity.member} is in line{unheard}"

    def _return(self, identity: Identity, cohort: int | None) -> None:
        """Back to its cohort, or where nobody reads that stream any more into a cohort of those that wait."""
        coming = {cohort for _, cohort in (*self._attempts.reading(), *self._attempts.returning)}
        if cohort is None or cohort in coming | self._attempts.failures.pending_cohorts():
            self._attempts.returning.append((identity, cohort))
        else:
            self.waiting.append(identity)

    def _open(self, members: Iterable[str]) -> list[str]:
        """Those of them of which something may still come.

        Raises:
            RefusedError: it is one, and it has ended.
        """
        members = list(members)
        states = {member: self._state.members[member].state for member in members}
        if len(members) == 1 and states[members[0]] in ENDED:
            raise RefusedError(f"{members[0]} has ended already ({states[members[0]]})")
        return [member for member in members if states[member] not in ENDED]

    def _leave(self, member: str) -> PendingRetry:
        """Take a member that has no processes from where it waits."""
        found = self._attempts.withdraw(member)
        if found is None:
            found = (next(identity for identity in self.waiting if identity.member == member), NO_COHORT)
            self.waiting.remove(found[0])
        return found


def _strange(params: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """Hyperparameters that no other member has: misspelt, maybe."""
    return " or ".join(repr(name) for name in params if not any(name in other for other in others))


def _names(members: list[str], most: int = 6) -> str:
    more = f" and {len(members) - most} more" if len(members) > most else ""
    return ", ".join(members[:most]) + more


def _identity(fields: dict[str, Any]) -> Identity:
    names = {field.name for field in dataclasses.fields(Identity)}
    return Identity(**{name: value for name, value in fields.items() if name in names})
