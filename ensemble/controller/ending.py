"""The end of a run by its controller: the steps of `ENDING`, in their order."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ensemble.events import Report
from ensemble.store.mirror_status import explain_incomplete, load_status

if TYPE_CHECKING:
    from ensemble.controller.controller import Controller

log = logging.getLogger(__name__)

MIRROR_END_S = 600.0  # for what the mirror lacks when the run has ended
MEASUREMENTS = ("usage", "power", "feeder", "node_health")  # what an executor that was closed may still report


def stop_feeders(run: Controller) -> None:
    """Stop the feeders; what the combination uses is not taken to have been used before."""
    run.perform(run.session.stop_feeders())
    run.usage_at = 0.0
    run.handle(run.executor.events(0.0))


def release_cluster(run: Controller) -> None:
    """Give back what others of the cluster may use."""
    run.executor.release()
    process_last(run, (*MEASUREMENTS, "cluster_lost"))


def reduce_checkpoints(run: Controller) -> None:
    """Take out of the checkpoints what is not to be kept, where that has failed before."""
    if run.session.stop_reason is None:
        run.perform(run.session.reduce_checkpoints(*run.read_clock()))
        run.process(run.performer.reducer.wait())


def combine(run: Controller) -> None:
    """Combine the finished members, unless the run was stopped."""
    is_over = run.session.stop_reason is None
    if not is_over and not run.is_budget_used:
        return
    if finished := sum(member.has_result for member in run.state.members.values()):
        run.process([{"type": "combining", "members": finished}])
    combined = run.finalizer.combine_members(run.state)
    if combined is not None:
        run.process([{"type": "combined", **combined}])
        if is_over:
            run.perform(run.session.remove_unselected(*run.read_clock()))
            run.process(run.performer.reducer.wait())
    run.handle(run.executor.events(0.0))


def close_executor(run: Controller) -> None:
    """End all processes, and log what they, and agents that were lost, have used."""
    run.trials.flush()
    run.executor.close()
    process_last(run, MEASUREMENTS)
    news = [] if run.observers is None else run.observers.read()
    run.process([*news, *run.usage.sample()])
    run.save_snapshot()


def report(run: Controller) -> None:
    """Write the report, then log the end: report, ledger and status agree, none counts what the report costs."""
    ending = describe_end(run)
    used_s, last = time.process_time(), run.events.make_event(**ending)
    run.finalizer.write_report(last)
    costs = {"report_cpu_s": time.process_time() - used_s}
    if run.observers is not None:
        for line in run.observers.end_loggers(last, len(run.state.members)):
            run.finalizer.note_missing(line)
        costs["loggers_cpu_s"] = run.usage.count_observers_rest()
    run.handle_requests()  # those of the minutes that combination, report and loggers may take
    run.process([{**ending, **costs}])
    run.finalizer.write_ledger()


def end_mirror(run: Controller) -> None:
    """Let the mirror copy what is left of the run, with its last event and its results, for a limited time."""
    if run.observers is None or not run.observers.has_mirror:
        return
    status = load_status(run.run_dir)
    if status is not None and status.since is not None:
        log.warning("waiting for at most %.0f s: %s", MIRROR_END_S, status)
    run.observers.end_mirror(MIRROR_END_S)
    if (incomplete := explain_incomplete(run.run_dir)) is not None:
        log.warning("%s", incomplete)


def process_last(run: Controller, kinds: Sequence[str]) -> None:
    """Process the events of these types that an executor without members still reports."""
    run.process([event for event in run.executor.events(0.0) if event["type"] in kinds])


def describe_end(run: Controller) -> Report:
    """The last event."""
    if run.session.stop_reason is not None:
        failed = run.session.state.stop_failed
        return {"type": "run_stopped", "reason": run.session.stop_reason, "failed": failed}
    states = dict(Counter(member.state for member in run.state.members.values()))
    wall_s = time.monotonic() - run.began
    return {"type": "run_finished", "wall_s": wall_s, "states": states, "notes": run.finalizer.notes}


def log_abort(run: Controller, error: BaseException) -> None:
    try:
        run.executor.close()  # what its processes have used is known when they have ended
    except Exception as second:
        log.warning("the executor could not be closed: %s", second)
    try:
        process_last(run, MEASUREMENTS)
        failed = isinstance(error, Exception)  # else by a signal
        stopped = {"type": "run_stopped", "reason": f"{type(error).__name__}: {error}", "failed": failed}
        run.process([*run.usage.sample(), stopped])
        if run.observers is not None:
            run.observers.end_loggers(None, len(run.state.members))
        end_mirror(run)
    except Exception as second:  # such as a full disk, which may also be the cause of `error`
        log.warning("the end could not be logged: %s", second)


ENDING: tuple[Callable[[Controller], None], ...] = (
    stop_feeders,
    release_cluster,
    reduce_checkpoints,
    combine,
    close_executor,
    report,
    end_mirror,
)
