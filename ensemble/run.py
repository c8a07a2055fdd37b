"""A handle on a run, by its directory: how it stands, what can be asked of it, and its end.

The run itself may be driven by this process (`ensemble.submit` hands out such a handle), by another one on this
machine, or by one on another node that sees the directory: everything goes through the event log and `requests/`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble.reporting import controller_gone, status_rows
from ensemble.spec import Member, SpecError, unknown_name
from ensemble.store import (
    RunDir,
    RunState,
    RunStatus,
    StoreError,
    apply_event,
    end_of_events,
    is_locked,
    read_events_from,
    withdraw_request,
    write_request,
)

Event = dict[str, Any]

LOOK_EVERY_S = 0.1  # at the log of a run that another process drives
ANSWER_S = 10.0  # a controller looks for requests twice a second, unless it is starting or closing something
WRITE_UP_S = 60.0  # what a run may take from its last event until its ledger and report are written


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        members: a row a member, as `ensemble status` shows them.
        best: the row of the finished member with the best objective, None when none finished.
        combined: the `combined` event (metrics of the ensemble, its best and mean member, weights; where nothing
            was combined `metrics` is None and `reason` says why), None when no member finished.
        ledger: what the run used, by member and role; None where it could not be computed.
        stopped: why the run was stopped, None when it ran to its end.
        run_dir: where everything is.
    """

    members: list[dict[str, Any]]
    best: dict[str, Any] | None
    combined: dict[str, Any] | None
    ledger: dict[str, Any] | None
    stopped: str | None
    run_dir: Path


class Followed:
    """A run's state, kept up to date from its log, which another process may be writing.

    Attributes:
        state: the fold over what `read` has seen so far; always the same object.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.state = RunState()
        self._run_dir, self._offset = run_dir, 0

    def read(self) -> list[Event]:
        """Take in what is new in the log; returns it."""
        events, self._offset = read_events_from(self._run_dir.events, self._offset)
        for event in events:
            apply_event(self.state, event)
        return events

    def gone(self) -> str | None:
        """A line that says so where the run has not ended but nobody drives it any more."""
        return _gone(self._run_dir, self.state)


def _gone(run_dir: RunDir, state: RunState) -> str | None:
    if not state.header and is_locked(run_dir.events) is False:
        return f"{run_dir.path} has not begun, and nobody is about to begin it"
    return controller_gone(run_dir, state)


class Request:
    """Something that was asked of a run; the run may end before it is heeded, which `wait` would say.

    Attributes:
        verb: such as "pause".
    """

    def __init__(self, run_dir: RunDir, verb: str, **fields: Any) -> None:
        self.verb = verb
        self._run_dir = run_dir
        self._begin = end_of_events(run_dir.events)
        self._file = write_request(run_dir, verb, **fields)

    def wait(self, timeout_s: float = ANSWER_S) -> Event:
        """What the run has answered: the event `asked`, in which `said` is a line for people and `member` a name.

        Args:
            timeout_s: how long the controller is waited for; it looks at requests between two events of its
                members, and not while it opens or closes. Past it the request is withdrawn, `stop` excepted.

        Raises:
            StoreError: it was refused, or came too late; nothing has been done. Or it was not answered in time.
        """
        status, until = RunStatus.load(self._run_dir), time.monotonic() + timeout_s
        while (answer := self._look()) is None:
            why = self._hopeless(status.state, time.monotonic() > until)
            if why is not None:
                # It may have been answered between the last look and this one.
                if self._take_back() or (answer := self._look()) is None:
                    raise StoreError(f"{self._run_dir.path}: {why}")
                break
            time.sleep(LOOK_EVERY_S / 2)
            status.update()
        if not answer["done"]:
            raise StoreError(f"{self._run_dir.path}: {answer['said']}")
        return answer

    def _look(self) -> Event | None:
        """The answer, if it is in what is new in the log."""
        events, self._begin = read_events_from(self._run_dir.events, self._begin)
        mine = [event for event in events if event["type"] == "asked" and event["request"] == self._file.stem]
        return mine[0] if mine else None

    def _hopeless(self, state: RunState, late: bool) -> str | None:
        """Why no answer is to be expected; None while one is."""
        if state.ended is not None:
            return f"the run has ended; nothing was done ({self.verb})"
        gone = _gone(self._run_dir, state)
        if gone is None and late:
            done = "it will still be heeded" if self.verb == "stop" else "nothing was done"
            return f"the run's controller has not answered yet; {done} ({self.verb})"
        return gone

    def _take_back(self) -> bool:
        return self.verb != "stop" and withdraw_request(self._file)


class Run:
    """A handle on a run.

    Everything but `wait` returns at once and may be called from any thread. What is asked of the run is heeded
    within a moment; the `Request` that is handed back can be waited for, to learn what became of it.
    """

    def __init__(self, run_dir: RunDir, on_event: Callable[[Event], None] | None = None) -> None:
        self.run_dir = run_dir.path
        self._dir = run_dir
        self._on_event = on_event
        self._followed = Followed(run_dir)

    @property
    def state(self) -> RunState:
        """The run's state; of a run that another process drives, as of the last call of anything here."""
        return self._followed.state

    def status(self) -> list[dict[str, Any]]:
        """One row a member, as `ensemble status` shows them; see `ensemble.reporting.status_rows`."""
        status = RunStatus.load(self._dir)
        return status_rows(status.state, status.account.members())

    def logs(self, member: str) -> str:
        """What a member printed so far; a SpecError names the members for another name."""
        path = self._dir.log(self._known(member))
        return path.read_text(errors="replace") if path.exists() else ""

    def cancel(self, member: str | None = None) -> Request:
        """End a member, or all of them, for good: nothing of it is kept for a resume."""
        return self._ask("cancel", member)

    def pause(self, member: str | None = None) -> Request:
        """Let a member, or all of them, write a checkpoint, end, and give up its place until `resume`.

        The run does not end meanwhile: it waits for those that are paused. A search that is paused whole proposes
        nothing. `stop` ends a run that is paused, and whatever starts it again lets all go on.
        """
        return self._ask("pause", member)

    def resume(self, member: str | None = None) -> Request:
        """Let a member that is paused, or all of them, go on from its checkpoint as soon as there is a place."""
        return self._ask("resume", member)

    def add(self, member: Member | Mapping[str, Any]) -> Request:
        """Add a member, declared as one of `Ensemble.members`; `wait()["member"]` is its name.

        It joins the running stream at the next boundary of an epoch, or is in line behind those that wait.

        Raises:
            SpecError: it cannot be, or has `weights`, which cannot be asked for in words.
        """
        declared = member if isinstance(member, Member) else Member(member)
        if declared.weights is not None:
            raise SpecError("Member.weights cannot be added to a run; declare that member from the start")
        fields = {field.name: getattr(declared, field.name) for field in dataclasses.fields(Member)}
        return Request(self._dir, "add", declared={k: v for k, v in fields.items() if v is not None})

    def stop(self) -> Request:
        """Let all members write a checkpoint and end the run; `resume` goes on from there."""
        return Request(self._dir, "stop")

    def wait(self) -> Result:
        """Wait for the end of the run.

        Ctrl-C ends the wait; the run, which another process drives, goes on.

        Raises:
            StoreError: the process that drives the run is gone.
        """
        while self.state.ended is None:
            gone = self._followed.gone()  # before the log is read: what it wrote last counts
            self._look()
            if self.state.ended is None:
                if gone is not None:
                    raise StoreError(gone)
                time.sleep(LOOK_EVERY_S)
        until = time.monotonic() + WRITE_UP_S
        while is_locked(self._dir.events) and time.monotonic() < until:
            time.sleep(LOOK_EVERY_S)
        return result_of(self._dir)

    def _look(self) -> None:
        """Take in what is new in the log."""
        for event in self._followed.read():
            if self._on_event is not None:
                self._on_event(event)

    def _ask(self, verb: str, member: str | None) -> Request:
        return Request(self._dir, verb, **({} if member is None else {"member": self._known(member)}))

    def _known(self, member: str) -> str:
        known = self._members()
        if member not in known:
            raise SpecError(unknown_name(f"{self.run_dir} has no member", member, known))
        return member

    def _members(self) -> list[str]:
        return list(RunStatus.load(self._dir).state.members)


def attach(run_dir: str | os.PathLike[str]) -> Run:
    """A handle on the run in a directory, whoever drives it: to look at it, to ask something of it, to wait.

    Raises:
        StoreError: there is no run.
    """
    known = RunDir(run_dir)
    run = Run(known)
    run._look()
    return run


def result_of(run_dir: RunDir) -> Result:
    """What the run in a directory came to, so far."""
    status = RunStatus.load(run_dir)
    state, rows = status.state, status_rows(status.state, status.account.members())
    finished = [row for row in rows if row["state"] == "finished" and row["metric"] is not None]
    better = max if state.direction == "max" else min
    ended = state.ended or {}
    try:
        ledger = json.loads(run_dir.ledger.read_text())
    except FileNotFoundError:
        ledger = None
    return Result(
        members=rows,
        best=better(finished, key=lambda row: float(row["metric"])) if finished else None,
        combined=state.combined,
        ledger=ledger,
        stopped=ended.get("reason") if ended.get("type") == "run_stopped" else None,
        run_dir=run_dir.path,
    )
