"""The start of a run by its controller: the steps of `OPENING`, in their order."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from ensemble.controller.changes import find_code_change, find_evaluated_again
from ensemble.controller.driver_usage import DriverUsage
from ensemble.controller.feeders import SharedStream
from ensemble.controller.performer import Performer
from ensemble.controller.session import Session
from ensemble.controller.start_steps import OpenedStart, check_start
from ensemble.controller.starts import describe_start, find_redeclared, make_trials
from ensemble.controller.unfinished import check_ended, report_damage
from ensemble.executors.mps import stop_stale_daemon
from ensemble.executors.private_directory import remove_stale
from ensemble.interrupts import raise_if_deferred
from ensemble.store import receive_requests
from ensemble.store.reopening import give_more_epochs
from ensemble.train.job import REHEARSAL
from pipelines.providers import import_object

if TYPE_CHECKING:
    from ensemble.controller.controller import Controller


def clear_remains(run: Controller) -> None:
    """Remove what killed processes have left; read requests to an earlier start."""
    remove_stale("ensemble-", stop_stale_daemon)
    shutil.rmtree(run.run_dir.member(REHEARSAL), ignore_errors=True)
    run.opening.requests = receive_requests(run.run_dir, run.stuck)


def find_changes(run: Controller) -> None:
    """Compare code, data and files with those of the run so far; the state is as these changes leave it."""
    if not run.state.starts:  # the run begins
        return
    opening, t = run.opening, run.events.read_clock()
    opening.change = change = find_code_change(run.state, run.code, run.run_dir)
    if run.more_epochs is not None:
        give_more_epochs(run.state, run.more_epochs, t)
    opening.changed_splits, opening.evaluated_again = find_evaluated_again(
        run.state, run.ensemble, change, run.run_dir.path, t
    )
    code, checks = run.code.fingerprint, run.checked
    if checks is None:
        checks = check_ended(run.run_dir, run.state, code)
    opening.damage = report_damage(run.run_dir, run.state, checks, code, t)


def open_executor(run: Controller) -> None:
    """Open the executor, which finds the nodes."""
    opened = run.executor.open(run.run_dir, run.ensemble, run.handle)
    run.opening.nodes = nodes = [node.limit(run.ensemble.limits) for node in opened]
    run.usage = DriverUsage(run.clock, run.observers, nodes)
    raise_if_deferred()


def check_opened(run: Controller) -> None:
    """Refuse what these nodes can never run (`start_steps.OPENED`)."""
    has_locks, cluster = run.events.has_locks, run.executor.cluster
    run.opening.stream = stream = SharedStream(
        run.ensemble, spans_nodes=has_locks, is_possible=not run.executor.in_process
    )
    nodes, code = run.opening.nodes if cluster is None else cluster, run.code.fingerprint
    check_start(OpenedStart(run.ensemble, run.run_dir, run.state, code, stream, nodes, has_locks=has_locks))


def provide_base(run: Controller) -> None:
    """Make the frozen network on which members stand, or see that its file is there."""
    if getattr(run.ensemble.recipe, "base", None) is not None:
        provide = import_object("ensemble.base.making:provide_base")
        run.opening.base = provide(run.run_dir, run.state, run.code.fingerprint, run.usage.node)


def propose_members(run: Controller) -> None:
    """Make what proposes members: a searcher names its study by these before the first event is logged."""
    run.state.name, run.state.objective = run.ensemble.name, run.ensemble.objective or "accuracy"
    run.state.run_id = run.state.run_id or run.run_dir.info.get("run_id") or uuid.uuid4().hex
    sharing = run.opening.stream.sharing
    run.trials = make_trials(run.ensemble, run.run_dir, run.state, sharing=sharing)


def make_session(run: Controller) -> None:
    """Make what decides, and what performs."""
    run.performer = Performer(
        run.run_dir, run.executor, run.events, run.trials, run.on_event, run.status, run.state
    )
    has_changed = run.opening.change is not None  # then nothing that was measured holds
    run.session = Session(
        ensemble=run.ensemble,
        run_dir=run.run_dir,
        run=run.state,
        nodes=run.opening.nodes,
        list_cluster=lambda: run.executor.cluster,
        stream=run.opening.stream,
        awaits_pruner=run.trials.awaits_pruner,
        streaming=run.trials.streaming,
        trials_left=run.trials.left(),
        profiles=[] if has_changed else list(run.state.profiles.values()),
        can_measure=not run.executor.in_process,
        stop_timeout_s=run.stop_timeout_s,
    )
    raise_if_deferred()


def log_start(run: Controller) -> None:
    """Log the start, with what has been found; queue the members that have not ended."""
    opening, search = run.opening, run.ensemble.search
    has_trials = search is None or search.has_trials
    started = describe_start(
        run.ensemble,
        run.run_dir,
        run.state,
        executor=run.executor.name,
        members=len(run.state.members) + (run.trials.left() if has_trials else 0),
        code=run.code.fingerprint,
        more_epochs=run.more_epochs,
        changed_splits=opening.changed_splits,
        evaluated_again=opening.evaluated_again,
        accepts_data=run.accepts_data,
        constraints=run.trials.constraints,
    )
    change, unshared = opening.change, opening.stream.unshared
    events = [started, *opening.damage]
    events += [] if change is None else [{"type": "code_changed", **change.as_event()}]
    events += [run.usage.begin(), *opening.base, *({"type": "node", **node.as_event()} for node in opening.nodes)]
    ended = {"type": "sharing_ended", "node": None, "cohort": None, "detail": unshared}
    events += [] if unshared is None else [ended]
    actions = run.session.start(events, *run.read_clock())
    redeclared, unstartable = find_redeclared(run.run_dir, run.state, run.trials.listed)
    run.perform(actions + run.session.open_queue(redeclared, unstartable, *run.read_clock()))


def refuse_early_requests(run: Controller) -> None:
    why = "it was made before the run was started this time: repeat it"
    run.process([{"type": "request", "request": request, "refused": why} for request in run.opening.requests])


def start_observers(run: Controller) -> None:
    if run.observers is not None:
        run.observers.start()


OPENING: tuple[Callable[[Controller], None], ...] = (
    clear_remains,
    find_changes,
    open_executor,
    check_opened,
    provide_base,
    propose_members,
    make_session,
    log_start,
    refuse_early_requests,
    start_observers,
)
