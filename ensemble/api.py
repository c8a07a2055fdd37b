"""`submit` and `resume`, which drive a run in this process or hand back a `Run` that another process drives."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ensemble.controller import Controller
from ensemble.execute import Executor, make_executor
from ensemble.handles import LOOK_EVERY_S, Event, Followed, Request, Result, Run, result_of
from ensemble.interrupts import caught, exit_in_order, interrupted
from ensemble.spec import Ensemble
from ensemble.store import EventLog, RunDir, RunState, StoreError, fold, is_locked, read_events, write_request
from ensemble.train.reading import difference, training_data, unsure

log = logging.getLogger(__name__)

OPENING_S = 30.0  # what a run that another process has just begun may take until it says of whom it is


class Driven(Run):
    """A handle on a run that this process drives."""

    def __init__(self, controller: Controller, *, threaded: bool) -> None:
        super().__init__(controller.run_dir)
        self._controller = controller
        self._error: BaseException | None = None
        self._threaded = threaded
        # Not the thread is waited for: a signal that interrupts `join` makes Python 3.11 take it to have ended.
        self._over = threading.Event()
        if threaded:
            name = f"ensemble {controller.ensemble.name}"
            threading.Thread(target=self._run, name=name, daemon=True).start()
            atexit.register(self._leave)

    @property
    def state(self) -> RunState:
        """The run's state; it changes while the run goes on."""
        return self._controller.state

    def wait(self) -> Result:
        """Wait for the end of the run; with the inline executor, train now.

        Ctrl-C (or SIGTERM, SIGHUP) lets the members write a checkpoint and ends all processes before it raises; a
        second one ends them at once: they go on from their last checkpoints.

        Raises:
            KeyboardInterrupt: the run was stopped by Ctrl-C, SystemExit by SIGTERM or SIGHUP; `resume` goes on.
        """
        at_once = False
        with caught(self.stop) as received:
            try:
                self._end()
            except (KeyboardInterrupt, SystemExit):  # the second one
                at_once = True
                Request(self._dir, "stop", at_once=True)
                self._end()
        if received and (self._error is None or isinstance(self._error, (KeyboardInterrupt, SystemExit))):
            how = "ended at once" if at_once or self._error is not None else "stopped"
            interrupted(received[0], f"{how}; `ensemble resume {self.run_dir}` goes on")
        if self._error is not None:
            raise self._error
        return result_of(self._dir)

    def _end(self) -> None:
        if not self._threaded and not self._over.is_set():
            self._run()
        self._over.wait()

    def _run(self) -> None:
        try:
            self._controller.run()
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def _members(self) -> list[str]:
        with self._controller.lock:
            return list(self.state.members)

    def _leave(self) -> None:
        """The interpreter ends and nobody waited: members write a checkpoint, nothing is left behind."""
        if not self._over.is_set():
            log.warning("the program ends before its run; stopping it, `ensemble resume %s` goes on", self.run_dir)
            self.stop()
            self._over.wait()


def submit(
    ensemble: Ensemble,
    run_dir: str | os.PathLike[str] | None = None,
    executor: str = "ray",
    on_event: Callable[[Event], None] | None = None,
    spec_file: str | os.PathLike[str] | None = None,
) -> Run:
    """Start a run, or go on with the one that this ensemble already has in that directory.

    Where another process drives that run, the handle follows it: `on_event` is then called within `wait`, with all
    events from the first, and what ends the wait does not end the run.

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
        # a run that these members do not belong to must be refused before its declaration is replaced
        if is_locked(known.events):
            return _joined(known, ensemble, on_event)
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
        run = Driven(controller, threaded=not executor.in_process)
    if received:
        run.stop()
        run._end()
        interrupted(received[0], f"stopped; `ensemble resume {run_dir.path}` goes on")
    return run


def _joined(run_dir: RunDir, ensemble: Ensemble, on_event: Callable[[Event], None] | None) -> Run:
    """The run that another process drives, if it is this ensemble's.

    Raises:
        StoreError: it is another one's, or has fewer members.
    """
    followed, until = Followed(run_dir), time.monotonic() + OPENING_S
    while not followed.state.header and followed.gone() is None and time.monotonic() < until:
        followed.read()
        time.sleep(LOOK_EVERY_S)
    state, declared = followed.state, ensemble.search.trials if ensemble.search else len(ensemble.members or ())
    added = sum(bool(member.identity.get("added")) for member in state.members.values())
    check_same(state, ensemble, run_dir.path)
    if state.header and declared != state.declared - added:
        raise StoreError(
            f"{run_dir.path} is in progress with {state.declared - added} members, this ensemble has {declared}; "
            "`ensemble add` adds to a run, or choose another run directory"
        )
    mine = (state.header.get("pid"), state.header.get("host")) == (os.getpid(), socket.gethostname())
    if mine and state.executor == "inline":
        raise StoreError(f"{run_dir.path} is in progress in this very thread: use the handle that began it")
    where = f"process {state.header.get('pid')} on {state.header.get('host')}"
    log.warning("%s is in progress (%s), and is followed: it goes on when this ends", run_dir.path, where)
    return Run(run_dir, on_event)


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
