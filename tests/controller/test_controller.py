"""The controller against a simulated cluster: whatever fails, each member ends as it should and nothing is lost.

The simulation stands for processes and time only: the log, the state, the decisions and the requests are real.
"""

from __future__ import annotations

import functools
import os
import random
import time
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.event_dicts import collect_notices, fold, read_events
from kit.property_examples import examples

import ensemble
from ensemble.controller.controller import Controller
from ensemble.controller.failures import RetryPolicy
from ensemble.controller.finalize import Finalizer
from ensemble.controller.start_steps import check_loggers
from ensemble.executors import EventHandler
from ensemble.reporting.sections.feeders import pipeline_lines
from ensemble.run import Request
from ensemble.schedule.needs import Node, Placement
from ensemble.spec import Ensemble, Identity, Member, Recipe, Resources, SpecError
from ensemble.store import EventLog, RunDir, RunState, StoreError, write_request
from ensemble.train.job import Job
from pipelines import Peers, Pipeline, sources

DECLARED = Resources(cpus_per_worker=1.0, gpus_per_worker=0.0, memory_gb=0.1)  # so nothing is measured
FAULTS = ("error", "nan", "lost", "oom", "rank")
ATTEMPTS = st.tuples(st.sampled_from([f"member-{n}" for n in range(4)]), st.integers(0, 2))
FAULTS_OF_ATTEMPTS = st.dictionaries(ATTEMPTS, st.sampled_from(FAULTS))


def an_ensemble(**options: Any) -> Ensemble:
    data, recipe = (
        sources.arrays(x=np.zeros((8, 2), np.float32)),
        Recipe(model=len, loss=len, task="classification"),
    )
    defaults: dict[str, Any] = {"name": "simulated", "recipe": recipe, "train": Pipeline(data), "epochs": 2}
    defaults |= {"sharing": "independent", "retries": 1, "resources": DECLARED}
    if "search" not in options:
        defaults["members"] = [{"n": n} for n in range(4)]
    return Ensemble(**{**defaults, **options})


class Simulated:
    """An executor whose members emit one event a turn; a seed decides whose turn it is.

    `faults` maps (member, attempt) to what befalls that attempt after its first epoch.
    """

    name = "simulated"
    in_process = False
    clock = None
    cluster: Sequence[Node] | None = None

    def __init__(
        self,
        cpus: float = 2,
        faults: Mapping[tuple[str, int], str] | None = None,
        seed: int = 0,
        before: Callable[[dict[str, Any]], None] = lambda event: None,
        after: Simulated | None = None,
        several: bool = False,
        idle: Callable[[Simulated], object] = lambda executor: None,
    ) -> None:
        """`after`: the executor of the start before, whose members' epochs are done; `idle`: if nothing runs."""
        self.node = Node("sim", cpus, (), 8, "sim")
        self.faults, self.before, self.rng = dict(faults or {}), before, random.Random(seed)
        self.several, self.idle, self.log = several, idle, Path()
        self.done: dict[str, int] = after.done if after is not None else {}
        self.scripts: dict[str, list[dict[str, Any]]] = {}
        self.jobs, self.alive = dict[str, Job](), dict[str, set[int]]()
        self.told = list[tuple[str, str]]()
        self.feeders, self.feeders_stopped = dict[int, int](), list[int]()
        self.closed = False

    def open(self, run_dir: RunDir, ensemble: Ensemble, handle: EventHandler) -> list[Node]:
        self.log = run_dir.events
        return [self.node]

    def explain(self, member: str, what: str, *kinds: str) -> None:
        """Nothing is done before the log, as it is on the disk, says why."""
        attempt = self.jobs[member].attempt if member in self.jobs else None
        logged = [event for event in read_events(self.log) if event.get("member") == member]
        is_said = any(e["type"] in kinds and attempt in (None, e["attempt"]) for e in logged)
        assert is_said, f"{what} of {member}, which the log does not explain"

    def start_feeder(
        self, node: str, cohort: int, expect: int, capacity: int, peers: Peers | None = None, late: bool = False
    ) -> str | None:
        self.feeders[cohort] = expect
        return f"feeder-{cohort}"

    def expect_readers(self, node: str, cohort: int, members: int) -> None:
        assert members < self.feeders[cohort], "a gate is told only of members that will not come"

    def stop_feeder(self, node: str, cohort: int) -> None:
        self.feeders_stopped.append(cohort)

    def request(self, waiting: Sequence[Identity], placed: Sequence[Placement]) -> None: ...

    def launch(self, jobs: Sequence[Job], devices: Sequence[str | None]) -> None:
        job = jobs[0]
        member, attempt, epochs = job.identity.member, job.attempt, job.identity.epochs
        assert member not in self.jobs
        assert [j.rank for j in jobs] == list(range(job.identity.workers))
        self.jobs[member], self.alive[member] = job, {j.rank for j in jobs}
        assert sum(j.identity.cpus_per_worker * j.identity.workers for j in self.jobs.values()) <= self.node.cpus

        def news(kind: str, **fields: Any) -> dict[str, Any]:
            return {"type": kind, "member": member, "attempt": attempt, **fields}

        def left(rank: int, outcome: str | None) -> dict[str, Any]:
            return news("exited", rank=rank, outcome=outcome, detail="was killed")

        first = self.done.get(member, 0)
        first_epoch = {"first_epoch": 5} if job.identity.first_epoch is None else {}
        script = [news("started", pid=1, epoch=first, step=0, startup_cpu_s=0.0, **first_epoch)]
        for epoch in range(first, epochs):
            script.append(news("epoch", epoch=epoch, metrics={"accuracy": job.identity.number / 100 + epoch}))
        script.append(news("finished", epoch=epochs, metrics={"accuracy": job.identity.number / 100}))
        script += [left(rank, "finished") for rank in range(job.identity.workers)]
        fault = self.faults.get((member, attempt))
        if fault is not None:
            script = script[:2]
        if fault in ("error", "nan"):
            script += [news("failed", error="it broke", reason=fault, retry=fault == "error")]
            script += [left(rank, "failed") for rank in range(job.identity.workers)]
        elif fault in ("oom", "lost"):
            script += [left(0, None) | ({"reason": "oom"} if fault == "oom" else {})]
        elif fault == "rank":
            script += [left(job.identity.workers - 1, None)]
        self.scripts[member] = script
        self.explain(member, "launch", "placed")

    def events(self, timeout_s: float | None) -> list[dict[str, Any]]:
        if not any(self.scripts.values()):
            self.idle(self)
            time.sleep(0.01)
            return []
        count = max(1, sum(map(len, self.scripts.values())) // 2) if self.several else 1
        return [self._take() for _ in range(count) if any(self.scripts.values())]

    def _take(self) -> dict[str, Any]:
        member = self.rng.choice(sorted(m for m, script in self.scripts.items() if script))
        event = self.scripts[member].pop(0)
        if event["type"] == "epoch":
            self.done[member] = event["epoch"] + 1
        if event["type"] == "exited":
            self.alive[member].discard(event["rank"])
            if not self.alive[member]:
                del self.jobs[member], self.scripts[member], self.alive[member]
        self.before(event)
        return event

    def send(self, member: str, command: str, **fields: Any) -> None:
        self.explain(member, command, "epoch" if command in ("continue", "prune") else "placed")
        self.told.append((member, command))
        outcome = {"prune": "pruned", "stop": "stopped", "cancel": "cancelled"}.get(command)
        if outcome and member in self.jobs:
            ended = {"type": outcome, "member": member, "attempt": self.jobs[member].attempt, "step": 0}
            self._end(member, outcome)
            self.scripts[member].insert(0, {**ended, "epoch": self.done.get(member, 0)})

    def kill(self, member: str) -> None:
        if self.several:  # of one that was silent it is said at its exit
            self.explain(member, "kill", "failed", "cancelled", "stopped", "paused")
        if member in self.jobs:
            self._end(member, None)

    def _end(self, member: str, outcome: str | None) -> None:
        job = self.jobs[member]
        who = {"type": "exited", "member": member, "attempt": job.attempt}
        ranks = range(job.identity.workers)
        self.scripts[member] = [{**who, "outcome": outcome, "detail": "killed", "rank": n} for n in ranks]

    def release(self) -> None: ...

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _requests_are_seen_at_once_and_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ensemble.controller.controller.TICK_S", 0.0)
    monkeypatch.setattr("ensemble.controller.attempts.RetryPolicy", functools.partial(RetryPolicy, pause_s=0.0))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def _without_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a property of many runs, which would each write one."""
    monkeypatch.setattr("ensemble.controller.finalize.Finalizer.write_report", lambda *_: None)


def run(path: Path, ensemble: Ensemble, executor: Simulated, **options: Any) -> RunState:
    run_dir = RunDir.create(path, ensemble)
    events = EventLog(run_dir.events)
    controller = Controller(run_dir, ensemble, executor, events, fold(read_events(run_dir.events)), **options)
    controller.open()
    controller.run()
    assert executor.closed
    state = fold(read_events(run_dir.events))
    assert state.ended is not None
    return state


def states(state: RunState) -> dict[str, str]:
    return {member.id: member.state for member in state.members.values()}


def test_cpu_time_of_loggers_during_the_report_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensemble = an_ensemble(loggers=["tensorboard"])
    run_dir = RunDir.create(tmp_path / "run", ensemble)
    controller = Controller(run_dir, ensemble, Simulated(), EventLog(run_dir.events), RunState())
    write_report = Finalizer.write_report

    def sum_late_cpu_s() -> float:
        """What all processes of loggers have used after their last `usage` events."""
        usage = [event for event in read_events(run_dir.events) if event["type"] == "usage"]
        logged = {event["pid"]: event["cpu_s"] for event in usage if event["pid"] != os.getpid()}
        return sum(event["cpu_s"] for event in controller.observers.make_usage("sim")) - sum(logged.values())

    def write_late(finalizer: Finalizer, last: dict[str, Any]) -> None:
        while sum_late_cpu_s() < 0.02:
            time.sleep(0.01)
        write_report(finalizer, last)

    monkeypatch.setattr(Finalizer, "write_report", write_late)
    controller.open()
    controller.run()
    assert read_events(run_dir.events)[-1]["loggers_cpu_s"] == pytest.approx(sum_late_cpu_s())


@pytest.mark.usefixtures("_without_reports")
@given(FAULTS_OF_ATTEMPTS, st.integers(0, 1000), st.integers(1, 2))
@settings(examples(16), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_fails_each_member_ends_as_its_retries_say(
    tmp_path_factory: pytest.TempPathFactory, faults: dict[tuple[str, int], str], seed: int, workers: int
) -> None:
    ensemble = an_ensemble(retries=2, epochs=3, resources=replace(DECLARED, workers=workers, cpus_per_worker=0.5))
    executor = Simulated(2, faults, seed)
    state = run(tmp_path_factory.mktemp("run") / "r", ensemble, executor)
    for member in state.members.values():
        # the fault comes after the first epoch of an attempt, which a last attempt may not have any more
        befalls = [faults.get((member.id, attempt)) for attempt in range(3)]
        ends = next((n for n, fault in enumerate(befalls) if fault in (None, "nan")), 2)
        expected = "finished" if befalls[ends] is None else "failed"
        if "oom" in befalls[: ends + 1] and befalls[ends] not in (None, "nan"):
            expected = member.state  # fewer at one time were tried first, which is not counted
            assert expected == "finished" or member.attempts == 3
        else:
            assert member.attempts == ends + 1
        assert member.state == expected, faults
        if expected == "finished":
            assert [event.epoch for event in member.history] == [0, 1, 2], "each epoch once along the lineage"
        else:
            assert member.error and member.reason in ("error", "nan", "lost", "oom")


@pytest.mark.parametrize("value", [2**70, "a\udcff.png"])
def test_what_the_snapshot_cannot_hold_ends_no_run(value: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("ensemble.store.snapshot.GROWN_BYTES", 1)
    state = run(tmp_path / "run", an_ensemble(members=[{"given": value}]), Simulated())
    assert set(states(state).values()) == {"finished"}


def test_only_the_predictions_of_the_attempt_that_finished_are_kept(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)

    def predict(event: dict[str, Any]) -> None:
        if event["type"] == "epoch":
            file = run_dir.predictions(event["member"], event["attempt"])
            file.parent.mkdir(exist_ok=True)
            file.write_text(str(event["attempt"]))

    faults = {("member-0", 0): "error", ("member-1", 0): "lost", ("member-2", 0): "nan"}
    assert states(run(tmp_path, an_ensemble(), Simulated(faults=faults, before=predict)))["member-2"] == "failed"
    left = {(file.parent.name, file.name): file.read_text() for file in tmp_path.glob("members/*/predictions*")}
    kept = {"member-0": "1", "member-1": "1", "member-3": "0"}
    assert left == {(member, "predictions.safetensors"): attempt for member, attempt in kept.items()}


class Reporting(Simulated):
    """One whose processes report what they have used when they are ended."""

    def events(self, timeout_s: float | None) -> list[dict[str, Any]]:
        if not self.closed:
            return super().events(timeout_s)
        who = {"node": "sim", "role": "train", "member": "member-0", "rank": 0, "pid": 9, "began": 8}
        return [{"type": "usage", **who, "cpu_s": 7.0, "origin": "measured"}, {"type": "epoch"}]


def test_a_run_that_an_error_ends_has_the_last_figures_of_its_processes(tmp_path: Path) -> None:
    def fail(event: dict[str, Any]) -> None:
        if event["type"] == "finished":
            raise ZeroDivisionError("a fault of ours")

    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", an_ensemble(members=[{"n": 0}]), Reporting(before=fail))
    *_, last, driver, end = read_events(tmp_path / "run" / "events.jsonl")
    assert (last["type"], last["cpu_s"], last["pid"]) == ("usage", 7.0, 9)
    assert driver["type"] == "usage" and end["type"] == "run_stopped" and "ZeroDivisionError" in end["reason"]


def test_a_resume_selects_nodes_as_they_are_declared_then(tmp_path: Path) -> None:
    def declare(rack: str) -> Ensemble:
        return an_ensemble(resources=replace(DECLARED, nodes={"rack": rack}))

    def stop(event: dict[str, Any]) -> None:
        if event["type"] == "epoch":
            write_request(tmp_path / "run", "stop")

    first = Simulated(before=stop)
    second = Simulated(after=first)
    for executor, rack, ending in ((first, "1", "waiting"), (second, "2", "finished")):
        executor.node = replace(executor.node, labels={"rack": rack})
        ended = set(states(run(tmp_path / "run", declare(rack), executor)).values())
        assert ending in ended
    assert ended == {"finished"}


@pytest.mark.parametrize("in_process", [False, True])
def test_who_is_silent_is_tried_again(in_process: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_process:  # as the inline executor does it
        monkeypatch.setattr(Simulated, "kill", lambda self, member: self.send(member, "cancel"))
    executor = Clock(monkeypatch).executor(faults={("member-0", 0): "silent"})
    state = run(tmp_path / "run", an_ensemble(hang_timeout_s=5.0), executor)
    assert set(states(state).values()) == {"finished"}
    assert state.members["member-0"].reason == "hang"
    assert state.members["member-0"].attempts == 2


def test_a_feeder_does_not_wait_for_members_that_have_nothing_left_to_read(tmp_path: Path) -> None:
    path, ensemble, executor = tmp_path / "run", an_ensemble(members=[{}, {}], sharing="node"), Simulated()
    run_dir = RunDir.create(path, ensemble)
    with EventLog(run_dir.events) as log:
        log.append("run_started", name="simulated")
        for number in range(2):
            log.append("member", **ensemble.identify(number).as_dict())
        log.append("placed", member="member-0", attempt=0, node="sim", devices=[None], cohort=0)
        log.append("checkpoint", member="member-0", attempt=0, epoch=2, step=0, path="", weights_sha256="")
    executor.done["member-0"] = 2
    state = run(path, ensemble, executor)
    assert set(states(state).values()) == {"finished"}
    assert executor.feeders == {1: 1}


def test_a_feeder_that_dies_is_started_again_a_few_times(tmp_path: Path) -> None:
    starts: list[tuple[int, int]] = []

    class Fragile(Simulated):
        def start_feeder(self, node: str, cohort: int, expect: int, *more: Any, **options: Any) -> str | None:
            starts.append((cohort, expect))
            return super().start_feeder(node, cohort, expect, *more, **options)

        def events(self, timeout_s: float | None) -> list[dict[str, Any]]:
            died = {"type": "feeder_exited", "node": "sim", "cohort": 0, "detail": "killed"}
            return [died, *super().events(timeout_s)]

    executor = Fragile()
    state = run(tmp_path / "run", an_ensemble(members=[{}, {}], sharing="node"), executor)
    assert set(states(state).values()) == {"finished"}
    assert starts[0] == (0, 2) and len(starts) == 4
    log = read_events(tmp_path / "run" / "events.jsonl")
    lost = [event for event in log if event["type"] in ("feeder_lost", "feeder_restarted", "sharing_ended")]
    kinds = [*["feeder_lost", "feeder_restarted"] * 3, "feeder_lost", "sharing_ended"]
    assert [event["type"] for event in lost] == kinds
    assert [event.get("restarts") for event in lost[1:6:2]] == [1, 2, 3]
    assert {(event["node"], event["cohort"]) for event in lost} == {("sim", 0)}
    ended = "sim, stream group 0: sharing ended for good, its members prepare for themselves: lost 4 times: killed"
    assert ended in str(pipeline_lines(state))
    levels = [n.level for n in collect_notices(log) if "sim, stream group 0" in n.text]
    assert levels == [*["warning", "info"] * 3, "warning", "warning"]


def test_what_never_fits_is_refused_before_anything_starts(tmp_path: Path) -> None:
    ensemble = an_ensemble(resources=Resources(workers=3))
    run_dir = RunDir.create(tmp_path / "run", ensemble)
    executor = Simulated(2)
    controller = Controller(run_dir, ensemble, executor, EventLog(run_dir.events), RunState())
    with pytest.raises(SpecError, match="largest that would fit is workers=2"):
        controller.open()
    assert executor.closed
    assert [event["type"] for event in read_events(run_dir.events)] == ["code_saved"], "it has not begun"


def test_what_is_asked_while_the_executor_opens_is_done_and_what_was_asked_before_is_not(tmp_path: Path) -> None:
    path = tmp_path / "run"

    class Opening(Simulated):
        def open(self, run_dir: RunDir, ensemble: Ensemble, handle: EventHandler) -> list[Node]:
            write_request(run_dir, "cancel", member="member-1")
            return super().open(run_dir, ensemble, handle)

    write_request(RunDir.create(path, an_ensemble()), "stop")
    state = run(path, an_ensemble(), Opening())
    assert states(state) == {f"member-{n}": "cancelled" if n == 1 else "finished" for n in range(4)}


def test_what_is_asked_while_the_run_ends_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report, answers = Finalizer.write_report, list[Future[Any]]()

    def report(finalizer: Finalizer, ending: dict[str, Any]) -> None:
        requests = [Request(RunDir(tmp_path / "run"), verb) for verb in ("pause", "stop")]
        answers.extend(asking.submit(request.wait) for request in requests)
        write_report(finalizer, ending)

    monkeypatch.setattr(Finalizer, "write_report", report)
    with ThreadPoolExecutor(2) as asking:
        run(tmp_path / "run", an_ensemble(), Simulated())
    for answer in answers:
        with pytest.raises(StoreError, match=r"run: the run has ended$"):
            answer.result()
    events = read_events(RunDir(tmp_path / "run").events)
    assert sorted(event["verb"] for event in events if event["type"] == "request") == ["pause", "stop"]
    assert events[-1]["type"] == "run_finished" and not list(RunDir(tmp_path / "run").requests.iterdir())


class Clock:
    """Stands for the controller's clock: one second goes by whenever nobody has anything to say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.launched: list[float] = []
        monkeypatch.setattr("ensemble.controller.attempts.RetryPolicy", RetryPolicy)
        passing = types.SimpleNamespace(**{**vars(time), "monotonic": lambda: self.now})
        monkeypatch.setattr("ensemble.controller.controller.time", passing)

    def executor(self, **options: Any) -> Simulated:
        clock = self

        class Timed(Simulated):
            def launch(self, jobs: Sequence[Job], devices: Sequence[str | None]) -> None:
                clock.launched.append(clock.now)
                super().launch(jobs, devices)

            def events(self, timeout_s: float | None) -> list[dict[str, Any]]:
                clock.now += not any(self.scripts.values())
                return super().events(timeout_s) if any(self.scripts.values()) else []

        return Timed(**options)


@pytest.mark.parametrize(("verb", "outcome"), [("stop", "waiting"), ("cancel", "cancelled")])
def test_who_rests_is_stopped_and_cancelled_at_once(
    verb: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "run", Clock(monkeypatch)

    def ask(event: dict[str, Any]) -> None:
        if event["type"] == "exited" and event["attempt"] == 6:
            write_request(path, verb, **({"member": "member-0"} if verb == "cancel" else {}))

    executor = clock.executor(faults={("member-0", n): "lost" for n in range(7)}, before=ask)
    state = run(path, an_ensemble(members=[{"n": 0}], retries=9, epochs=9), executor)
    assert states(state) == {"member-0": outcome}
    assert clock.now < 40, "the rest of 32 s is cut short"


class OnCluster(Simulated):
    """A cluster that gives the run no node for a while, then one; `script` has what it reports at each look."""

    def __init__(self, script: Sequence[dict[str, Any]], **options: Any) -> None:
        super().__init__(2, **options)
        self.cluster = [self.node]
        self.coming = list(script)
        self.requests: list[tuple[list[str], list[str]]] = []

    def open(self, run_dir: RunDir, ensemble: Ensemble, handle: EventHandler) -> list[Node]:
        return super().open(run_dir, ensemble, handle)[:0]

    def request(self, waiting: Sequence[Identity], placed: Sequence[Placement]) -> None:
        self.requests.append(([one.member for one in waiting], [one.member for one in placed]))

    def events(self, timeout_s: float | None) -> list[dict[str, Any]]:
        if not self.coming:
            return super().events(timeout_s)
        event = self.coming.pop(0)
        self.before(event)
        return [event]


MISSING = {"type": "resources", "missing": "2 x (1 cores)"}
GIVEN = {"type": "node", **Node("sim", 2, (), 8, "sim").as_event()}
NOTHING = {"type": "node", **Node("sim", 0, (), 0, "sim").as_event()}


def test_a_run_waits_for_what_its_cluster_has_not_given_and_says_so(tmp_path: Path) -> None:
    seen: list[str | None] = []

    def look(event: dict[str, Any]) -> None:
        if event is MISSING or event is GIVEN:
            seen.append(fold(read_events(RunDir(tmp_path / "run").events)).waits_for)

    executor = OnCluster([MISSING, GIVEN, {**MISSING, "missing": ""}], before=look)
    state = run(tmp_path / "run", an_ensemble(members=[{"n": 0}, {"n": 1}]), executor)
    assert seen == [None, "Ray: 2 x (1 cores)"]
    assert [(m.state, m.attempts) for m in state.members.values()] == [("finished", 1)] * 2
    assert executor.requests[0] == (["member-0", "member-1"], [])
    assert ([], ["member-0", "member-1"]) in executor.requests, "nothing more is asked for"
    assert executor.requests[-1] == ([], []), "and all can be given back"
    assert not state.waits_for


def test_what_a_run_holds_is_given_back_before_its_members_are_combined(tmp_path: Path) -> None:
    class Releases(OnCluster):
        def release(self) -> None:
            log = read_events(RunDir(tmp_path / "run").events)
            seen.update(event["type"] for event in log)
            self.coming = [{"type": "power", "node": "sim", "watts": 7.0, "origin": "estimated"}, NOTHING]

    seen = set[str]()
    run(tmp_path / "run", an_ensemble(members=[{"n": 0}]), Releases([GIVEN]))
    assert "finished" in seen and "combining" not in seen
    log = [event["type"] for event in read_events(RunDir(tmp_path / "run").events)]
    assert log.index("power") < log.index("combining")


def test_a_member_out_of_memory_asks_for_more_than_the_run_holds_of_its_node(tmp_path: Path) -> None:
    asked: list[float | None] = []

    class Lends(OnCluster):
        def request(self, waiting: Sequence[Identity], placed: Sequence[Placement]) -> None:
            asked.extend(one.memory_gb for one in waiting)
            if waiting and asked[-1] == 2.0:
                self.coming = [{"type": "node", **Node("sim", 2, (), 2.0, "sim").as_event()}]

    little = {"type": "node", **Node("sim", 2, (), 1.0, "sim").as_event()}
    executor = Lends([little], faults={("member-0", 0): "oom"})
    resources = Resources(cpus_per_worker=1.0, memory_gb=1.0)
    state = run(tmp_path / "run", an_ensemble(members=[{"n": 0}], resources=resources, retries=0), executor)
    assert states(state) == {"member-0": "finished"}, "no retry is used up"
    assert asked == [1.0, 2.0]


def test_what_no_node_of_the_cluster_could_ever_hold_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="the largest that would fit"):
        run(tmp_path / "run", an_ensemble(resources=Resources(cpus_per_worker=3.0)), OnCluster([]))


def test_a_run_that_waits_for_its_cluster_is_stopped_at_once(tmp_path: Path) -> None:
    def stop(event: dict[str, Any]) -> None:
        write_request(tmp_path / "run", "stop")

    state = run(tmp_path / "run", an_ensemble(members=[{"n": 0}]), OnCluster([MISSING] * 3, before=stop))
    assert states(state) == {"member-0": "waiting"} and state.ended is not None
    assert state.ended.type == "run_stopped"


def test_more_members_than_places_all_finish_in_cohorts(tmp_path: Path) -> None:
    executor = Simulated(3)
    state = run(
        tmp_path / "run", an_ensemble(members=[{"n": n} for n in range(8)], sharing="node", capacity=1), executor
    )
    assert set(states(state).values()) == {"finished"}
    cohorts = Counter(m.cohort for m in state.members.values())
    sizes = [cohorts[number] for number in range(len(cohorts))]
    assert sizes[0] == 3 and min(sizes[:-1]) >= 2, "a cohort opens when half of the places are free, or all fit"
    assert {m.first_epoch for m in state.members.values()} == {0}
    assert executor.feeders == cohorts and sorted(executor.feeders_stopped) == sorted(cohorts)


def test_all_refusals_are_shown_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    members = [Member({}, start=str(tmp_path / "nowhere")), Member({}, workers=2)]
    declared = an_ensemble(members=members, resources=Resources())
    (foreign := tmp_path / "run").mkdir()
    (foreign / "notes.txt").write_text("mine")
    messages = []
    for start in (ensemble.submit, ensemble.dry_run):
        with pytest.raises((SpecError, StoreError)) as refused:
            start(declared, foreign, "inline")
        messages.append(str(refused.value))
    assert messages[0] == messages[1]
    for text in ("the inline executor is one process", "not a run directory and not empty", "nowhere' is neither"):
        assert text in messages[0]
    assert [file.name for file in foreign.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("recorded", [{}, {"lines-logger-that-nobody-has": "0.1"}])
def test_a_logger_of_a_distribution_that_is_gone_is_named_with_it(recorded: dict[str, str]) -> None:
    run_dir = types.SimpleNamespace(find_info=lambda: {"versions": {"numpy": "2.4", **recorded}})
    start: Any = types.SimpleNamespace(ensemble=types.SimpleNamespace(loggers=["lines"]), run_dir=run_dir)
    with pytest.raises(SpecError, match="lines") as refused:
        check_loggers(start)
    assert ("pip install lines-logger-that-nobody-has==0.1" in str(refused.value)) is bool(recorded)
