"""Runs an ensemble to its end: the steps of the start, turns of the loop, the steps of the end.

`Session` decides, without input or output; `Performer` acts, and is the only writer of the event log.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ensemble.controller.actions import Action
from ensemble.controller.changes import Change
from ensemble.controller.driver_usage import DriverUsage
from ensemble.controller.ending import ENDING, log_abort
from ensemble.controller.feeders import SharedStream
from ensemble.controller.finalize import Finalizer
from ensemble.controller.opening import OPENING
from ensemble.controller.performer import Performer, complete_event
from ensemble.controller.session import Session
from ensemble.events import MoreEpochs, Report
from ensemble.executors import ClusterLostError, Executor
from ensemble.meter import CpuClock
from ensemble.meter.cpu import report_interval_s
from ensemble.schedule.needs import Node
from ensemble.schedule.trials import Trials
from ensemble.spec import Ensemble, resolve_loggers
from ensemble.store import EventLog, RunDir, RunState, RunStatus, StoreError, receive_requests
from ensemble.store.file_checks import FileCheck
from ensemble.store.files import format_command
from ensemble.store.mirror_status import MirrorOptions
from ensemble.train.compilation import remove_empty
from ensemble.train.job import REHEARSAL
from ensemble.user_code.fingerprint import Code, code_of
from pipelines.errors import PipelineError
from pipelines.providers import import_object

log = logging.getLogger(__name__)

STALL_S = 5.0  # a controller that does not look at its clock for so long stood still
TICK_S = 0.5  # how late a request from another shell may be seen
USAGE_EVERY_S = 5.0
BUDGET_EVERY_S = 1.0
SNAPSHOT_EVERY_S = 5.0  # how often it is looked whether the log has grown by a snapshot's worth


@dataclass
class Opening:
    """What the steps of `OPENING` have found, for those that follow."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    change: Change | None = None
    changed_splits: dict[str, str] = field(default_factory=dict)
    evaluated_again: list[str] = field(default_factory=list)
    damage: list[Report] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    stream: SharedStream = field(init=False)
    base: list[Report] = field(default_factory=list)


class Controller:
    """Runs an ensemble to its end on one executor; a new one, which folds the log, replaces one that was killed.

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
        observers: None where the run has none.
        opening: what the steps of `ensemble.controller.opening` find.
        session, trials, performer, usage: they exist once `Controller.open` has returned.
        cluster_lost: why the cluster does not answer any more; None: it does.
        view: a table in a notebook that this draws, where the thread that runs it is the one that waits.
    """

    session: Session
    trials: Trials
    performer: Performer
    usage: DriverUsage
    view: Any

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
        self.more_epochs, self.checked, self.accepts_data = more_epochs, checked, accepts_data
        self.code = code or code_of(ensemble)  # before user code runs, which may change what it finds in globals
        self.finalizer = Finalizer(run_dir, ensemble)
        self.events, self.on_event, self.stop_timeout_s = events, on_event, stop_timeout_s
        self.status = RunStatus(run_dir)
        self.observers: Any = None  # `ensemble.reporting.loggers.observers.Observers`, where there are some
        if ensemble.loggers or notify or mirror is not None:
            make = import_object("ensemble.reporting.loggers.observers:Observers")
            self.observers = make(run_dir, resolve_loggers(ensemble.loggers), notify, mirror)
        self.opening, self._is_ended = Opening(), False
        self.cluster_lost: str | None = None
        self.stuck: set[str] = set()  # requests that can be neither read nor removed
        self.began, self.clock = time.monotonic(), executor.clock or CpuClock()
        self._limit_s, self._read_at = 0.0, time.monotonic()
        self.is_budget_used, self._budget_at = False, 0.0
        self._requests_at = self.usage_at = self._snapshot_at = 0.0

    def open(self) -> None:
        """Open the executor, refuse what can never run, and log the start; nothing trains yet.

        Raises:
            SpecError: the ensemble cannot run on these nodes, or on this executor.
            Interrupted: a signal that is deferred was received; everything is closed again.
        """
        try:
            for step in OPENING:
                step(self)
        except BaseException:
            self._close()
            raise

    def run(self) -> None:
        """Train all members to their end, then combine and report; or stop on request. Closes everything.

        Raises:
            PipelineError: it was stopped because records on which members are evaluated cannot be prepared.
            ClusterLostError: it was stopped because of that.
        """
        try:
            self.handle([])
            while not self.is_done():
                self.advance()
            for step in ENDING:
                step(self)
        except BaseException as error:
            log_abort(self, error)
            raise
        finally:
            self._close()
        if self.session.unusable_data is not None:
            raise PipelineError(self.session.unusable_data)
        if self.cluster_lost is not None:
            resumes = f"{format_command('resume', self.run_dir.path)} continues the run"
            raise ClusterLostError(f"{self.cluster_lost}; {resumes}")

    def _close(self) -> None:
        if (performer := getattr(self, "performer", None)) is not None:
            performer.reducer.close()
        self.executor.close()
        remove_empty(self.run_dir.path / "compiled")
        shutil.rmtree(self.run_dir.member(REHEARSAL), ignore_errors=True)
        if self.observers is not None:
            self.observers.close()
        self.events.close()

    def release(self) -> None:
        """Drop all parts, which refer to each other and would keep the ensemble's arrays until the next full
        collection.
        """
        for part in (self.session, self):
            vars(part).clear()

    # -- one turn ------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Wait for events of the executor, and handle them."""
        self.handle(self.executor.events(TICK_S))

    def handle(self, events: Sequence[Report]) -> None:
        """Handle events of the executor; an executor with `in_process` calls this while a member trains."""
        with self.lock:
            actions = self.decide(events)
            now_s = time.monotonic()
            if now_s >= self._requests_at:
                self._requests_at = now_s + TICK_S
                self.perform(actions)
                self.handle_requests()
                actions = [] if self.observers is None else self.decide(self.observers.read())
            if now_s >= self.usage_at or self.session.attempts.costs.is_due(self.read_clock()[0]):
                self.usage_at = now_s + max(USAGE_EVERY_S, report_interval_s(now_s - self.began))
                actions += self.decide(self.usage.sample())
            actions += self.decide(self.performer.reducer.read())
            self._reconcile(actions)
            if now_s >= self._snapshot_at:
                self._snapshot_at = now_s + SNAPSHOT_EVERY_S
                self.save_snapshot()

    def stop(self, reason: str, *, failed: bool = True) -> None:
        """Let all members write a checkpoint and end, so that the run can be resumed."""
        with self.lock:
            self.perform(self.session.stop(reason, *self.read_clock(), failed=failed))

    def read_clock(self) -> tuple[float, float]:
        """The time, in seconds of a clock by which others are limited, and in Unix seconds as in the log.

        Where the controller itself stood still (a suspended job, a slow file system), it sees late what members
        sent in time: of a stall only a second counts.
        """
        now_s = time.monotonic()
        self._limit_s += passed_s if (passed_s := now_s - self._read_at) <= STALL_S else 1.0
        self._read_at = now_s
        return self._limit_s, self.events.read_clock()

    def decide(self, events: Sequence[Report]) -> list[Action]:
        now_s, t = self.read_clock()
        actions: list[Action] = []
        for event in events:
            if event["type"] == "cluster_lost":
                self.cluster_lost = event["detail"]
                actions += self.session.stop(event["detail"], now_s, t)
                continue
            complete = complete_event(event, self.run_dir, self.trials, self.session.find_reporter)
            actions += self.session.handle(complete, now_s, t)
        return actions

    def perform(self, actions: Sequence[Action]) -> None:
        """Perform actions, and those that follow from their answers."""
        while actions:
            actions = self.decide(self.performer.perform(actions))
        if self.view is not None:
            self.view.update(self.state)

    def process(self, events: Sequence[Report]) -> None:
        self.perform(self.decide(events))

    def _reconcile(self, actions: list[Action]) -> None:
        """Perform actions and what is due; members that were proposed meanwhile are placed at once."""
        self.perform(actions)
        self.session.limit_trials(self.trials.left(), self.trials.ready())
        self._keep_to_budget()
        self.perform(self.session.reconcile(*self.read_clock()))
        while self.session.is_placement_due and not self.trials.abort_reason:
            self.session.limit_trials(self.trials.left(), self.trials.ready())
            self.perform(self.session.reconcile(*self.read_clock()))
        if self.trials.abort_reason and self.session.stop_reason is None:
            self.stop(self.trials.abort_reason)

    def _keep_to_budget(self) -> None:
        """Stop the run when a limit of its search is reached."""
        search = self.ensemble.search
        if search is None or search.budget is None or self.session.stop_reason is not None:
            return
        if time.monotonic() < self._budget_at:
            return
        self._budget_at = time.monotonic() + BUDGET_EVERY_S
        try:
            used = self.status.read_used().read().run
        except StoreError as error:
            log.warning("what the run has used of its budget could not be read: %s", error)
            return
        why = import_object("ensemble.search.budget:explain_end")(
            search.budget, self.state, used, self.events.read_clock()
        )
        if why is not None:
            self.is_budget_used = True
            self.stop(why, failed=False)

    def handle_requests(self) -> None:
        """Handle pending requests, one after the other."""
        refused = "the run has ended" if self._is_ended else None
        for request in receive_requests(self.run_dir, self.stuck):
            self.process([{"type": "request", "request": request, "refused": refused}])

    def is_done(self) -> bool:
        """Whether the run is over, pending requests included, which may add a member."""
        if self.session.is_over:
            with self.lock:
                self.handle_requests()
                self._is_ended = self.session.is_over
        return self._is_ended

    # -- figures ------------------------------------------------------------------------------------------------

    def save_snapshot(self) -> None:
        """Write a snapshot of the state if the log has grown enough since the last one."""
        try:
            self.status.save_if_grown()
        except (StoreError, OSError, ValueError, OverflowError) as error:  # a cache, without surrogates or 2**64
            log.warning("the snapshot of the log could not be written: %s", error)
