"""`submit` and `resume`: start or continue a run in this process, or follow one that another process drives."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ensemble.controller.changes import check_code, check_data, check_edits, check_same, find_code_change
from ensemble.controller.controller import Controller
from ensemble.controller.damage import check_declaration
from ensemble.controller.more_epochs import apply_more_epochs, find_more_epochs, plan_more_epochs
from ensemble.events import MoreEpochs, RunFinished
from ensemble.executors import Executor, make_executor
from ensemble.interrupts import Interrupted, defer_signals, exit_on_signals, raise_interrupted
from ensemble.reporting.notebook import LiveView
from ensemble.result import Result, make_result
from ensemble.run import POLL_S, Request, Run, StateFollower
from ensemble.spec import Ensemble, SpecError, check_ensemble, check_installed, resolve_notify
from ensemble.spec.limits import apply_limits
from ensemble.spec.search import check_budget
from ensemble.spec.validation import check_number
from ensemble.store import (
    EventLog,
    RunDir,
    RunState,
    StoreError,
    format_command,
    is_locked,
    write_request,
)
from ensemble.store.folding import FoldedLog
from ensemble.store.frozen_arrays import check_arrays, release_arrays
from ensemble.store.kept_code import pickle_ensemble
from ensemble.store.mirror import begin_mirror
from ensemble.store.verification import FileCheck
from ensemble.train.data_identity import renew_data, training_data
from ensemble.user_code.fingerprint import Code, code_of
from pipelines.environment.library_settings import apply_settings, find_settings, keep_settings, keeps_settings
from pipelines.errors import PipelineError

log = logging.getLogger(__name__)

SIGNAL_S = 0.5  # within which a signal is acted on that did not end the wait for the run
HEADER_TIMEOUT_S = 30.0  # until a run that another process has just started names its ensemble in the log


class DrivenRun(Run):
    """A handle on a run that this process drives."""

    def __init__(self, controller: Controller, *, threaded: bool) -> None:
        super().__init__(controller.run_dir)
        self._controller: Controller | None = controller  # until the run is over: it holds the ensemble's arrays
        self._state, self._lock, self._view = controller.state, controller.lock, LiveView()
        self._error: BaseException | None = None
        self._threaded = threaded
        self._settings = find_settings()  # of the run: `wait` may be called in others
        # An event instead of `join`: a signal that interrupts `join` makes Python 3.11 regard the thread as ended.
        self._over = threading.Event()
        if threaded:
            name = f"ensemble {controller.ensemble.name}"
            threading.Thread(target=self._run, name=name, daemon=True).start()
            atexit.register(self._stop_at_exit)
        else:
            controller.view = self._view

    @property
    def state(self) -> RunState:
        """The run's state, which changes while the run is in progress."""
        return self._state

    def wait(self) -> Result:
        """Wait for the end of the run, in a notebook with its progress; with the inline executor, train now.

        After Ctrl-C, SIGTERM or SIGHUP the members write a checkpoint and all processes end before this raises. A
        second signal ends them at once; a resume then continues from the last checkpoints.

        Raises:
            KeyboardInterrupt: the run was stopped by Ctrl-C.
            SystemExit: it was stopped by SIGTERM or SIGHUP.
            ClusterLostError: it was stopped because the cluster does not answer; a resume continues it.
        """
        at_once = False
        with self._view, defer_signals(self.stop) as received:
            try:
                self._run_to_end()
            except (KeyboardInterrupt, SystemExit):  # the second signal
                at_once = True
                Request(self._dir, "stop", at_once=True)
                self._run_to_end()
        if received and (self._error is None or isinstance(self._error, (KeyboardInterrupt, SystemExit))):
            ended = self.state.ended
            if self._error is None and ended is not None and isinstance(ended, RunFinished):
                raise_interrupted(received[0], f"{self.run_dir} has finished before it could be stopped")
            how = "ended at once" if at_once or self._error is not None else "stopped"
            raise_interrupted(received[0], f"{how}; {format_command('resume', self.run_dir)} continues the run")
        if self._error is not None:
            raise self._error
        return make_result(self._dir)

    def _run_to_end(self) -> None:
        if not self._threaded and not self._over.is_set():
            self._run()
        # A signal that arrives while this thread hands over the interpreter lock ends no wait without a limit.
        while not self._over.wait(SIGNAL_S):
            self._show_progress()
        self._show_progress()

    def _show_progress(self) -> None:
        """Draw the state in a notebook, from the thread that waits: there the output belongs to its cell."""
        if self._view.is_due:
            with self._lock:
                self._view.update(self.state)

    def _run(self) -> None:
        assert self._controller is not None
        try:
            with contextlib.nullcontext() if self._threaded else keep_settings():
                if not self._threaded:  # members train in this process
                    apply_settings(self._settings)
                self._controller.run()
        except BaseException as error:
            self._error = error
        finally:
            self._controller.release()
            self._controller = None
            atexit.unregister(self._stop_at_exit)
            self._over.set()

    def _members(self) -> list[str]:
        with self._lock:
            return list(self.state.members)

    def _stop_at_exit(self) -> None:
        """Stop the run when the interpreter ends before `wait` was called: members write a checkpoint."""
        if not self._over.is_set():
            text = "the program ends before its run; stopping the run, %s continues it"
            # An exception that a signal raises here would be printed with its traceback, and end the wait.
            at_once = defer_signals(lambda: Request(self._dir, "stop", at_once=True))
            with at_once, contextlib.suppress(KeyboardInterrupt, SystemExit):
                log.warning(text, format_command("resume", self.run_dir))
                self.stop()
                while not self._over.wait(SIGNAL_S):
                    pass


def submit(
    ensemble: Ensemble,
    run_dir: str | os.PathLike[str] | None = None,
    executor: str = "ray",
    on_event: Callable[[dict[str, Any]], None] | None = None,
    spec_file: str | os.PathLike[str] | None = None,
    *,
    accept_code: bool = False,
    accept_data: bool = False,
    fresh: bool = False,
    group_read: bool = False,
    limits: Mapping[str, float] | None = None,
    code: Code | None = None,
    checked: Sequence[FileCheck] | None = None,
    notify: str | Sequence[str] | None = None,
    mirror: str | None = None,
) -> Run:
    """Start a run, or continue the run that this ensemble already has in that directory.

    Members that failed are tried again. A member without a checkpoint trains with the present declaration, code
    and data; a change of the code is logged and recorded. If another process drives the run, the handle follows
    it: `on_event` is then called within `wait`, with all events from the first, and the end of `wait` by a signal
    does not end the run.

    Where the program has no handler for SIGTERM, that signal ends it as `sys.exit` does from now on, so that
    members write a checkpoint.

    Args:
        ensemble: what to train.
        run_dir: `runs/<name>` unless given.
        executor: "ray", "local" or "inline"; inline trains when `wait()` is called.
        on_event: called with each event of the log, from the thread that runs the controller.
        spec_file: the file that declares the ensemble; a copy is kept in the run directory.
        accept_code: continue although members were trained with other code.
        accept_data: continue although members were trained on other data. Other data to evaluate on need it not:
            members that have finished are evaluated on them again.
        fresh: if there is a run already, leave it unchanged and start a new one in a directory beside it.
        group_read: let the group of the run directory read it; by default only its owner can.
        limits: for this start, in the place of what the ensemble declares.
        code: the result of `code_of(ensemble)`, where it is known already.
        checked: how the files of members that have ended were found, where they were read already.
        notify: the address of a webhook, or several, which get a JSON object when the run has ended, failed or was
            stopped. It is not kept: a resume is given its own.
        mirror: an address (`s3://`, `gs://`, `file://`) to which new and changed files of the run are copied while
            it goes on (`ensemble.fetch` brings it back); "none": nowhere any more. A run that has one keeps it.

    Returns:
        A handle, when nodes have been found and the declaration can run on them.

    Raises:
        KeyboardInterrupt, SystemExit: after Ctrl-C or SIGTERM, once the processes that were starting have been
            ended; a second signal ends the program at once.
        SpecError: the declaration cannot run.
        StoreError: the directory has another run, or other files, is in use, or cannot be written; or members of
            the run were trained with other hyperparameters, data or code.
    """
    check_ensemble("submit", ensemble)
    apply_limits(ensemble, limits)  # they are valid
    receivers = resolve_notify(notify)
    path = Path(run_dir) if run_dir is not None else Path("runs") / ensemble.name
    check_installed(ensemble.loggers)
    runner = make_executor(executor)
    if os.path.isdir(path) and not fresh and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise StoreError(f"{path} is not yours to read and write: give another run directory, or ask its owner")
    known = RunDir(choose_free_path(path) if fresh else path)
    begun = FoldedLog(known.events)
    code = code or code_of(ensemble)  # before the calls below, which may run the user's code
    training_data(ensemble)  # computes the digests of arrays once, and not in each member's process
    if known.find_info().get("name") == ensemble.name and known.events.exists():
        if is_locked(known.events):
            if receivers or mirror:
                text = (
                    "%s is in progress: who is told of it, and where it is mirrored, was said when it was started"
                )
                log.warning(text, known.path)
            return _follow(known, ensemble, code, on_event)
        # before the declaration of the run is replaced
        check_same(state := begun.update(), ensemble, known.path, accepts_data=accept_data)
        check_code(state, code, known, accept=accept_code)
    if not ensemble.keep_data and runner.name == "ray":
        raise SpecError(
            "Ensemble.keep_data is False: the data are in the memory of one machine, which the nodes of a Ray "
            "cluster do not have; use executor='local', or sources.memmap() of files that all nodes see"
        )
    known.check_is_free(ensemble)
    declaration = pickle_ensemble(ensemble, None if spec_file is None else Path(spec_file))
    made = RunDir.create(
        known.path, ensemble, spec_file, code, group_read=group_read, executor=executor, declaration=declaration
    )
    try:
        # What the program changes from here on, or the user in the spec file, is no matter of this run.
        frozen = declaration.load(made.data, is_in_process=runner.in_process)
        del declaration, ensemble  # they hold memory for as long as the run takes
        frozen = apply_limits(frozen, limits)
        more: dict[str, Any] = {
            "checked": checked,
            "notify": receivers,
            "mirror": mirror,
            "accepts_data": accept_data,
        }
        return _start(made, frozen, code, runner, on_event, begun=begun, **more)
    except BaseException:
        release_arrays(made.data)
        raise


def choose_free_path(path: str | os.PathLike[str]) -> Path:
    """The first path of `path`, `path-2`, `path-3` ... that is free for a new run."""
    first = Path(path).absolute()
    number, free = 1, first
    while free.exists() and not (free.is_dir() and not any(free.iterdir())):
        number += 1
        free = first.with_name(f"{first.name}-{number}")
    return free


@keeps_settings
def resume(
    run_dir: str | os.PathLike[str],
    executor: str | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    *,
    accept_code: bool = False,
    accept_data: bool = False,
    epochs: int | None = None,
    budget: Mapping[str, float] | None = None,
    limits: Mapping[str, float] | None = None,
    checked: Sequence[FileCheck] | None = None,
    notify: str | Sequence[str] | None = None,
    mirror: str | None = None,
    begun: FoldedLog | None = None,
) -> Run:
    """Continue a run that was stopped or killed, with the declaration and the code that are kept in its directory.

    Members that failed are tried again; other members that have ended are not. `submit` continues a run with the
    present declaration and code.

    With `epochs`, members that have finished go on from their last checkpoint, too, and the run is combined and
    reported again; those that were pruned or cancelled, or failed for good, stay as they are. Later resumes keep
    that number. Schedules go by the number of steps that was declared (`ensemble.controller.more_epochs`).

    Args:
        run_dir: of the run.
        executor: the one of before unless given.
        on_event: as in `submit`.
        accept_code: continue although members were trained with other code, of modules that are not kept in the
            run.
        accept_data: as in `submit`. Sources are made anew where their files have changed.
        epochs: train the members for so many epochs, more than they were declared with.
        budget: of a search, in all, as `Search.budget`. Later resumes keep it.
        limits: as `Ensemble` has them, of this start; unless given, as declared.
        checked: as in `submit`.
        notify, mirror: as in `submit`.
        begun: the log of the run, where it was read already (`read_begun`).

    Raises:
        SpecError: `epochs` is no integer of at least 1, or `budget` is none, or not of a search.
        StoreError: the members cannot be trained for more epochs, or not as they were declared.
        StoreError: no run has begun there, it is in use, it belongs to another user, or its training data or code
            have changed; or `accept_code` is given, but the changed code is not the one that is kept in the run.
    """
    check_number("epochs", epochs, low=1, integer=True, optional=True)
    receivers = resolve_notify(notify)
    known = RunDir(run_dir)
    if epochs is not None and is_locked(known.events):
        raise StoreError(f"{known.path} is in progress: its members can have more epochs when it has ended")
    begun = begun or read_begun(known)
    state = begun.update()
    check_declaration(known, state)
    runner = make_executor(executor or state.executor or known.info.get("executor") or "ray")
    check_arrays(known)
    declared = known.load_ensemble(takes_settings=True)
    ensemble, more_epochs = declared, None
    try:
        ensemble = renew_data(declared)
    except PipelineError:
        trains = any(each.is_resumable(state.header.code) for each in state.members.values())
        if epochs is not None or budget is not None or trains or not isinstance(state.ended, RunFinished):
            raise  # else nothing needs the data
    if ensemble is not declared:
        check_data(state, ensemble, known.path, accepts=accept_data)  # before `create` replaces it, with the lock
        code = dataclasses.replace(code_of(ensemble), sources={})  # those that are kept stay
        RunDir.create(known.path, ensemble, code=code)
    if epochs is not None:
        more_epochs = plan_more_epochs(known, state, ensemble, epochs)
        for note in [] if more_epochs is None else more_epochs.notes:
            log.warning("%s: %s", known.path, note)
    ensemble = apply_more_epochs(ensemble, max(epochs or 0, find_more_epochs(state)))
    if budget is not None:
        check_budget("budget", budget)
    if budget is not None and ensemble.search is None:
        raise SpecError("budget= is of a search, and the run trains a list of members")
    if ensemble.search is not None and (given := state.header.budget if budget is None else budget):
        ensemble = dataclasses.replace(ensemble, search=dataclasses.replace(ensemble.search, budget=given))
    ensemble = apply_limits(ensemble, limits)
    check_installed(ensemble.loggers)
    code = code_of(ensemble)
    check_data(state, ensemble, known.path, accepts=accept_data)
    check_code(state, code, known, accept=accept_code)
    check_edits(code, known, accept=accept_code)
    more: dict[str, Any] = {"checked": checked, "notify": receivers, "mirror": mirror, "accepts_data": accept_data}
    return _start(known, ensemble, code, runner, on_event, more_epochs, begun=begun, **more)


def read_begun(run_dir: RunDir) -> FoldedLog:
    """The log of a run that can be resumed.

    Raises:
        StoreError: there is none, or it was ended before it had begun.
    """
    if not run_dir.path.is_dir():
        raise StoreError(f"no run here: {run_dir.path} does not exist; give a run directory")
    begun = FoldedLog(run_dir.events)
    if not run_dir.events.exists() or begun.update().started is None:
        again = format_command("run", "SPEC.py", "--run-dir", run_dir.path)
        raise StoreError(
            f"no run has begun in {run_dir.path}; one that was ended in its first seconds is started by its spec "
            f"again: {again}"
        )
    return begun


def _start(
    run_dir: RunDir,
    ensemble: Ensemble,
    code: Code,
    executor: Executor,
    on_event: Callable[[dict[str, Any]], None] | None,
    more_epochs: MoreEpochs | None = None,
    *,
    begun: FoldedLog,
    mirror: str | None = None,
    **more: Any,
) -> Run:
    for notice in ensemble.list_notices():
        log.warning("%s", notice)
    exit_on_signals()
    with defer_signals() as received:
        events = EventLog(run_dir.events)
        try:
            state = begun.update()
            mirrored = begin_mirror(run_dir, mirror)
        except BaseException:
            events.close()
            raise
        controller = Controller(
            run_dir,
            ensemble,
            executor,
            events,
            state,
            on_event=on_event,
            code=code,
            more_epochs=more_epochs,
            mirror=mirrored,
            **more,
        )
        try:
            controller.open()
        except Interrupted:
            if received:
                again = f"{run_dir.path} can be run again"
                raise_interrupted(received[0], f"interrupted before training started; {again}")
            raise
        if received:
            write_request(run_dir, "stop")  # its start is in the log, so its end must be in it as well
        run = DrivenRun(controller, threaded=not executor.in_process)
    if received:
        run.stop()
        run._run_to_end()
        raise_interrupted(received[0], f"stopped; {format_command('resume', run_dir.path)} continues the run")
    return run


def _follow(
    run_dir: RunDir, ensemble: Ensemble, code: Code, on_event: Callable[[dict[str, Any]], None] | None
) -> Run:
    """A handle on a run that another process drives, if it is this ensemble's.

    Raises:
        StoreError: it is another ensemble's, has another number of members, or trains with other code.
    """
    follower, until = StateFollower(run_dir), time.monotonic() + HEADER_TIMEOUT_S
    while not follower.state.starts and follower.find_loss() is None and time.monotonic() < until:
        follower.read()
        time.sleep(POLL_S)
    state, declared = follower.state, ensemble.search.trials if ensemble.search else len(ensemble.members or ())
    added = sum(bool(member.identity.get("added")) for member in state.members.values())
    check_same(state, ensemble, run_dir.path, in_progress=True)
    if state.starts and declared != state.declared - added:
        raise StoreError(
            f"{run_dir.path} is in progress with {state.declared - added} members, this ensemble has {declared}; "
            "add members with `ensemble add`, or choose another run directory"
        )
    change = find_code_change(state, code, run_dir)
    if change is not None and not change.unsure:
        raise StoreError(
            f"{run_dir.path} is in progress with other code: {change}; stop it (`ensemble stop`), or start a "
            "new run beside it with --fresh (fresh=True in Python)"
        )
    mine = (state.header.pid, state.header.host) == (os.getpid(), socket.gethostname())
    if mine and state.executor == "inline":
        raise StoreError(f"{run_dir.path} is in progress in this thread: use the handle that started it")
    where = f"process {state.header.pid} on {state.header.host}"
    log.warning("%s is in progress (%s) and is followed; it continues when this ends", run_dir.path, where)
    return Run(run_dir, on_event)
