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

from ensemble.controller.changes import change_of_code, check_code, check_data, check_edits, check_same
from ensemble.controller.controller import Controller
from ensemble.executors import Executor, make_executor
from ensemble.interrupts import caught, exit_in_order, interrupted
from ensemble.run import LOOK_EVERY_S, Event, Followed, Request, Result, Run, result_of
from ensemble.spec import Ensemble
from ensemble.store import (
    EventLog,
    RunDir,
    RunState,
    StoreError,
    fold,
    is_locked,
    read_events,
    remove_unused_code,
    write_request,
)
from ensemble.train.data_identity import training_data
from ensemble.user_code.fingerprint import Code, code_of

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
    *,
    accept_code: bool = False,
    fresh: bool = False,
    group_read: bool = False,
    code: Code | None = None,
) -> Run:
    """Start a run, or go on with the one that this ensemble already has in that directory.

    What failed is tried again. A member without a checkpoint trains as the ensemble is now, code and data
    included; that the code has changed is said and recorded. Where another process drives that run, the handle
    follows it: `on_event` is then called within `wait`, with all events from the first, and what ends the wait
    does not end the run.

    Args:
        run_dir: `runs/<name>` unless given.
        executor: "ray", "local" or "inline"; inline trains when `wait()` is called.
        on_event: called with each event of the log, from the thread that runs the controller.
        spec_file: the file that said it, of which a copy is kept.
        accept_code: go on with other code than members were trained with.
        group_read: let the group of the run directory read it; it is private otherwise.
        fresh: where there is a run already, leave it as it is, and start anew in a directory beside it (`beside`).
        code: what `code_of` said of this ensemble, where that is known already.

    Returns:
        A handle, once nodes are found and nothing that was asked for is impossible.

    Where the program has no handler for SIGTERM, that signal ends it as `sys.exit` does from here on, so that
    members write a checkpoint.

    Raises:
        KeyboardInterrupt, SystemExit: Ctrl-C or SIGTERM came, and was heeded once what had begun to start could be
            ended again; a second one ends the program at once.
        SpecError: what can never run.
        StoreError: the directory holds another run, or what is none, is in use, or cannot be written; or members
            of the run were trained otherwise: with other hyperparameters, data or code.
    """
    path = Path(run_dir) if run_dir is not None else Path("runs") / ensemble.name
    runner = make_executor(executor)
    known = RunDir(beside(path) if fresh else path)
    code = code or code_of(ensemble)  # once: what is called below may run the user's code
    training_data(ensemble)  # a digest of arrays is kept with them: no member's process has to compute it again
    in_use = {code.fingerprint}
    if known.info_file.exists() and known.info["name"] == ensemble.name and known.events.exists():
        # a run that these members do not belong to must be refused before its declaration is replaced
        if is_locked(known.events):
            return _joined(known, ensemble, code, on_event)
        state = fold(read_events(known.events))
        check_same(state, ensemble, known.path)
        check_code(state, code, known, accept=accept_code)
        in_use |= {one.code for one in state.members.values() if one.checkpoint and one.code}
        in_use |= {state.header["code"]} if state.header.get("code") else set()
    made = RunDir.create(known.path, ensemble, spec_file, code, group_read=group_read)
    remove_unused_code(made.path / "code", in_use)
    return _start(made, ensemble, code, runner, on_event)


def beside(path: str | os.PathLike[str]) -> Path:
    """Where a run starts anew that leaves what is at `path` as it is: `path`, else `path-2`, and so on."""
    first = Path(path).absolute()
    number, free = 1, first
    while free.exists() and not (free.is_dir() and not any(free.iterdir())):
        number += 1
        free = first.with_name(f"{first.name}-{number}")
    return free


def resume(
    run_dir: str | os.PathLike[str],
    executor: str | None = None,
    on_event: Callable[[Event], None] | None = None,
    *,
    accept_code: bool = False,
) -> Run:
    """Go on with a run that was stopped or killed; members that ended are not trained again.

    Those that failed are. It goes on with the declaration and the code that are kept in the run; `submit` takes
    those of today.

    Args:
        executor: as before unless given.
        accept_code: go on with other code than members were trained with: of modules that could not be kept.

    Raises:
        StoreError: there is no run, it is in use, it is not the user's own, or its training data or code changed;
            or other code was accepted, but is not what is kept in the run.
    """
    known = RunDir(run_dir)
    events = read_events(known.events)
    before = fold(events).executor
    runner = make_executor(executor or before or "ray")
    ensemble = known.load_ensemble()
    code = code_of(ensemble)
    check_data(fold(events), ensemble, known.path)
    check_code(fold(events), code, known, accept=accept_code)
    check_edits(code, known, accept=accept_code)
    return _start(known, ensemble, code, runner, on_event)


def _start(
    run_dir: RunDir,
    ensemble: Ensemble,
    code: Code,
    executor: Executor,
    on_event: Callable[[Event], None] | None,
) -> Run:
    exit_in_order()
    with caught() as received:

        def check() -> None:
            if received:
                interrupted(received[0], f"interrupted before training began; {run_dir.path} can be run again")

        check()
        events = EventLog(run_dir.events)
        controller = Controller(
            run_dir, ensemble, executor, events, fold(read_events(run_dir.events)), on_event=on_event, code=code
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


def _joined(run_dir: RunDir, ensemble: Ensemble, code: Code, on_event: Callable[[Event], None] | None) -> Run:
    """The run that another process drives, if it is this ensemble's.

    Raises:
        StoreError: it is another one's, has fewer members, or trains with other code.
    """
    followed, until = Followed(run_dir), time.monotonic() + OPENING_S
    while not followed.state.header and followed.gone() is None and time.monotonic() < until:
        followed.read()
        time.sleep(LOOK_EVERY_S)
    state, declared = followed.state, ensemble.search.trials if ensemble.search else len(ensemble.members or ())
    added = sum(bool(member.identity.get("added")) for member in state.members.values())
    check_same(state, ensemble, run_dir.path, in_progress=True)
    if state.header and declared != state.declared - added:
        raise StoreError(
            f"{run_dir.path} is in progress with {state.declared - added} members, this ensemble has {declared}; "
            "`ensemble add` adds to a run, or choose another run directory"
        )
    change = change_of_code(state, code, run_dir)
    if change is not None and not change.unsure:
        raise StoreError(
            f"{run_dir.path} is in progress with other code: {change}; `ensemble stop` it first, or --fresh "
            "starts anew beside it (fresh=True in Python)"
        )
    mine = (state.header.get("pid"), state.header.get("host")) == (os.getpid(), socket.gethostname())
    if mine and state.executor == "inline":
        raise StoreError(f"{run_dir.path} is in progress in this very thread: use the handle that began it")
    where = f"process {state.header.get('pid')} on {state.header.get('host')}"
    log.warning("%s is in progress (%s), and is followed: it goes on when this ends", run_dir.path, where)
    return Run(run_dir, on_event)
