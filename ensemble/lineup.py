"""The line before the places: members that wait for one, and what users ask about single members.

A member is declared in the log before it waits here. The controller takes from the line what `schedule.place` has
found room for; `Attempts` has the members that hold a place, or are to be tried again.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from ensemble.attempts import Attempts
from ensemble.spec import Identity
from ensemble.store import RunState
from ensemble.trials import ImpossibleError, Trials

log = logging.getLogger(__name__)


class Lineup:
    """Who waits, in order; tells the log through `emit`.

    Attributes:
        waiting: members that hold no place and were not placed in this session.
    """

    def __init__(self, state: RunState, trials: Trials, attempts: Attempts, emit: Callable[..., None]) -> None:
        self.waiting: list[Identity] = []
        self._state, self._trials, self._attempts, self._emit = state, trials, attempts, emit

    def open(self) -> None:
        """Let those of a run that goes on wait again; of a fixed list all are declared at once."""
        if not self._trials.streaming:
            for _ in range(self._trials.left()):
                self._next()
        for member in self._state.members.values():
            if member.state == "waiting":
                first_epoch = {"first_epoch": member.first_epoch}
                self.waiting.append(_identity(member.identity | first_epoch))

    def propose(self) -> None:
        """Let the next trial of a search wait; proposals that are impossible fail, and make way for others."""
        while self._trials.left() and not self._trials.in_vain:
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

    def answer(self, request: dict[str, Any], now: float, *, stopping: bool) -> None:
        """Do what was asked about one member, or about all of them.

        Args:
            stopping: whether the run ends: then no trial is proposed any more.
        """
        verb, member = request["verb"], request.get("member")
        if verb == "cancel" and member is None:
            for known in [m.id for m in self._state.members.values()]:
                self._cancel(known, now)
            while not stopping and self._trials.left():
                identity = self._next()
                if identity is not None:
                    self._emit("cancelled", member=identity.member, attempt=0)
                    self._trials.ended(identity.number, "cancelled", {})
        elif verb == "cancel" and member in self._state.members:
            self._cancel(str(member), now)
        else:
            log.warning(
                "ignoring the request %r: valid are stop, and cancel of a member that is declared", request
            )

    def _declare(self, identity: Identity) -> None:
        self._emit("member", **identity.as_dict())

    def _cancel(self, member: str, now: float) -> None:
        if self._attempts.cancel(member, now):
            return
        for identity in self.waiting:
            if identity.member == member:
                self.waiting.remove(identity)
                self._emit("cancelled", member=member, attempt=self._state.members[member].attempt)
                self._trials.ended(identity.number, "cancelled", {})
                self._attempts.changed = True
                return


def _identity(fields: dict[str, Any]) -> Identity:
    names = {field.name for field in dataclasses.fields(Identity)}
    return Identity(**{name: value for name, value in fields.items() if name in names})
