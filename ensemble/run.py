"""A handle on a run, found by its directory: reads its state, sends requests to it, waits for its end.

The run may be driven by this process (`ensemble.submit` returns such a handle), by another process on this
machine, or by one on another node that sees the directory. All communication uses the event log and the directory
`requests/`.
"""

from __future__ import annotations

import dataclasses
import html
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ensemble.events import Event, RequestAnswered, to_dict
from ensemble.result import Result as Result
from ensemble.result import make_result
from ensemble.spec import Member, SpecError, unknown_name
from ensemble.spec.frames import Rows
from ensemble.store import (
    RunDir,
    RunState,
    RunStatus,
    StoreError,
    apply_event,
    end_of_events,
    is_locked,
    read_state,
    withdraw_request,
    write_request,
)
from ensemble.store.follower import LogFollower
from ensemble.store.member_log import read_text
from pipelines.providers import import_object

WIDTH = 120  # columns of a handle's table
POLL_S = 0.1  # between reads of the log of a run that another process drives
ANSWER_TIMEOUT_S = 10.0  # a controller reads requests twice a second, but not while it starts or closes something
FINALIZE_TIMEOUT_S = 60.0  # from the last event of a run until its ledger and report are written


class StateFollower:
    """Keeps the state of a run up to date from its log, which another process may be writing.

    Attributes:
        state: the fold over the events that `read` has returned; always the same object.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.state = RunState()
        self._run_dir, self._log = run_dir, LogFollower(run_dir)

    def read(self) -> list[Event]:
        """Apply the new events of the log to the state; returns them.

        Raises:
            StoreError: there is no log, it is unreadable, or another run's has taken its place.
        """
        events = [event for batch, _ in self._log.read() for event in batch]
        for event in events:
            apply_event(self.state, event)
        return events

    def find_loss(self) -> str | None:
        """A message if the run has not ended but no process drives it any more; else None."""
        return find_loss(self._run_dir, self.state)


def find_loss(run_dir: RunDir, state: RunState) -> str | None:
    """A message if no process drives a run that has not ended; else None."""
    if not state.starts and is_locked(run_dir.events) is False:
        return f"{run_dir.path} has not started, and no process is starting it"
    from ensemble.reporting import describe_lost_controller

    return describe_lost_controller(run_dir, state, silent_s=float("inf"))


class Request:
    """A request to a run; the run may end before it handles the request, which `wait` reports.

    Attributes:
        verb: such as "pause".
    """

    def __init__(self, run_dir: RunDir, verb: str, **fields: Any) -> None:
        self.verb = verb
        self._run_dir = run_dir
        self._log = LogFollower(run_dir, end_of_events(run_dir.events))
        self._file = write_request(run_dir, verb, **fields)

    def wait(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Wait for the run's answer.

        Args:
            timeout_s: time limit. A controller handles requests between two events of its members, but not while
                it starts or closes. After the time limit the request is withdrawn, unless it is `stop`. One that
                the controller has received is waited for as long as it takes.

        Returns:
            The event `request`: `message` is a message for people, `member` the name of a member.

        Raises:
            StoreError: the run refused the request, has ended, or did not answer in time; nothing was done.
        """
        status, until = RunStatus.load(self._run_dir), time.monotonic() + timeout_s
        while (answer := self._poll()) is None:
            why = self._find_obstacle(status.state, time.monotonic() > until and self._file.exists())
            if why is not None:
                # It may have been answered in the meantime.
                if self._withdraw() or (answer := self._poll()) is None:
                    raise StoreError(f"{self._run_dir.path}: {why}")
                break
            time.sleep(POLL_S / 2)
            status.update()
        if not answer.done:
            raise StoreError(f"{self._run_dir.path}: {answer.message}")
        return to_dict(answer)

    def _poll(self) -> RequestAnswered | None:
        """The answer, if it is among the new events of the log."""
        answers = (event for batch, _ in self._log.read() for event in batch if isinstance(event, RequestAnswered))
        return next((answer for answer in answers if answer.request == self._file.stem), None)

    def _find_obstacle(self, state: RunState, late: bool) -> str | None:
        """Why no answer can be expected; None while one can."""
        if state.ended is not None:
            return f"the run has ended; nothing was done ({self.verb})"
        loss = find_loss(self._run_dir, state)
        if loss is None and late:
            done = "the request is kept" if self.verb == "stop" else "nothing was done"
            return f"the run's controller has not answered yet; {done} ({self.verb})"
        return loss

    def _withdraw(self) -> bool:
        return self.verb != "stop" and withdraw_request(self._file)


class Run:
    """A handle on a run.

    All methods but `wait` return at once and can be called from any thread. A method that changes the run returns
    a `Request`, whose `wait` returns the run's answer.
    """

    def __init__(self, run_dir: RunDir, on_event: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.run_dir = run_dir.path
        self._dir = run_dir
        self._on_event = on_event
        self._follower = StateFollower(run_dir)

    @property
    def state(self) -> RunState:
        """The run's state; of a run that another process drives, as of the last call of `attach` or `wait`."""
        return self._follower.state

    def status(self) -> list[dict[str, Any]]:
        """One row per member, as `ensemble status` shows them; see `ensemble.reporting.status_rows`."""
        from ensemble.reporting import RunProjection, describe_lost_controller, status_rows

        status = RunStatus.load(self._dir)
        driver = describe_lost_controller(self._dir, status.state)
        return status_rows(RunProjection.from_status(status, driver))

    def history(self) -> Rows:
        """What members reported: the rows of `metrics.csv`, also while members train.

        Returns:
            Of each epoch of the members' final lineages, and of each evaluation within one, `member`, `epoch`,
            `step`, `attempt`, `t`, `samples`, `wall_s` (None within an epoch), and the metrics by their names in
            loggers, such as `valid/accuracy`. `history().to_frame()` is a
            DataFrame.
        """
        from ensemble.reporting.results import list_epochs

        return Rows(list_epochs(read_state(self._dir.events)))

    def logs(self, member: str, lines: int | None = None) -> str:
        """The output of a member so far.

        Args:
            member: its name.
            lines: only so many of the last lines.

        Raises:
            SpecError: there is no such member.
        """
        return read_text(self._dir.log(self._check_member(member)), lines)

    def cancel(self, member: str | None = None) -> Request:
        """End a member, or all members, permanently: a resume does not continue it."""
        return self._send("cancel", member)

    def pause(self, member: str | None = None) -> Request:
        """Pause a member, or all members: it writes a checkpoint, ends, and frees its resources until `resume`.

        The run does not end while members are paused. A search proposes nothing while all members are paused.
        `stop` also ends a paused run; when it is started again, all members continue.
        """
        return self._send("pause", member)

    def resume(self, member: str | None = None) -> Request:
        """Continue a paused member, or all of them, from its checkpoint as soon as resources are free."""
        return self._send("resume", member)

    def add(self, member: Member | Mapping[str, Any]) -> Request:
        """Add a member, declared like an entry of `Ensemble.members`; `wait()["member"]` is its name.

        It joins the stream at the start of the stream's next epoch, after the members that are waiting already.

        Raises:
            SpecError: it is invalid, or has `weights` or `callbacks`, which a request cannot contain.
        """
        return Request(self._dir, "add", declared=_as_request(member))

    def clone(
        self, member: str, changes: Member | Mapping[str, Any] | None = None, *, warm: bool = False
    ) -> Request:
        """Add a member with the declaration of another one, its seed included, and changes.

        Args:
            member: the name of the other member, in whatever state it is.
            changes: hyperparameters that change, or a `Member` with these and with options that change.
            warm: start with the weights and buffers of the other member's last checkpoint; optimizer, schedule,
                loss scale and epochs start again. The run keeps a copy of that checkpoint for the clone.

        Raises:
            SpecError: there is no such member, or the changes are invalid.
        """
        declared = _as_request({} if changes is None else changes)
        return Request(self._dir, "add", declared=declared, **{"from": self._check_member(member), "warm": warm})

    def stop(self) -> Request:
        """Stop the run: all members write a checkpoint and end. `ensemble.resume` continues it."""
        return Request(self._dir, "stop")

    def wait(self) -> Result:
        """Wait for the end of the run. A notebook shows its progress meanwhile.

        Ctrl-C ends the wait, but not the run, which another process drives.

        Raises:
            StoreError: the process that drives the run is gone.
        """
        with import_object("ensemble.reporting.notebook:watch")() as view:
            while self.state.ended is None:
                loss = self._follower.find_loss()  # before the log is read, so that its last events are included
                self._poll()
                view.update(self.state)
                if self.state.ended is None:
                    if loss is not None:
                        raise StoreError(loss)
                    time.sleep(POLL_S)
        until = time.monotonic() + FINALIZE_TIMEOUT_S
        while is_locked(self._dir.events) and time.monotonic() < until:
            time.sleep(POLL_S)
        return make_result(self._dir)

    def __repr__(self) -> str:
        from ensemble.reporting import (
            RunProjection,
            describe_lost_controller,
            status_head,
            status_lines,
        )

        try:
            status = RunStatus.load(self._dir)
            run = RunProjection.from_status(status, describe_lost_controller(self._dir, status.state))
            return "\n".join([status_head(run), *status_lines(run, WIDTH)])
        except (StoreError, OSError) as error:  # the directory is gone
            return f"{type(self).__name__}({str(self.run_dir)!r}): {error}"

    def _repr_html_(self) -> str:
        try:
            return str(import_object("ensemble.reporting.notebook:run_html")(self._dir))
        except (StoreError, OSError) as error:
            return f"<p>{html.escape(str(error))}</p>"

    def _poll(self) -> None:
        """Read the new events of the log, and pass them to `on_event`."""
        for event in self._follower.read():
            if self._on_event is not None:
                self._on_event(to_dict(event))

    def _send(self, verb: str, member: str | None) -> Request:
        return Request(self._dir, verb, **({} if member is None else {"member": self._check_member(member)}))

    def _check_member(self, member: str) -> str:
        members = self._members()
        if member not in members:
            raise SpecError(unknown_name(f"{self.run_dir} has no member", member, members))
        return member

    def _members(self) -> list[str]:
        return list(RunStatus.load(self._dir).state.members)


def _as_request(member: Member | Mapping[str, Any]) -> dict[str, Any]:
    """The declared fields of a member as a request contains them.

    Raises:
        SpecError: it is invalid, or has `weights` or `callbacks`, which a request cannot contain.
    """
    declared = member if isinstance(member, Member) else Member(member)
    if declared.weights is not None:
        raise SpecError("Member.weights cannot be added to a run; declare that member from the start")
    if declared.callbacks is not None:
        raise SpecError("Member.callbacks cannot be added to a run; declare that member from the start")
    fields = {field.name: getattr(declared, field.name) for field in dataclasses.fields(Member)}
    if declared.start is not None:  # the run's controller may be in another directory
        fields["start"] = str(Path(declared.start).expanduser().absolute())
    return {name: value for name, value in fields.items() if value is not None}


def attach(run_dir: str | os.PathLike[str]) -> Run:
    """A handle on the run in a directory, whichever process drives it.

    Args:
        run_dir: the run directory.

    Raises:
        StoreError: there is no run in the directory.
    """
    run = Run(RunDir(run_dir))
    run._poll()
    return run
