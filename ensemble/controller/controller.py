"""The shell of a run: reads the clock, the executor's events and users' requests, and performs what follows.

`Session` decides, without input or output; `Performer` acts, and is the only writer of the event log. A controller
that was killed is replaced by a new one, which folds the log.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ensemble.controller.actions import Action
from ensemble.controller.changes import (
    Change,
    explain_evaluated_again,
    explain_evaluation,
    find_code_change,
    list_evaluated_again,
)
from ensemble.controller.clock import StallFreeClock
from ensemble.controller.damage import check_ended, report_damage
from ensemble.controller.driver_usage import DriverUsage
from ensemble.controller.feeders import SharedStream
from ensemble.controller.finalize import Finalizer
from ensemble.controller.performer import Performer, complete_event
from ensemble.controller.session import Session
from ensemble.controller.starts import (
    check_fit,
    check_starts,
    describe_start,
    find_redeclared,
    refuse_without_locks,
)
from ensemble.events import MoreEpochs, Report
from ensemble.executors import ClusterLostError, Executor
from ensemble.executors.mps import stop_stale_daemon
from ensemble.executors.private_directory import remove_stale
from ensemble.interrupts import raise_if_deferred
from ensemble.meter import CpuClock
from ensemble.meter.cpu import report_interval_s
from ensemble.meter.tally import list_unreported, read_tallies, remove
from ensemble.reporting.loggers.observers import Observers
from ensemble.reporting.notebook import LiveView
from ensemble.search.budget import explain_end
from ensemble.search.trials import make_trials
from ensemble.spec import Ensemble, resolve_loggers
from ensemble.store import EventLog, RunDir, RunState, RunStatus, StoreError, receive_requests
from ensemble.store.event_handlers import evaluate_again, give_more_epochs
from ensemble.store.files import format_command
from ensemble.store.frozen_arrays import release_arrays
from ensemble.store.member import ENDED
from ensemble.store.member_log import shorten
from ensemble.store.mirror import MirrorOptions, explain_incomplete, load_status
from ensemble.store.verification import FileCheck
from ensemble.train.data_identity import describe_changed_splits, training_data
from ensemble.train.kernel_caches import remove_empty
from ensemble.user_code.fingerprint import Code, code_of
from pipelines.errors import PipelineError

log = logging.getLogger(__name__)

TICK_S = 0.5  # how late a request from another shell may be seen
USAGE_EVERY_S = 5.0
BUDGET_EVERY_S = 1.0
SNAPSHOT_EVERY_S = 5.0  # how often it is looked whether the log has grown by a snapshot's worth
METRICS_EVERY_S = 5.0  # for a cluster that collects metrics itself, and drops them 20 s after the last report
MIRROR_END_S = 600.0  # for what the mirror lacks when the run has ended
MEASUREMENTS = ("usage", "power", "feeder", "node_health")  # what an executor that was closed may still report


class Controller:
    """Runs an ensemble to its end on one executor.

    Args:
        events: the run's log, opened; `run` closes it at the end.
        state: the fold of the log so far.
        on_event: called with each event of the log.
        stop_timeout_s: how long members may take to write a checkpoint when the run is stopped, in seconds.
        code: the ensemble's code; None: it is read now.
        more_epochs: more epochs for members that have ended.
        accepts_data: whether members go on with other training data.
        notify: addresses of webhooks.
        mirror: where the run is mirrored.
        checked: how the files of members that have ended were found (`check_ended`); None: `open` reads them.

    Attributes:
        session: decides; it exists once `open` has returned.
        view: a table in a notebook that this draws, where the thread that runs it is the one that waits.
    """

    session: Session
    view: LiveView | None

    def __init__(
        self,
        run_dir: RunDir,
        ensemble: Ensemble,
        executor: Executor,
        events: EventLog,
        state: RunState,
        *,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        stop_timeout_s: float = 60.0,
        code: Code | None = None,
        more_epochs: MoreEpochs | None = None,
        accepts_data: bool = False,
        checked: Sequence[FileCheck] | None = None,
        notify: Sequence[str] = (),
        mirror: MirrorOptions | None = None,
    ) -> None:
        self.run_dir, self.ensemble, self.executor, self.state = run_dir, ensemble, executor, state
        self.lock, self.view = threading.RLock(), None
        self._more_epochs, self._checked, self._accepts_data = more_epochs, checked, accepts_data
        self._code = code or code_of(ensemble)  # before user code runs, which may change what it finds in globals
        self._finalizer = Finalizer(run_dir, ensemble)
        self._events, self._on_event, self._stop_timeout_s = events, on_event, stop_timeout_s
        self._status = RunStatus(run_dir)
        self._observers = Observers(run_dir, resolve_loggers(ensemble.loggers), notify, mirror)
        self._ended = False
        self._cluster_lost: str | None = None
        self._stuck: set[str] = set()  # requests that can be neither read nor removed
        self._began, self._clock = time.monotonic(), executor.clock or CpuClock()
        self._limit_clock = StallFreeClock(lambda: time.monotonic())
        self._is_budget_used, self._budget_at = False, 0.0
        self._requests_at = self._usage_at = self._snapshot_at = self._metrics_at = 0.0

    # -- starting -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the executor, refuse what can never run, and log the start; nothing trains yet.

        Raises:
            SpecError: the ensemble cannot run on these nodes, or on this executor.
            Interrupted: a signal that is deferred was received; everything is closed again.
        """
        try:
            if not self._events.has_locks:
                refuse_without_locks(self.ensemble, self.run_dir)
            remove_stale("ensemble-", stop_stale_daemon)
            early = receive_requests(self.run_dir, self._stuck)  # they were made to an earlier controller
            left, files = self._read_unreported()  # by processes of an earlier start that was killed
            check_starts(self.ensemble, self.state)
            change = find_code_change(self.state, self._code, self.run_dir)
            changed_splits, evaluated_again = self._evaluate_again(change)
            damage = self._report_damage()
            opened = self.executor.open(self.run_dir, self.ensemble, self.handle)
            nodes = [node.limit(self.ensemble.limits) for node in opened]
            self._usage = DriverUsage(self.run_dir.usage, self._clock, self._observers, nodes)
            raise_if_deferred()
            stream = SharedStream(self.ensemble, spans_nodes=self._events.has_locks)
            try:
                stream.check()
            except PipelineError:
                if not self._is_over():
                    raise  # else nothing reads it
            cluster = nodes if self.executor.cluster is None else self.executor.cluster
            check_fit(self.ensemble, cluster, has_gpus=self.state.has_gpus)
            # The searcher names its study by these before the first event is logged.
            self.state.name, self.state.objective = self.ensemble.name, self.ensemble.objective or "accuracy"
            self.state.run_id = self.state.run_id or self.run_dir.info.get("run_id") or uuid.uuid4().hex
            self._trials = make_trials(self.ensemble, self.run_dir, self.state, sharing=stream.sharing)
            self._performer = Performer(
                self.run_dir, self.executor, self._events, self._trials, self._on_event, self._status, self.state
            )
            known = list(self.state.profiles.values()) if change is None else []  # changed code invalidates them
            self.session = Session(
                ensemble=self.ensemble,
                run_dir=self.run_dir,
                run=self.state,
                nodes=nodes,
                list_cluster=lambda: self.executor.cluster,
                stream=stream,
                awaits_pruner=self._trials.awaits_pruner,
                streaming=self._trials.streaming,
                trials_left=self._trials.left(),
                profiles=known,
                can_measure=not self.executor.in_process,
                stop_timeout_s=self._stop_timeout_s,
            )
            raise_if_deferred()
            has_trials = self.ensemble.search is None or self.ensemble.search.has_trials
            unshared = {"type": "sharing_ended", "node": None, "cohort": None, "detail": stream.unshared}
            events: list[Report] = [
                *left,
                describe_start(
                    self.ensemble,
                    self.run_dir,
                    self.state,
                    executor=self.executor.name,
                    members=len(self.state.members) + (self._trials.left() if has_trials else 0),
                    code=self._code.fingerprint,
                    more_epochs=self._more_epochs,
                    changed_splits=changed_splits,
                    evaluated_again=evaluated_again,
                    accepts_data=self._accepts_data,
                ),
                *damage,
                *([] if change is None else [{"type": "code_changed", **change.as_event()}]),
                self._usage.begin(),
                *({"type": "node", **node.as_event()} for node in nodes),
                *([] if stream.unshared is None else [unshared]),
            ]
            actions = self.session.start(events, *self._read_clock())
            redeclared, unstartable = find_redeclared(self.run_dir, self.state, self._trials.listed)
            actions += self.session.open_queue(redeclared, unstartable, *self._read_clock())
            self._perform(actions)
            remove(files)
            why = "it was made before this start of the run"
            self._process([{"type": "request", "request": request, "refused": why} for request in early])
            self._observers.start()
        except BaseException:
            self._close()
            raise

    def _evaluate_again(self, change: Change | None) -> tuple[dict[str, str], list[str]]:
        """The changed data, and the finished members that are evaluated again; the state is as that leaves it."""
        if not any(member.checkpoint for member in self.state.members.values()):
            return {}, []
        found = describe_changed_splits(self.state.header.data, training_data(self.ensemble), self.ensemble)
        keep_gb = self.ensemble.keep_predictions_gb
        members = list_evaluated_again(self.state, found, change, keep_gb)
        predicted = explain_evaluated_again(self.state, change, keep_gb)
        for why in filter(None, (found and explain_evaluation(found), predicted)):
            log.warning("%s: %s", self.run_dir.path, why)
        if found or members:
            evaluate_again(self.state, members, self._events.read_clock())
        return found, members

    def _is_over(self) -> bool:
        """Whether no member is trained or evaluated in this start."""
        search, members, code = self.ensemble.search, self.state.members.values(), self._code.fingerprint
        declared = search.trials if search is not None else len(self.ensemble.members or ())
        over = all(member.state in ENDED and not member.is_resumable(code) for member in members)
        return over and len(members) >= declared

    def _report_damage(self) -> list[Report]:
        """The events about damaged files of members. The state is as they, and `more_epochs`, will leave it: a
        searcher reads it before they are logged.
        """
        if self._more_epochs is not None:
            give_more_epochs(self.state, self._more_epochs, self._events.read_clock())
        found, code = self._checked, self._code.fingerprint
        if found is None:
            found = check_ended(self.run_dir, self.state, code)
        return report_damage(self.run_dir, self.state, found, code, self._events.read_clock())

    # -- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train all members to their end, then combine and report; or stop on request. Closes everything.

        Raises:
            PipelineError: it was stopped because records on which members are evaluated cannot be prepared.
            ClusterLostError: it was stopped because of that.
        """
        try:
            self.handle([])
            while not self._is_done():
                self.handle(self.executor.events(TICK_S))
            self._end()
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            self._close()
        if self.session.unusable_data is not None:
            raise PipelineError(self.session.unusable_data)
        if self._cluster_lost is not None:
            raise ClusterLostError(
                f"{self._cluster_lost}; {format_command('resume', self.run_dir.path)} continues the run"
            )

    def _close(self) -> None:
        if (performer := getattr(self, "_performer", None)) is not None:
            performer.reducer.close()
        self.executor.close()
        remove_empty(self.run_dir.path)
        for member in self.state.members:
            try:
                shorten(self.run_dir.log(member))
            except FileNotFoundError:  # it has printed nothing
                continue
            except OSError as error:
                log.warning("the log of %s stays as large as it is: %s", member, error)
        self._observers.close()
        if (usage := getattr(self, "_usage", None)) is not None:
            usage.close()
        release_arrays(self.run_dir.data)
        self._events.close()

    def release(self) -> None:
        """Drop everything, once `run` has returned or raised.

        Its parts refer to each other. Without this, the arrays of the ensemble would stay in memory until Python's
        next full collection, which may be many runs later.
        """
        for part in (self.session, self):
            vars(part).clear()

    def handle(self, events: Sequence[Report]) -> None:
        """Handle events of the executor; an executor with `in_process` calls this while a member trains."""
        with self.lock:
            actions = self._decide(events)
            now = time.monotonic()
            if now >= self._requests_at:
                self._requests_at = now + TICK_S
                self._perform(actions)
                self._handle_requests()
                actions = self._decide(self._observers.read())
            if now >= self._usage_at or self.session.attempts.costs.is_due(self._limit_clock.read()):
                self._usage_at = now + max(USAGE_EVERY_S, report_interval_s(now - self._began))
                actions += self._decide(self._usage.sample())
            actions += self._decide(self._performer.reducer.read())
            self._reconcile(actions)
            if now >= self._snapshot_at:
                self._snapshot_at = now + SNAPSHOT_EVERY_S
                self._save_snapshot()
            if now >= self._metrics_at:
                self._metrics_at = now + METRICS_EVERY_S
                self._performer.export_metrics()

    def stop(self, reason: str) -> None:
        """Let all members write a checkpoint and end, so that the run can be resumed."""
        with self.lock:
            self._perform(self.session.stop(reason, *self._read_clock()))

    def _read_clock(self) -> tuple[float, float]:
        """The time, in seconds of a clock by which others are limited, and in Unix seconds as in the log."""
        return self._limit_clock.read(), self._events.read_clock()

    def _decide(self, events: Sequence[Report]) -> list[Action]:
        now, t = self._read_clock()
        actions: list[Action] = []
        for event in events:
            if event["type"] == "cluster_lost":
                self._cluster_lost = event["detail"]
                actions += self.session.stop(event["detail"], now, t)
                continue
            complete = complete_event(event, self.run_dir, self._trials, self.session.find_reporter)
            actions += self.session.handle(complete, now, t)
        return actions

    def _perform(self, actions: Sequence[Action]) -> None:
        """Perform actions, and those that follow from their answers."""
        while actions:
            actions = self._decide(self._performer.perform(actions))
        if self.view is not None:
            self.view.update(self.state)

    def _process(self, events: Sequence[Report]) -> None:
        self._perform(self._decide(events))

    def _reconcile(self, actions: list[Action]) -> None:
        """Perform actions and what is due; members that were proposed meanwhile are placed at once."""
        self._perform(actions)
        self.session.limit_trials(self._trials.left(), self._trials.ready())
        self._keep_to_budget()
        self._perform(self.session.reconcile(*self._read_clock()))
        while self.session.is_placement_due and not self._trials.abort_reason:
            self.session.limit_trials(self._trials.left(), self._trials.ready())
            self._perform(self.session.reconcile(*self._read_clock()))
        if self._trials.abort_reason and self.session.stop_reason is None:
            self.stop(self._trials.abort_reason)

    def _keep_to_budget(self) -> None:
        """Stop the run when a limit of its search is reached."""
        search = self.ensemble.search
        if search is None or search.budget is None or self.session.stop_reason is not None:
            return
        if time.monotonic() < self._budget_at:
            return
        self._budget_at = time.monotonic() + BUDGET_EVERY_S
        try:
            used = self._status.read_used().read().run
        except StoreError as error:
            log.warning("what is used of the budget could not be read: %s", error)
            return
        why = explain_end(search.budget, self.state, used, self._events.read_clock())
        if why is not None:
            self._is_budget_used = True
            self.stop(why)

    def _handle_requests(self) -> None:
        """Handle pending requests, one after the other."""
        refused = "the run has ended" if self._ended else None
        for request in receive_requests(self.run_dir, self._stuck):
            self._process([{"type": "request", "request": request, "refused": refused}])

    # -- ending -------------------------------------------------------------------------------------------------

    def _is_done(self) -> bool:
        """Whether the run is over, pending requests included, which may add a member."""
        if self.session.is_over:
            with self.lock:
                self._handle_requests()
                self._ended = self.session.is_over
        return self._ended

    def _end(self) -> None:
        """End the run. The report, the ledger and the status say the same: none counts what the report costs."""
        self._perform(self.session.stop_feeders())
        self._metrics_at = self._usage_at = 0.0  # what the combination uses is not taken to have been used before
        self.handle(self.executor.events(0.0))
        self.executor.release()
        released = self.executor.events(0.0)
        self._process([event for event in released if event["type"] in (*MEASUREMENTS, "cluster_lost")])
        is_over = self.session.stop_reason is None
        if is_over:
            self._perform(self.session.reduce_checkpoints(*self._read_clock()))
            self._process(self._performer.reducer.wait())
        if is_over or self._is_budget_used:
            if finished := sum(member.state == "finished" for member in self.state.members.values()):
                self._process([{"type": "combining", "members": finished}])
            combined = self._finalizer.combine_members(self.state)
            if combined is not None:
                self._process([{"type": "combined", **combined}])
                if is_over:
                    self._perform(self.session.remove_unselected(*self._read_clock()))
                    self._process(self._performer.reducer.wait())
            self.handle(self.executor.events(0.0))
        self._trials.flush()
        self.executor.close()
        self._process([event for event in self.executor.events(0.0) if event["type"] in MEASUREMENTS])
        left, files = self._read_unreported()  # by agents that were lost
        self._process([*left, *self._observers.read(), *self._usage.sample()])
        remove(files)
        self._save_snapshot()
        ending = self._describe_end()
        used_s, last = time.process_time(), self._events.make_event(**ending)
        self._finalizer.write_report(last)
        report_cpu_s = time.process_time() - used_s
        for line in self._observers.end_loggers(last, len(self.state.members)):
            self._finalizer.note_missing(line)
        rest = {"loggers_cpu_s": self._usage.count_observers_rest()} if self._observers.names else {}
        self._handle_requests()  # those of the minutes that combination, report and loggers may take
        self._process([{**ending, "report_cpu_s": report_cpu_s, **rest}])
        self._finalizer.write_ledger()
        self._end_mirror()

    def _end_mirror(self) -> None:
        """Let the mirror copy what is left of the run, with its last event and its results; for a limited time.

        What it lacks then stays said in the run directory, as the log has its last event already.
        """
        if not self._observers.has_mirror:
            return
        status = load_status(self.run_dir)
        if status is not None and status.since is not None:
            log.warning("waiting for at most %.0f s: %s", MIRROR_END_S, status)
        self._observers.end_mirror(MIRROR_END_S)
        if (incomplete := explain_incomplete(self.run_dir)) is not None:
            log.warning("%s", incomplete)

    def _describe_end(self) -> Report:
        """The last event."""
        if self.session.stop_reason is not None:
            return {"type": "run_stopped", "reason": self.session.stop_reason}
        states = dict(Counter(member.state for member in self.state.members.values()))
        wall_s = time.monotonic() - self._began
        return {"type": "run_finished", "wall_s": wall_s, "states": states, "notes": self._finalizer.notes}

    def _abort(self, error: BaseException) -> None:
        try:
            self.executor.close()  # what its processes have used is known when they have ended
        except Exception as second:
            log.warning("the executor could not be closed: %s", second)
        try:
            reason = f"{type(error).__name__}: {error}"
            last = [event for event in self.executor.events(0.0) if event["type"] in MEASUREMENTS]
            self._process([*last, *self._usage.sample(), {"type": "run_stopped", "reason": reason}])
            self._observers.end_loggers(None, len(self.state.members))
            self._end_mirror()
        except Exception as second:  # such as a full disk, which may also be the cause of `error`
            log.warning("the end could not be logged: %s", second)

    # -- figures ------------------------------------------------------------------------------------------------

    def _save_snapshot(self) -> None:
        """Write a snapshot of the state if the log has grown enough since the last one."""
        try:
            self._status.save_if_grown()
        except (StoreError, OSError, ValueError, OverflowError) as error:  # a cache, without surrogates or 2**64
            log.warning("the snapshot of the log could not be written: %s", error)

    def _read_unreported(self) -> tuple[list[Report], list[Path]]:
        """What killed processes have used beyond the log, and the files to `remove` when that is logged."""
        left, files = read_tallies(self.run_dir.usage)
        return list_unreported(left, self._status.read_used().parser.last_usage) if left else [], files
