"""`submit`, `resume`, and what they hand back: a `Run`, and from its `wait()` a `Result`."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble.controller import Controller
from ensemble.execute import Executor, make_executor
from ensemble.interrupts import caught, exit_in_order, interrupted
from ensemble.spec import Ensemble, SpecError
from ensemble.store import EventLog, RunDir, RunState, StoreError, fold, read_events, status_rows, write_request
from ensemble.train.reading import difference, training_data, unsure

log = logging.getLogger(__name__)

Event = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        members: a row a member, as `ensemble status` shows them.
        best: the row of the finished member with the best objective, None when none finished.
        combined: the `combined` event (metrics of the ensemble, its best and mean member, weights), None when
            there was nothing to combine.
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


class Run:
    """A handle on a run that `submit` or `resume` started.

    Everything but `wait` returns at once and may be called from any thread.
    """

    def __init__(self, controller: Controller, *, threaded: bool) -> None:
        self.run_dir = controller.run_dir.path
        self._controller = controller
        self._error: BaseException | None = None
        self._waited = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(
                target=self._run, name=f"ensemble {controller.ensemble.name}", daemon=True
            )
            self._thread.start()
            atexit.register(self._leave)

    @property
    def state(self) -> RunState:
        """The run's state; it changes while the run goes on."""
        return self._controller.state

    def status(self) -> list[dict[str, Any]]:
        """One row a member, as `ensemble status` shows them; see `ensemble.store.status_rows`."""
        return status_rows(read_events(self._controller.run_dir.events))

    def logs(self, member: str) -> str:
        """What a member printed so far; a SpecError names the members for another name."""
        with self._controller.lock:
            known = list(self._controller.state.members)
        if member not in known:
            raise SpecError(f"no member {member!r} in {self.run_dir} (there are: {', '.join(known)})")
        path = self._controller.run_dir.log(member)
        return path.read_text(errors="replace") if path.exists() else ""

    def cancel(self, member: str | None = None) -> None:
        """End a member, or all of them, for good: nothing of it is kept for a resume."""
        if member is not None and member not in self._controller.state.members:
            known = ", ".join(self._controller.state.members)
            raise SpecError(f"no member {member!r} in {self.run_dir} (there are: {known})")
        fields = {} if member is None else {"member": member}
        write_request(self._controller.run_dir, "cancel", **fields)

    def stop(self) -> None:
        """Let all members write a checkpoint and end the run; `resume` goes on from there."""
        write_request(self._controller.run_dir, "stop")

    def wait(self) -> Result:
        """Wait for the end of the run; with the inline executor, train now.

        Ctrl-C (or SIGTERM, SIGHUP) lets the members write a checkpoint and ends all processes before it raises; a
        second one ends them at once.

        Raises:
            KeyboardInterrupt: the run was stopped by Ctrl-C, SystemExit by SIGTERM or SIGHUP; `resume` goes on.
        """
        with caught(self.stop) as received:
            self._end()
        if self._error is not None:
            raise self._error
        if received:
            interrupted(received[0], f"stopped; `ensemble resume {self.run_dir}` goes on")
        return result_of(self._controller.run_dir)

    def _end(self) -> None:
        if self._thread is not None:
            self._thread.join()
        elif not self._waited:
            self._run()
        self._waited = True

    def _run(self) -> None:
        try:
            self._controller.run()
        except BaseException as error:
            self._error = error

    def _leave(self) -> None:
        """The interpreter ends and nobody waited: members write a checkpoint, nothing is left behind."""
        if self._thread is not None and self._thread.is_alive():
            log.warning("the program ends before its run; stopping it, `ensemble resume %s` goes on", self.run_dir)
            self.stop()
            self._thread.join()


def submit(
    ensemble: Ensemble,
    run_dir: str | os.PathLike[str] | None = None,
    executor: str = "ray",
    on_event: Callable[[Event], None] | None = None,
    spec_file: str | os.PathLike[str] | None = None,
) -> Run:
    """Start a run, or go on with the one that this ensemble already has in that directory.

    Args:
        run_dir: `runs/<name>` unless given.
        executor: "ray", "local" or "inline"; inline trains when `wait()` is called.
        on_event: called with each event of the log, from the thread that runs the controller.
        spec_file: the file that said it, of which a copy is kept.

    Returns:
        A handle, once nodes are found and nothing that was asked for is impossible.

    Where the program has no handler for SIGTERM, that signal ends it as `sys.exit` does from here on, so that
    members write a checkpoint.

    Raises:
        KeyboardInterrupt, SystemExit: Ctrl-C or SIGTERM came, and was heeded once what had begun to start could be
            ended again; a second one ends the program at once.
        SpecError: what can never run.
        StoreError: the directory holds another run, is in use, or cannot be written.
    """
    path = Path(run_dir) if run_dir is not None else Path("runs") / ensemble.name
    runner = make_executor(executor)
    known = RunDir(path)
    training_data(ensemble)  # a digest of arrays is kept with them: no member's process has to compute it again
    if known.info_file.exists() and known.info["name"] == ensemble.name and known.events.exists():
        # another controller's run, or one that these members do not belong to, must be refused before its
        # declaration is replaced
        EventLog(known.events).close()
        check_same(fold(read_events(known.events)), ensemble, known.path)
    return _start(RunDir.create(path, ensemble, spec_file), ensemble, runner, on_event)


def resume(
    run_dir: str | os.PathLike[str],
    executor: str | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Run:
    """Go on with a run that was stopped or killed; members that ended are not trained again.

    Args:
        executor: as before unless given.

    Raises:
        StoreError: there is no run, it is in use, it is not the user's own, or its training data changed.
    """
    known = RunDir(run_dir)
    events = read_events(known.events)
    before = fold(events).executor
    runner = make_executor(executor or before or "ray")
    ensemble = known.load_ensemble()
    check_data(fold(events), ensemble, known.path)
    return _start(known, ensemble, runner, on_event)


def _start(
    run_dir: RunDir, ensemble: Ensemble, executor: Executor, on_event: Callable[[Event], None] | None
) -> Run:
    exit_in_order()
    with caught() as received:

        def check() -> None:
            if received:
                interrupted(received[0], f"interrupted before training began; {run_dir.path} can be run again")

        check()
        events = EventLog(run_dir.events)
        controller = Controller(
            run_dir, ensemble, executor, events, fold(read_events(run_dir.events)), on_event=on_event
        )
        controller.open(check)
        if received:
            write_request(run_dir, "stop")  # its start is in the log already, so its end must be
        run = Run(controller, threaded=not executor.in_process)
    if received:
        run.stop()
        run._end()
        interrupted(received[0], f"stopped; `ensemble resume {run_dir.path}` goes on")
    return run


def check_same(state: RunState, ensemble: Ensemble, path: Path) -> None:
    """Refuse to go on with members that were declared otherwise.

    Raises:
        StoreError: a member of the run in `path` is another one now, or is not declared any more.
    """
    for member in state.members.values():
        listed = ensemble.search is None and member.number < len(ensemble.members or ())
        if member.identity.get("added") and not listed:
            continue  # nothing declares it: the run goes on with what is recorded
        if member.reason == "impossible":
            continue  # a proposal that came to nothing
        if ensemble.search is not None:
            fresh = ensemble.identify(member.number, member.params)
        elif listed:
            fresh = ensemble.identify(member.number)
        else:
            raise StoreError(f"{path} has {member.id}, which this ensemble does not; choose another run directory")
        declared = dict(member.identity)
        if ensemble.elastic and declared.get("widened_from"):  # it goes on as wide as it is
            declared["workers"] = declared["widened_from"]
        for name, now in fresh.compared().items():
            if name in declared and declared[name] != now:
                raise StoreError(
                    f"{path}: {member.id} has {name}={declared[name]!r}, now {now!r}; "
                    "choose another run directory, or remove this one"
                )
    check_data(state, ensemble, path)


def check_data(state: RunState, ensemble: Ensemble, path: Path) -> None:
    """Refuse to go on with other training data; warn where that cannot be told.

    Raises:
        StoreError: the run in `path` has read something else so far.
    """
    before = state.header.get("data")
    if before is None:
        return
    now = training_data(ensemble)
    changed = difference(before, now)
    if changed:
        raise StoreError(f"{path}: {changed}; choose another run directory, or remove this one")
    if unsure(before, now):
        log.warning(
            "%s: whether the training data are what they were cannot be told but by their number (%s)",
            path,
            getattr(ensemble.train, "why_unsure", None) or "it could not be told when the run began",
        )


def result_of(run_dir: RunDir) -> Result:
    """What the run in a directory came to, so far."""
    events = read_events(run_dir.events)
    state, rows = fold(events), status_rows(events)
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
