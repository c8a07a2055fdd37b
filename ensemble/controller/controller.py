"""The loop of a run: events come in, are logged and folded, decisions go out to an executor.

The only writer of the event log, and the only place that acts on decisions. What to decide is computed by pure
functions (`ensemble.schedule`) and by the trials' proposer (`ensemble.search.trials`); what has happened is in the
`RunState`, the fold over the log. So a controller that was killed is replaced by another one that folds the log.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from ensemble.controller.actions import Action, perform, with_exit_notes
from ensemble.controller.attempt import ATTEMPT_EVENTS
from ensemble.controller.attempts import Attempts
from ensemble.controller.changes import change_of_code
from ensemble.controller.failure_policy import RetryPolicy
from ensemble.controller.feeders import Feeders
from ensemble.controller.finalize import Conclusion
from ensemble.controller.planner import Planner
from ensemble.controller.profiler import Profiling
from ensemble.controller.queue import MemberQueue
from ensemble.controller.rebalancer import Pacing
from ensemble.controller.recorder import Record
from ensemble.controller.requests import RequestHandler
from ensemble.executors import Executor
from ensemble.meter import DriverClock
from ensemble.schedule import Node, PlacementState, count_placeable, explain_unplaceable
from ensemble.schedule.needs import Need, compute_need
from ensemble.schedule.profiles import max_node_memory_gb
from ensemble.search.trials import make_trials
from ensemble.spec import Ensemble, Identity, Member, SpecError
from ensemble.store import EventLog, RunDir, RunState, receive_requests, revision, versions
from ensemble.train.data_identity import training_data
from ensemble.user_code.fingerprint import Code, code_of

log = logging.getLogger(__name__)

TICK_S = 0.5  # how late a request from another shell may be seen
USAGE_EVERY_S = 5.0
MIRROR_S = 0.1  # of each tick, at most, for showing a search to people
LAST_WORDS = ("usage", "power", "feeder")  # what an executor that was closed may still have to say
#: News after which as many members read each stream as before.
ROUTINE = frozenset(("started", "progress", "epoch", "checkpoint", "usage", "power", "feeder"))


class Controller:
    """Runs an ensemble to its end on one executor.

    Args:
        run_dir, ensemble, executor: what, where, how.
        events: the run's log, opened; it is closed at the end of `run`.
        state: the fold of what the log already says.
        on_event: called with each event after it has been folded.
        stop_timeout_s: how long members may take to checkpoint when the run is stopped.
    """

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
    ) -> None:
        self.run_dir, self.ensemble, self.executor, self.state = run_dir, ensemble, executor, state
        self.lock = threading.RLock()
        self._code = code or code_of(ensemble)  # before user code runs, which may change what it finds in globals
        self._conclusion = Conclusion(run_dir, ensemble)
        self._events = events
        self._record = Record(run_dir, events, state, self.lock, on_event)
        self._emit = self._record.emit
        self._stop_timeout_s = stop_timeout_s
        self._feeders = Feeders(executor, ensemble, run_dir, self._emit)
        self._nodes: list[Node] = []
        self._cohort = self._stream = 0  # the next number; the cohort of all trials
        self._stopping: str | None = None
        self._unread: set[str] = set()  # hyperparameters of which was said that nothing reads them
        self._ended = False
        self._actions: list[Action] = []  # decided and not performed yet
        self._began, self._clock = time.monotonic(), DriverClock()
        self._requests_at = self._usage_at = 0.0

    def open(self, check: Callable[[], None] = lambda: None) -> None:
        """Open the executor, refuse what can never run, record the start; nothing trains yet.

        Args:
            check: called between steps that take their time; what it raises ends this, all closed again.

        Raises:
            SpecError: what was asked for cannot be had on these nodes, or by this executor.
        """
        try:
            early = receive_requests(self.run_dir)  # meant for an earlier, dead controller
            self._nodes = self.executor.open(self.run_dir, self.ensemble, self.handle)
            check()
            self._feeders.check()
            self._refuse_what_cannot_fit()
            # the searcher names its study after these, before the first event says them
            self.state.name, self.state.objective = self.ensemble.name, self.ensemble.objective or "accuracy"
            self.state.run_id = self.state.run_id or self.run_dir.info.get("run_id") or uuid.uuid4().hex
            self._trials = make_trials(self.ensemble, self.run_dir, self.state, sharing=self._feeders.sharing)
            policy = RetryPolicy(self.ensemble.retries)
            self._attempts = Attempts(
                self.run_dir,
                self._actions,
                self.state,
                self._trials,
                policy,
                self._emit,
                self.ensemble.hang_timeout_s,
                self.ensemble.elastic,
            )
            self._queue = MemberQueue(
                self.state, self._trials, self._attempts, self._emit, self._explain_unplaceable
            )
            self._requests = RequestHandler(self.run_dir, self._queue, self._emit, self._stop)
            self._change = change_of_code(self.state, self._code, self.run_dir)
            known = self.state.profiles.values() if self._change is None else ()  # of what trains otherwise now
            profiling = Profiling(
                self._actions,
                self.run_dir,
                self._emit,
                self.ensemble.devices,
                known,
                is_possible=not self.executor.in_process,
            )
            pacing = Pacing(self.ensemble, profiling, self.state, self._attempts, self._feeders, self._emit)
            self._planner = Planner(self.ensemble, profiling, pacing, self.state, self._emit)
            check()
            self._announce()
            self._requests.refuse(early, "it was asked before this start of the run")
        except BaseException:
            self.executor.close()
            self._events.close()
            raise

    def run(self) -> None:
        """Train all members to their end, then combine and report; or stop on request. Nothing is left behind."""
        try:
            self.handle([])
            while not self._done():
                self.handle(self.executor.events(TICK_S))
            self._end()
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            self.executor.close()
            self._events.close()

    def handle(self, events: Sequence[dict[str, Any]]) -> None:
        """Take in what the executor reports, and act on it. One with `in_process` calls this within a member."""
        with self.lock:
            now = time.monotonic()
            with self._events.batch():
                for event in events:
                    self._take(event, now)
            self._perform(now)
            if self._attempts.changed or any(event["type"] not in ROUTINE for event in events):
                self._feeders.expect_at_most(self._attempts.readers())
            with self._events.batch():
                self._tick(now)
            self._perform(now)
            with self._events.batch():
                if not self._stopping:
                    if self._attempts.changed:
                        self._place(now)
                    self._keep_in_step(now)
                if self._trials.abort_reason and not self._stopping:
                    self._stop(self._trials.abort_reason, now + self._stop_timeout_s)
            self._perform(now)

    def _perform(self, now: float) -> None:
        """Do what was decided, the log being written; take in what could not be done."""
        while self._actions:
            actions = self._actions.copy()
            self._actions.clear()
            failed = perform(actions, self.executor, self.run_dir)
            with self._events.batch():
                for event in failed:
                    self._take(event, now)

    # -- starting -----------------------------------------------------------------------------------------------

    def _refuse_what_cannot_fit(self) -> None:
        listed, fitting = self.ensemble.members, set[Need]()
        for number in range(1 if listed is None else len(listed)):
            identity = self.ensemble.identify(number, {} if listed is None else None)
            if compute_need(identity) not in fitting:
                reason = explain_unplaceable(identity, self._nodes, self.ensemble.devices)
                if reason is not None:
                    raise SpecError(reason)
                fitting.add(compute_need(identity))

    def _announce(self) -> None:
        ensemble, resumed = self.ensemble, self.state.started is not None
        spans = [span.cohort for member in self.state.members.values() for span in member.spans]
        self._stream = 1 + max((cohort for cohort in spans if cohort is not None), default=-1)
        self._cohort = self._stream + self._trials.streaming
        self._emit(
            "run_started",
            name=ensemble.name,
            run_id=self.state.run_id,
            executor=self.executor.name,
            mode="search" if ensemble.search else "list",
            objective=ensemble.objective,
            direction=ensemble.mode,
            epochs=ensemble.epochs,
            members=len(self.state.members) + self._trials.left(),
            data=training_data(ensemble),
            code=self._code.fingerprint,
            versions=versions(),
            revision=self.run_dir.info.get("revision") or revision(self.run_dir.path),
            host=socket.gethostname(),
            pid=os.getpid(),
            resumed=resumed,
        )
        if self._change is not None:
            self._emit("code_changed", **self._change.as_event())
        with self._events.batch():
            self._emit("usage", **self._clock.begin(self._here))
            for node in self._nodes:
                self._emit_node(node)
            if self._feeders.unshared is not None:
                self._emit("sharing_ended", node=None, cohort=None, detail=self._feeders.unshared)
            self._queue.open()

    def _explain_unplaceable(self, number: int, given: Member) -> str | None:
        return self._never(self.ensemble.identify(number, given))

    def _never(self, identity: Identity) -> str | None:
        return explain_unplaceable(identity, self._nodes, self.ensemble.devices)

    def _emit_node(self, node: Node) -> None:
        self._emit(
            "node",
            node=node.name,
            cpus=node.cpus,
            gpus=list(node.gpus),
            memory_gb=node.memory_gb,
            gpu_memory_gb=list(node.gpu_memory_gb),
            host=node.host,
            power=dict(node.power),
        )

    # -- deciding -----------------------------------------------------------------------------------------------

    def _board(self, now: float) -> PlacementState:
        grants, most_gb = self._attempts.failures.grants, max_node_memory_gb(self._nodes)
        wanted = [*self._queue.waiting, *(identity for identity, _ in self._attempts.returning)]
        return PlacementState(
            nodes=self._attempts.failures.usable_nodes(self._nodes, wanted, self.ensemble.devices, now),
            devices=self.ensemble.devices,
            waiting=[]
            if self._planner.measuring
            else [grants.apply(each, most_gb) for each in self._queue.waiting],
            returning=[
                (grants.apply(identity, most_gb), cohort)
                for identity, cohort in self._attempts.returning
                if not self._planner.measuring or self.state.members[identity.member].attempts
            ],
            running=self._planner.at_pace(self._attempts.placements()),
            limits=self._attempts.limits,
            tenants=self._planner.tenants(self._nodes),
            next_cohort=self._stream if self._trials.streaming else self._cohort,
            streaming=self._trials.streaming,
        )

    def _place(self, now: float) -> None:
        attempts = self._attempts
        attempts.changed = False
        if self._trials.streaming and not self._planner.measuring:
            for _ in range(self._wanted_trials(now)):
                self._queue.propose()
        coming = self._queue.left()
        self._queue.waiting, attempts.returning = self._planner.settle(
            self._queue.waiting, attempts.returning, self._board(now), coming, now
        )
        starts = self._planner.starts(self._board(now))
        new = (start.cohort + 1 for start in starts if start.cohort is not None)
        self._cohort = max(self._cohort, *new, 0)
        placed = {start.placement.member for start in starts}
        self._queue.remove(placed)
        attempts.returning = [item for item in attempts.returning if item[0].member not in placed]
        nodes = {node.name: node for node in self._nodes}
        readers = {start.placement.member for start in starts if self._epochs_left(start.placement.identity)}
        for start in starts:
            feeder = self._feeders.address(start, starts, readers, nodes)
            attempts.launch(start, feeder, now)
        self._feeders.stop_unneeded(self._needed_feeders())
        left_out = [*self._queue.waiting, *(identity for identity, _ in attempts.returning)]
        if left_out and not attempts and not attempts.changed and not self._planner.measuring:
            self._without_a_place(left_out, now)

    def _without_a_place(self, left_out: Sequence[Identity], now: float) -> None:
        """Nothing runs, and these find no room: those that can never find any fail by themselves."""
        why = {one.member: reason for one in left_out if (reason := self._never(one)) is not None}
        if not self._nodes or not why:
            self._stop(next(iter(why.values()), "no place is left"), now + self._stop_timeout_s)
            return
        for member, reason in why.items():
            self._queue.give_up(member, reason)

    def _keep_in_step(self, now: float) -> None:
        if self._planner.due:
            self._cohort = self._planner.keep_in_step(self._board(now), self._queue.left(), self._cohort)

    def _wanted_trials(self, now: float) -> int:
        """How many trials find a place now; one at least while nobody trains or waits: it may be a smaller one."""
        left, board = self._queue.left(), self._board(now)
        if not left:
            return 0
        example = self._planner.example(self.ensemble.identify(0, {}), board.nodes)
        nobody = not (self._attempts or board.waiting or board.returning)
        return max(count_placeable(example, left, board), int(nobody))

    def _epochs_left(self, identity: Identity) -> int:
        """Own epochs after its last checkpoint; none for one that ended just after its last epoch."""
        checkpoint = self.state.members[identity.member].checkpoint
        return identity.epochs - (checkpoint["epoch"] if checkpoint else 0)

    def _needed_feeders(self) -> set[tuple[str, int]]:
        """Those that a running member reads, or that one which returns or joins later will."""
        coming = {cohort for _, cohort in self._attempts.returning} | self._attempts.failures.pending_cohorts()
        if self._trials.streaming and not self._stopping and (self._queue.waiting or self._queue.left()):
            coming.add(self._stream)
        return {*self._attempts.reading(), *(key for key in self._feeders.running if key[1] in coming)}

    # -- taking in events ---------------------------------------------------------------------------------------

    def _take(self, event: dict[str, Any], now: float) -> None:
        kind = event["type"]
        of_the_spec = kind == "failed" and event.get("reason") == "spec"
        if of_the_spec and not any(member.attempts for member in self.state.members.values()):
            raise SpecError(event["error"])  # seen while members were measured: nothing has trained
        if self._planner.take(event, self._nodes, now):
            self._attempts.changed |= not self._planner.measuring
        elif kind == "exited":
            self._attempts.take(with_exit_notes(event, self.run_dir), now)
        elif kind in ATTEMPT_EVENTS or kind == "launch_failed":
            self._attempts.take(event, now)
        elif kind == "bad_record":
            self._attempts.take_bad_record(event)
        elif kind == "feeder_exited":
            key = (event["node"], event["cohort"])
            if any(node.name == event["node"] for node in self._nodes):
                reading, started = self._attempts.reading().count(key), event.get("started", True)
                self._feeders.restart(*key, reading, event.get("detail", ""), started=started)
        elif kind == "unread":
            new = [name for name in event["params"] if name not in self._unread]
            self._unread.update(new)
            if new:
                self._emit(kind, member=event["member"], attempt=event["attempt"], params=new)
                log.warning("nothing reads the hyperparameter %s (%s)", ", ".join(map(repr, new)), event["member"])
        elif kind == "node_lost":
            self._emit(kind, node=event["node"], detail=event.get("detail", ""))
            self._nodes = [node for node in self._nodes if node.name != event["node"]]
            self._attempts.changed = True
        else:
            self._emit(kind, **{key: value for key, value in event.items() if key not in ("type", "v", "t")})

    # -- clock and requests -------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        if now >= self._requests_at:
            self._requests_at = now + TICK_S
            self._handle_requests(now)
            self._trials.catch_up(MIRROR_S)
        if now >= self._usage_at:
            self._usage_at = now + USAGE_EVERY_S
            self._emit_usage()
        self._record.tick(now)
        self._attempts.watch(now)
        measuring = self._planner.measuring
        self._planner.tick(now)
        self._attempts.changed |= measuring and not self._planner.measuring

    def _handle_requests(self, now: float) -> None:
        self._requests.handle_pending(
            now, now + self._stop_timeout_s, stopping=self._stopping is not None, ended=self._ended
        )

    def _stop(self, reason: str, until: float) -> None:
        if self._stopping is None:
            self._stopping = reason
            self._planner.stop()
        self._attempts.stop(until)

    # -- ending -------------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        return not self._attempts and (self._stopping is not None or not self._queue)

    def _done(self) -> bool:
        """Whether the run is over, also after what was asked until now: it may be to add a member."""
        if self._over():
            with self.lock:
                now = time.monotonic()
                self._handle_requests(now)
                self._perform(now)
                self._ended = self._over()
        return self._ended

    def _end(self) -> None:
        self._feeders.stop_unneeded(set())
        self.handle(self.executor.events(0.0))
        if self._stopping is None:
            combined = self._conclusion.combined(self.state)
            if combined is not None:
                self._emit("combined", **combined)
            self.handle(self.executor.events(0.0))
        self._trials.catch_up()
        self.executor.close()
        for event in self.executor.events(0.0):
            if event["type"] in LAST_WORDS:
                self._take(event, time.monotonic())
        self._record.flush()
        self._record.keep()
        # What is used after the last figures is in no account: the report is written before they are told.
        kind, fields = self._ending()
        usage = self._events.make_event("usage", **self._clock.sample(self._here, self.executor.work_cpu_s))
        self._conclusion.write_up([usage, self._events.make_event(kind, **fields)])
        self._emit_usage()
        self._emit(kind, **fields)
        self._conclusion.write_ledger()

    def _ending(self) -> tuple[str, dict[str, Any]]:
        """The last event."""
        if self._stopping is not None:
            return "run_stopped", {"reason": self._stopping}
        states = [member.state for member in self.state.members.values()]
        counted = {state: states.count(state) for state in dict.fromkeys(states)}
        wall_s = time.monotonic() - self._began
        return "run_finished", {"wall_s": wall_s, "states": counted, "notes": self._conclusion.notes}

    def _abort(self, error: BaseException) -> None:
        try:
            self._emit_usage()
            self._emit("run_stopped", reason=f"{type(error).__name__}: {error}")
        except Exception as second:  # such as a full disk, which may be what `error` is about
            log.warning("the end could not be logged: %s", second)

    # -- the log ------------------------------------------------------------------------------------------------

    def _emit_usage(self) -> None:
        self._emit("usage", **self._clock.sample(self._here, self.executor.work_cpu_s))

    @property
    def _here(self) -> str:
        """The name of the driver's node, or of another one where it is on none."""
        here = [node.name for node in self._nodes if node.host == socket.gethostname()]
        return (here or [node.name for node in self._nodes] or ["driver"])[0]
