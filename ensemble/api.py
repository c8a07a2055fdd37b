"""`submit` and `resume`: start or continue a run in this process."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ensemble.controller.controller import Controller
from ensemble.controller.more_epochs import apply_more_epochs, find_more_epochs, plan_more_epochs
from ensemble.controller.start_steps import DeclaredStart, check_start, find_start, list_entries, withdraw
from ensemble.controller.unfinished import check_declaration
from ensemble.driven_run import DrivenRun
from ensemble.events import MoreEpochs, RunFinished
from ensemble.executors import Executor, make_executor
from ensemble.interrupts import Interrupted, defer_signals, exit_on_signals, raise_interrupted
from ensemble.run import Run
from ensemble.spec import Ensemble, SpecError, check_ensemble, resolve_notify
from ensemble.spec.limits import apply_limits, check_budget
from ensemble.spec.out_of_fold import list_fold_notices
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
from ensemble.store.file_checks import FileCheck
from ensemble.store.folding import FoldedLog
from ensemble.store.mirror_status import load_status
from ensemble.train.data_identity import renew_data
from ensemble.user_code.fingerprint import Code, code_of
from pipelines.environment.library_settings import keeps_settings
from pipelines.errors import PipelineError
from pipelines.providers import import_object

log = logging.getLogger(__name__)


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
    limits: Mapping[str, float] | None = None,
    code: Code | None = None,
    checked: Sequence[FileCheck] | None = None,
    notify: str | Sequence[str] | None = None,
    mirror: str | None = None,
) -> Run:
    """Start a run, or continue the run that this ensemble already has in that directory.

    Members that failed are tried again. A member without a checkpoint trains with the present declaration, code
    and data; a change of the code is logged and recorded.

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
    _open_closed_streams()
    check_ensemble("submit", ensemble)
    apply_limits(ensemble, limits)  # they are valid
    receivers, runner = resolve_notify(notify), make_executor(executor)
    accepted = {"accept_code": accept_code, "accept_data": accept_data}
    start = find_start(ensemble, run_dir, executor, spec_file, code, **accepted, fresh=fresh, mirror=mirror)
    _refuse_in_progress(start.run_dir, start.state)
    check_start(start)
    entries = list_entries(start.run_dir.path)
    if fresh:
        log.warning("fresh=True: the run is written to %s", start.run_dir.path)
    declaration, code, made = start.declaration, start.code, start.create()
    # What the program changes from here on, or the user in the spec file, is no matter of this run.
    frozen = apply_limits(declaration.load(made.data, is_in_process=runner.in_process), limits)
    begun = start.log
    del declaration, ensemble, start  # they hold memory for as long as the run takes
    more: dict[str, Any] = {"checked": checked, "notify": receivers, "mirror": mirror}
    more |= {"accepts_data": accept_data, "is_new": not entries, "had_folder": entries is not None}
    return _start(made, frozen, code, runner, on_event, begun=begun, **more)


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
        run_dir: the directory of the run.
        executor: the one of before unless given.
        on_event: as in `submit`.
        accept_code: continue although members were trained with other code, of modules that are not kept in the
            run.
        accept_data: as in `submit`. Sources whose files have changed are made again.
        epochs: train the members for so many epochs, more than they were declared with.
        budget: the budget of a search, in all, as `Search.budget`. Later resumes keep it.
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
    _open_closed_streams()
    check_number("epochs", epochs, low=1, integer=True, optional=True)
    receivers = resolve_notify(notify)
    folder = RunDir(run_dir)
    begun = begun or read_begun(folder)
    state = begun.update()
    _refuse_in_progress(folder, state)
    check_declaration(folder, state)
    runner = make_executor(executor or state.executor or folder.info.get("executor") or "ray")
    declared = folder.load_ensemble(takes_settings=True)
    ensemble, more_epochs = declared, None
    try:
        ensemble = renew_data(declared)
    except PipelineError:
        trains = any(member.is_resumable(state.header.code) for member in state.members.values())
        if epochs is not None or budget is not None or trains or not isinstance(state.ended, RunFinished):
            raise  # else nothing needs the data
    renewed = ensemble
    if epochs is not None:
        more_epochs = plan_more_epochs(folder, state, ensemble, epochs)
        for note in [] if more_epochs is None else more_epochs.notes:
            log.warning("%s: %s", folder.path, note)
    ensemble = apply_more_epochs(ensemble, max(epochs or 0, find_more_epochs(state)))
    ensemble = _apply_budget(ensemble, state, budget)
    ensemble = apply_limits(ensemble, limits)
    code = code_of(ensemble)
    start = DeclaredStart(ensemble, folder, state, code, runner.name, begun, is_resumed=True, mirror=mirror)
    check_start(dataclasses.replace(start, accept_code=accept_code, accept_data=accept_data))
    if renewed is not declared:  # with the lock; the sources that are kept stay
        RunDir.create(folder.path, renewed, code=dataclasses.replace(code_of(renewed), sources={}))
    del start, declared, renewed
    more: dict[str, Any] = {"checked": checked, "notify": receivers, "mirror": mirror, "accepts_data": accept_data}
    return _start(folder, ensemble, code, runner, on_event, more_epochs, begun=begun, **more)


def _refuse_in_progress(run_dir: RunDir, state: RunState) -> None:
    if state.starts and is_locked(run_dir.events):
        where, head = run_dir.path, state.header
        by = f" (process {head.pid} on {head.host})" if head.pid else ""
        raise StoreError(
            f"{where} is in progress{by}: ensemble.attach({str(where)!r}) is a handle on it, "
            f"{format_command('status', '--watch', where)} shows it, {format_command('stop', where)} ends it"
        )


def _apply_budget(ensemble: Ensemble, state: RunState, budget: Mapping[str, float] | None) -> Ensemble:
    """The declaration with what a search may use in all: as it is given now, else as it was given last."""
    if budget is not None:
        check_budget("budget", budget)
        if ensemble.search is None:
            raise SpecError("budget= limits a search, and this run trains a list of members: leave it out")
    if ensemble.search is None or not (limits := state.header.budget if budget is None else budget):
        return ensemble
    return dataclasses.replace(ensemble, search=dataclasses.replace(ensemble.search, budget=limits))


def read_begun(run_dir: RunDir) -> FoldedLog:
    """The log of a run that can be resumed.

    Raises:
        StoreError: there is none, or it was ended before it had begun.
    """
    if not run_dir.path.is_dir():
        raise StoreError(f"no run here: {run_dir.path} does not exist; give a run directory")
    run_dir.check_log()
    begun = FoldedLog(run_dir.events)
    if not run_dir.events.exists() or begun.update().started is None:
        again = format_command("run", "SPEC.py", "--run-dir", run_dir.path)
        raise StoreError(
            f"no run has begun in {run_dir.path}; if it was ended in its first seconds, start its spec again: "
            f"{again}"
        )
    return begun


def _open_closed_streams() -> None:
    if None in (sys.__stdin__, sys.__stdout__, sys.__stderr__):
        from pipelines.environment.standard_streams import open_closed_streams

        open_closed_streams()


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
    is_new: bool = False,
    had_folder: bool = True,
    **more: Any,
) -> Run:
    for notice in (*ensemble.list_notices(), *list_fold_notices(ensemble)):
        log.warning("%s", notice)
    exit_on_signals()
    with defer_signals() as received:
        events = EventLog(run_dir.events)
        try:
            state = begun.update()
            is_mirrored = mirror is not None or load_status(run_dir) is not None
            begin_mirror = import_object("ensemble.store.mirror:begin_mirror") if is_mirrored else None
            mirrored = begin_mirror and begin_mirror(run_dir, mirror)
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
        except (SpecError, StoreError, PipelineError):
            if is_new:
                withdraw(run_dir, keeps_folder=had_folder)
            raise
        if received:
            write_request(run_dir, "stop")  # its start is in the log, so its end must be in it as well
        run = DrivenRun(controller, threaded=not executor.in_process)
    if received:
        run.stop()
        run.run_to_end()
        raise_interrupted(received[0], f"stopped; {format_command('resume', run_dir.path)} continues the run")
    return run
