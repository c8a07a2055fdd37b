"""The queue of members waiting to be placed, and user requests about single members.

A member is declared in the log before it waits here.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ensemble.controller.actions import Add, EndTrial, Propose
from ensemble.controller.attempt_commands import AttemptCommands
from ensemble.controller.failures import FailureTracker
from ensemble.controller.session_state import PendingRetry, SessionState
from ensemble.spec import Identity, Member, SpecError
from ensemble.store.member import ENDED

NO_COHORT = -1  # of a member that was paused before it had a place


class RefusedError(Exception):
    """A request cannot be fulfilled; the message says why, in a line for the user who made it."""


class MemberQueue:
    """The members that wait.

    Args:
        session: what all parts of the session share.
        streaming: whether members are proposed when there is room for them, and not all at the start.
        explain_unplaceable: of a member's number and declaration, why no node can hold it; None where one can.
    """

    def __init__(
        self,
        session: SessionState,
        commands: AttemptCommands,
        failures: FailureTracker,
        *,
        streaming: bool,
        explain_unplaceable: Callable[[int, Member], str | None],
    ) -> None:
        self._session, self._commands, self._failures = session, commands, failures
        self._streaming = streaming
        self._state, self._log, self._actions = session.run, session.log, session.actions
        self._explain_unplaceable = explain_unplaceable
        self._all_paused = False
        self._to_cancel = 0  # of the members that were asked for: they are cancelled when they are proposed

    def open(self, redeclared: Mapping[str, Identity]) -> None:
        """Let the members of a run that goes on wait again; of a list propose all the others.

        Args:
            redeclared: members that begin anew, as the ensemble declares them now.
        """
        for member in list(self._state.members.values()):
            if member.id in redeclared:
                self._declare(redeclared[member.id])
            if member.state == "waiting":
                first_epoch = {"first_epoch": member.first_epoch}
                self._session.waiting.append(_identity(member.identity | first_epoch))
        if not self._streaming:
            self.propose(self._session.trials_left)

    def left(self) -> int:
        """Trials that may be proposed now: none while the whole run is paused."""
        return 0 if self._all_paused else self._session.trials_left

    def propose(self, count: int) -> None:
        """Ask for the next members; each comes as a `proposed` or an `impossible` event."""
        self._session.trials_left -= count
        self._actions += [Propose()] * count

    def handle_proposal(self, event: Mapping[str, Any]) -> None:
        """A member was proposed: it waits. One that is impossible fails, and makes way for another."""
        identity: Identity = event["identity"]
        self._declare(identity)
        if event["type"] == "impossible":
            failed = {"error": event["error"], "reason": "impossible", "retry": False}
            self._log("failed", member=identity.member, attempt=0, **failed)
        elif self._to_cancel:
            self._to_cancel -= 1
            self._session.cancel(identity)
        else:
            self._session.waiting.append(identity)
        self._session.placement_due = True

    def remove(self, placed: set[str]) -> None:
        """These wait and return no longer."""
        session = self._session
        session.waiting = [identity for identity in session.waiting if identity.member not in placed]
        session.returning = [item for item in session.returning if item[0].member not in placed]

    def give_up(self, member: str, why: str) -> None:
        """A member that can never be placed has failed; a resume, maybe on other nodes, tries it again."""
        self._leave(member)
        known = self._state.members[member]
        self._log("failed", member=member, attempt=known.attempt, error=why, reason="error", retry=False)
        self._actions.append(EndTrial(known.number, "failed"))
        self._session.placement_due = True

    def __bool__(self) -> bool:
        """Whether somebody is still to come, now or once they are asked to go on."""
        session = self._session
        return bool(session.waiting or session.returning or session.paused or session.trials_left)

    # -- what is asked ------------------------------------------------------------------------------------------

    def fulfil(self, request: Mapping[str, Any], until: float) -> str | None:
        """Fulfil a request about one member, or about all of them.

        Args:
            until: how long a member may take to write a checkpoint.

        Returns:
            What was done; None where that is known only once a member was added (`handle_addition`).

        Raises:
            RefusedError: it cannot be done.
        """
        verb, member = request["verb"], request.get("member")
        if verb not in ("cancel", "pause", "resume", "add"):
            raise RefusedError(f"there is no request {verb!r} (valid: stop, cancel, pause, resume, add)")
        stopping = self._session.stop_reason is not None
        if stopping and verb != "cancel":
            raise RefusedError("the run is being stopped; `ensemble resume` goes on with it")
        if verb == "add":
            self._add(request)
            return None
        if member is not None and member not in self._state.members:
            raise RefusedError(f"there is no member {member!r}")
        asked = [str(member)] if member is not None else list(self._state.members)
        if verb == "cancel":
            return self._cancel(asked, every=member is None and not stopping)
        if verb == "pause":
            return self._pause(asked, until, every=member is None)
        return self._resume(asked, every=member is None)

    def _declare(self, identity: Identity) -> None:
        self._log("member", **identity.as_dict())

    def _cancel(self, members: list[str], *, every: bool) -> str:
        done = []
        for member in self._open(members):
            if not self._commands.cancel(member):
                self._session.cancel(self._leave(member)[0])
            done.append(member)
        if every and self._session.trials_left:
            first = self._next_number()
            done += [f"member-{first + number}" for number in range(self._session.trials_left)]
            self._to_cancel += self._session.trials_left
            self.propose(self._session.trials_left)
        self._session.placement_due = True
        return f"cancelling {_names(done)}" if done else "nothing is left to cancel"

    def _pause(self, members: list[str], until: float, *, every: bool) -> str:
        self._all_paused |= every
        done = [member for member in self._open(members) if not self._commands.holds(member)]
        for member in done:
            if not self._commands.pause(member, until):
                self._session.paused.append(self._leave(member))
                self._log("paused", member=member, attempt=self._state.members[member].attempt)
        self._session.placement_due = True
        return f"pausing {_names(done)}" if done else "paused already"

    def _resume(self, members: list[str], *, every: bool) -> str:
        done = [member for member in self._open(members) if self._commands.holds(member)]
        held_back = every and self._all_paused and bool(self._session.trials_left)
        self._all_paused &= not every
        for member in done:
            if not self._commands.unpause(member):
                self._return(*self._leave(member))
                self._log("resumed", member=member, attempt=self._state.members[member].attempt)
        self._session.placement_due = True
        if not done and not held_back:
            raise RefusedError("nothing is paused" if every else f"{members[0]} is not paused")
        return f"{_names(done)} in line again" if done else "trials are proposed again"

    def _next_number(self) -> int:
        return 1 + max((known.number for known in self._state.members.values()), default=-1)

    def _add(self, request: Mapping[str, Any]) -> None:
        try:
            given = Member(**request["declared"])
            unplaceable = self._explain_unplaceable(self._next_number(), given)
        except (SpecError, TypeError, KeyError) as error:
            raise RefusedError(str(error)) from None
        if unplaceable is not None:
            raise RefusedError(unplaceable)
        self._actions.append(Add(request, given))

    def handle_addition(self, identity: Identity) -> str:
        """A member was added: it waits.

        Returns:
            What was done, for the user who asked for it.
        """
        session = self._session
        others = [known.params for known in self._state.members.values()]
        cohorts = Counter(cohort for _, cohort in session.feeders_read())
        self._declare(identity)
        if cohorts and not session.waiting and not self._streaming:
            # The stream that most read, and which it joins at the boundary of an epoch.
            session.returning.append((identity, cohorts.most_common(1)[0][0]))
        else:
            session.waiting.append(identity)
        session.placement_due = True
        unknown = _list_unknown(identity.params, others)
        note = f"; no other member has {unknown}" if unknown and not self._streaming else ""
        note += f"; the search learns nothing from it, {identity.outside}" if identity.outside else ""
        return f"{identity.member} is in line{note}"

    def _return(self, identity: Identity, cohort: int | None) -> None:
        """Back to its cohort, or where nobody reads that stream any more into a cohort of those that wait."""
        session = self._session
        coming = {cohort for _, cohort in (*session.feeders_read(), *session.returning)}
        if cohort is None or cohort in coming | self._failures.pending_cohorts():
            session.returning.append((identity, cohort))
        else:
            session.waiting.append(identity)

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
        found = self._commands.withdraw(member)
        if found is None:
            waiting = self._session.waiting
            found = (next(identity for identity in waiting if identity.member == member), NO_COHORT)
            waiting.remove(found[0])
        return found


def _list_unknown(params: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """The hyperparameters that no other member has: they may be misspelt."""
    return " or ".join(repr(name) for name in params if not any(name in other for other in others))


def _names(members: list[str], most: int = 6) -> str:
    more = f" and {len(members) - most} more" if len(members) > most else ""
    return ", ".join(members[:most]) + more


def _identity(fields: dict[str, Any]) -> Identity:
    names = {field.name for field in dataclasses.fields(Identity)}
    return Identity(**{name: value for name, value in fields.items() if name in names})
