"""What was left to measurement is measured, settled and kept in step: the controller against a simulated cluster.

The simulation stands for processes, devices and time; the log, the state and the decisions are the real ones.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.event_dicts import fold, read_events
from kit.finished_runs import once
from test_controller import Simulated
from test_queue import _nothing_is_waited_for  # noqa: F401

from ensemble.controller.controller import Controller
from ensemble.controller.policies import load_planner
from ensemble.executors import EventHandler
from ensemble.schedule.needs import Node, Placement
from ensemble.spec import Ensemble, Identity, Member, Recipe, Resources, Search, choice
from ensemble.store import EventLog, RunDir, RunState, write_request
from ensemble.train.job import Job
from pipelines import Peers, Pipeline, sources

SAMPLES = 64
Event = dict[str, Any]


def an_ensemble(rates: Sequence[float], **options: Any) -> Ensemble:
    """Members of these rates (samples/s with one worker, by their hyperparameter), all left to measurement, whose
    ring does not hold all samples.
    """
    data, recipe = sources.arrays(x=np.zeros((SAMPLES, 2), np.float32)), Recipe(model=len, loss=len, task="free")
    defaults: dict[str, Any] = {"name": "planned", "recipe": recipe, "train": Pipeline(data), "epochs": 4}
    defaults |= {"members": [{"rate": rate} for rate in rates], "batch_size": 16, "sharing": "node"}
    defaults |= {
        "resources": Resources(workers="auto"),
        "capacity": SAMPLES // 2,
        "objective": "accuracy",
        "mode": "max",
    }
    return Ensemble(**{**defaults, **options})


class Idle(Exception):
    """Nobody trains, and nobody ever will."""


class Cluster(Simulated):
    """Nodes on which w workers train at w ** 0.8 times a member's rate; the clock jumps to what comes next.

    `after` is told of each event, and may add others; the first member may be three times slower than measured.
    """

    name = "cluster"

    def __init__(
        self, *nodes: Node, memory_gb: float = 0.1, measuring_s: float = 0.0, first_is_slow: bool = False,
        after: Callable[[Event], Sequence[Event] | None] = lambda event: None,
    ) -> None:  # fmt: skip
        self.nodes, self.memory_gb, self.measuring_s, self.first_is_slow = (
            nodes,
            memory_gb,
            measuring_s,
            first_is_slow,
        )
        self.after, self.idle, self.used = (
            after,
            0,
            set[tuple[float, str]](),
        )  # rates of members, and where they were
        self.now, self.order = 0.0, itertools.count()
        self.coming = list[tuple[float, int, Event]]()
        self.live, self.done = dict[str, tuple[Job, int]](), defaultdict[str, int](int)
        self.sessions = list[tuple[int, list[str]]]()
        self.launched = list[tuple[str, int, str, tuple[str | None, ...]]]()
        self.told, self.slower, self.ended = list[tuple[str, str]](), dict[str, float](), 0

    def open(self, run_dir: RunDir, ensemble: Ensemble, handle: EventHandler) -> list[Node]:
        return list(self.nodes)

    def start_feeder(
        self, node: str, cohort: int, expect: int, capacity: int, peers: Peers | None = None, late: bool = False
    ) -> str | None:
        return f"{node}/{cohort}"

    def expect_readers(self, node: str, cohort: int, members: int) -> None: ...

    def stop_feeder(self, node: str, cohort: int) -> None: ...

    def launch(self, jobs: Sequence[Job], devices: Sequence[str | None]) -> None:
        job = jobs[0]
        workers = job.identity.workers
        members = [job.identity] if job.profile is None else job.profile.members
        self.used.update((one.params["rate"], job.node) for one in members)
        if job.profile is not None:
            self.sessions.append((workers, [one.member for one in job.profile.members]))
            for one in job.profile.members:
                rate = self._rate(one.params, workers)
                figures = {"step_s": one.batch_size / rate, "samples_per_s": rate, "cpus": 1.0, "prepare_s": 0.001}
                figures |= {"memory_gb": self.memory_gb}
                figures |= {} if devices[0] is None else {"gpus": 1.0, "gpu_memory_gb": 1.0}
                shape = f"shape-{one.params['rate']}"
                self._say(job, self.measuring_s, "profiled", of=[one.member], shape=shape, measured=figures)
            self._leave(job, self.measuring_s, "finished")
            return
        member = job.identity.member
        if self.first_is_slow and not self.slower:
            self.slower[member] = 3.0
        self.launched.append((member, workers, job.node, tuple(devices)))
        done = self.done[member]
        self.live[member] = job, done
        self._say(job, 0.0, "started", pid=1, epoch=done, step=0, startup_cpu_s=0.0, first_epoch=0)
        self._next(job, done)

    def _rate(self, params: dict[str, Any], workers: int) -> float:
        return float(params["rate"]) * workers**0.8

    def _next(self, job: Job, epoch: int) -> None:
        slower = self.slower.get(job.identity.member, 1.0)
        train_s = SAMPLES * slower / self._rate(job.identity.params, job.identity.workers)
        metrics = {"accuracy": 0.5}
        self._say(job, train_s, "epoch", epoch=epoch, samples=SAMPLES, step=4, train_s=train_s, metrics=metrics)

    def _say(self, job: Job, after_s: float, kind: str, **fields: Any) -> None:
        about = {"member": job.identity.member, "attempt": job.attempt}
        heapq.heappush(self.coming, (self.now + after_s, next(self.order), {"type": kind, **about, **fields}))

    def _leave(self, job: Job, after_s: float, outcome: str) -> None:
        for rank in range(job.identity.workers):
            self._say(job, after_s, "exited", rank=rank, outcome=outcome, detail="")

    def events(self, timeout_s: float | None) -> list[Event]:
        self.idle = 0 if self.coming else self.idle + 1
        if self.idle > 100:
            raise Idle
        if not self.coming:
            return []
        self.now, _, event = heapq.heappop(self.coming)
        member = event["member"]
        if event["type"] == "epoch":
            job, _ = self.live[member]
            done = self.done[member] = event["epoch"] + 1
            if ("stop_after_epoch", member) in self.told or ("stop", member) in self.told:
                self.told = [one for one in self.told if one[1] != member]
                path = f"{job.run_dir}/x"
                self._say(job, 0.0, "checkpoint", epoch=done, step=0, path=path, weights_sha256="")
                self._say(job, 0.0, "stopped", epoch=done, step=0)
                self._leave(job, 0.0, "stopped")
            elif done == job.identity.epochs:
                self.ended += 1
                self._say(job, 0.0, "finished", epoch=done - 1, metrics=event["metrics"])
                self._leave(job, 0.0, "finished")
            else:
                self._next(job, done)
        return [event, *(self.after(event) or ())]

    def send(self, member: str, command: str, **fields: Any) -> None:
        self.told.append((command, member))
        if command in ("alone", "join") and member in self.live:
            where = {"feeder": None, "cohort": None, "epoch": self.done[member], "step": 0} | fields
            self._say(self.live[member][0], 0.0, "moved", shared=command == "join", **where)

    def kill(self, member: str) -> None: ...


def run(path: Path, ensemble: Ensemble, cluster: Cluster) -> tuple[RunState, list[Event]]:
    run_dir = RunDir.create(path, ensemble)
    events = EventLog(run_dir.events)
    controller = Controller(run_dir, ensemble, cluster, events, fold(read_events(run_dir.events)))
    controller.open()
    controller.run()
    said = read_events(run_dir.events)
    return fold(said), said


def finish(path: Path, ensemble: Ensemble, cluster: Cluster) -> tuple[RunState, list[Event]]:
    """A run of which all members finish."""
    state, events = run(path, ensemble, cluster)
    assert {member.state for member in state.members.values()} == {"finished"}
    return state, events


def a_search(trials: int, sampler: str = "random", **options: Any) -> Ensemble:
    space = options.pop("space", {"rate": choice(10, 20)})
    search = Search(space, trials=trials, sampler=sampler, pruner="none")
    return an_ensemble([], members=None, search=search, **options)


def gpus(name: str, many: int) -> Node:
    return Node(name, 8.0, ("H",) * many, 64.0, name)


def cores(name: str = "cpu", cpus: float = 2.0, memory_gb: float = 64.0) -> Node:
    return Node(name, cpus, (), memory_gb, name)


def of(said: list[Event], kind: str) -> list[Event]:
    return [event for event in said if event["type"] == kind]


def test_on_gpus_flotillas_hold_every_member_once_and_widths_are_recorded(tmp_path: Path) -> None:
    cluster = Cluster(gpus("a", 4), gpus("b", 4))
    state, said = finish(tmp_path / "run", an_ensemble([10, 10, 10, 40, 40, 40]), cluster)
    assert sorted({workers for workers, _ in cluster.sessions}) == [1, 2, 3, 4], "as wide as a node has GPUs"
    assert all(len(measured) == 2 for _, measured in cluster.sessions), "of members of one shape, one"
    widths = {member: workers for member, workers, _, _ in cluster.launched}
    assert widths == {name: member.identity["workers"] for name, member in state.members.items()}, "and recorded"
    for _, workers, _, devices in cluster.launched:
        assert len(set(devices)) == workers, "at most one rank of a member is on a GPU"
    planned = of(said, "planned")[0]
    assert sorted(m for each in planned["flotillas"] for m in each["members"]) == sorted(widths)
    assert planned["makespan_s"] >= planned["lower_bound_s"] > 0


def test_members_are_measured_and_train_on_nodes_that_they_select_and_keep_nobody_waiting(tmp_path: Path) -> None:
    fast = replace(gpus("b", 1), gpus=("NVIDIA H100 80GB HBM3",))
    members = [{"rate": 10.0}, Member({"rate": 20.0}, nodes={"gpu_type": "H100"}), {"rate": 30.0}]
    absent = [Member({"rate": 40.0}, nodes={"rack": "7"})]
    cluster = Cluster(gpus("a", 1), fast)
    cluster.cluster = [*cluster.nodes, replace(gpus("c", 1), labels={"rack": "7"})]
    finish(tmp_path / "run", an_ensemble([], members=members, resources=Resources()), cluster)
    assert {node for rate, node in cluster.used if rate == 20.0} == {"b"}

    again = Cluster(*cluster.nodes)
    again.cluster = cluster.cluster
    with pytest.raises(Idle):
        run(tmp_path / "waits", an_ensemble([], members=[*absent, *members], resources=Resources()), again)
    events = read_events(tmp_path / "waits" / "events.jsonl")
    assert {event["member"] for event in of(events, "finished")} == {"member-1", "member-2", "member-3"}


def test_equal_members_that_select_other_gpus_are_measured_on_each(tmp_path: Path) -> None:
    models = "NVIDIA H100 80GB HBM3", "Tesla T4"
    members = [Member({"rate": 10.0}, nodes={"gpu_type": kind}) for kind in ("H100", "H100", "T4", "T4")]
    apart = [replace(gpus(name, 1), gpus=(model,)) for name, model in zip("ab", models, strict=True)]
    declared = an_ensemble([], members=members, resources=Resources())
    for name, nodes in (("apart", apart), ("together", [replace(gpus("a", 2), gpus=models)])):
        _, said = finish(tmp_path / name, declared, Cluster(*nodes))
        pairs = {(event["device"], member) for event in of(said, "profile") for member in event["members"]}
        assert pairs == {(models[number // 2], f"member-{number}") for number in range(4)}


def test_equal_members_are_measured_once_and_a_resume_measures_nothing(tmp_path: Path) -> None:
    ensemble = an_ensemble([20] * 12)

    def stop(event: Event) -> None:
        if first.ended == 3:
            write_request(tmp_path / "run", "stop")

    first = Cluster(gpus("a", 2), after=stop)
    before, _ = run(tmp_path / "run", ensemble, first)
    assert all(measured == ["member-0"] for _, measured in first.sessions)
    assert before.ended is not None and before.ended.type == "run_stopped"
    second = Cluster(gpus("a", 2))
    state, _ = run(tmp_path / "run", ensemble, second)
    assert not second.sessions and {m.state for m in state.members.values()} == {"finished"}
    begun = {name: m.identity["workers"] for name, m in before.members.items() if m.attempts}
    assert begun and begun.items() <= {name: m.identity["workers"] for name, m in state.members.items()}.items()


def test_on_cores_all_train_at_once_on_one_stream_at_one_pace(tmp_path: Path) -> None:
    cluster = Cluster(cores())
    ensemble = an_ensemble([10, 20, 40, 80, 80, 80], resources=Resources())
    state, said = run(tmp_path / "run", ensemble, cluster)
    assert [workers for workers, _ in cluster.sessions] == [1]
    assert {m.cohort for m in state.members.values()} == {0} and len(cluster.launched) == 6
    (planned,) = of(said, "planned")
    work_s = sum(SAMPLES / rate for rate in (10, 20, 40, 80, 80, 80)) + SAMPLES * 0.001
    assert planned["pace_s"] == pytest.approx(max(SAMPLES / 10, work_s / 2))
    asked = {name: m.identity["cpus_per_worker"] for name, m in state.members.items()}
    assert asked["member-0"] > asked["member-1"] > asked["member-2"] and sum(asked.values()) <= 2.0


def test_where_the_ring_holds_all_samples_members_start_as_there_is_room_and_nobody_is_sent_away(
    tmp_path: Path,
) -> None:
    cluster = Cluster(cores(), first_is_slow=True)
    state, said = finish(tmp_path / "run", an_ensemble([20] * 6, resources=Resources(), capacity=None), cluster)
    assert [m.identity["cpus_per_worker"] for m in state.members.values()] == [1.0] * 6
    events = [event["type"] for event in said if event["type"] in ("placed", "finished")]
    assert events == ["placed"] * 2 + ["finished", "placed"] * 4 + ["finished"] * 2
    assert {m.cohort for m in state.members.values()} == {0}
    assert not of(said, "remedy") and not of(said, "planned"), "a slow member holds up nobody"


def test_a_member_that_is_added_takes_turns_on_the_cores_with_those_that_run(tmp_path: Path) -> None:
    add = once("epoch", lambda: write_request(tmp_path / "run", "add", declared={"params": {"rate": 30}}))
    cluster = Cluster(cores(), after=add)
    state, said = finish(tmp_path / "run", an_ensemble([10, 20, 40], resources=Resources(), epochs=8), cluster)
    assert len(state.members) == 4
    placed = next(n for n, e in enumerate(said) if e["type"] == "placed" and e["member"] == "member-3")
    ended = min(n for n, e in enumerate(said) if e["type"] == "finished")
    assert placed < ended, "it did not wait until another one had ended"
    assert [measured for _, measured in cluster.sessions] == [["member-0", "member-1", "member-2"], ["member-3"]]


class Lender(Cluster):
    """Lends one core of a node, and once a member has ended an epoch as many as members have asked for."""

    cluster = (cores("cpu", 4.5),)

    def __init__(self) -> None:
        super().__init__(cores("cpu", 1.0, 8.0), after=self.lend)
        self.asked: list[list[float]] = []  # cores that waiting members ask for, each time

    def request(self, waiting: Sequence[Identity], placed: Sequence[Placement]) -> None:
        self.asked.append([one.cpus_per_worker for one in waiting])

    def lend(self, event: Event) -> Sequence[Event]:
        if event["type"] != "epoch" or not self.asked[-1] or self.nodes[0].cpus > 1:
            return ()
        self.nodes = (cores("cpu", 4.0, 32.0),)
        return [{"type": "node", **self.nodes[0].as_event()}]


def test_members_ask_for_what_they_keep_busy_and_share_the_cores_once_there_are_no_more(tmp_path: Path) -> None:
    cluster = Lender()
    state, said = finish(tmp_path / "run", an_ensemble([20] * 6, resources=Resources(workers=1)), cluster)
    assert [1.0] * 5 in cluster.asked, "what it lacks, not its part of the core that is there"
    first, *later = (member.identity["cpus_per_worker"] for member in state.members.values())
    assert first == 1.0
    assert later == pytest.approx([(4 - first) / 5] * 5, rel=0.01), "of what the first one leaves"
    ended = next(n for n, event in enumerate(said) if event["type"] == "finished")
    assert len(of(said[:ended], "placed")) == 6, "none of them has waited for the end of another one"
    assert len({member.cohort for member in state.members.values()}) == 2, "who start together share a stream"


def test_memory_that_was_measured_is_never_oversubscribed(tmp_path: Path) -> None:
    cluster = Cluster(cores(memory_gb=8.0), memory_gb=3.0)
    _, said = finish(tmp_path / "run", an_ensemble([20] * 5, resources=Resources()), cluster)
    steps = [(event["type"] == "placed") - (event["type"] == "finished") for event in said]
    assert max(itertools.accumulate(steps)) == 2


def test_a_laggard_leaves_its_stream_only_where_others_wait_for_places(tmp_path: Path) -> None:
    fixed = Resources(workers=1, gpus_per_worker=1.0, memory_gb=0.1)
    for trials, leaves in ((4, False), (24, True)):
        cluster = Cluster(gpus("a", 4), first_is_slow=True)
        space = {"rate": 20, "lr": choice(0.1, 0.2)}
        ensemble = a_search(trials, space=space, resources=fixed, epochs=8)
        _, said = finish(tmp_path / f"run-{trials}", ensemble, cluster)
        found, slow = of(said, "remedy"), list(cluster.slower)
        assert bool(found) == leaves
        if leaves:
            assert found[0]["members"] == slow and found[0]["run_s"] < found[0]["pace_s"]
            assert found[0]["what"] in ("alone", "move", "apart")
            assert {member for command, member in cluster.told if command in ("alone", "join")} == set(slow)


def test_the_last_member_is_widened_only_where_the_ensemble_is_elastic(tmp_path: Path) -> None:
    for elastic in (False, True):
        cluster = Cluster(gpus("a", 4), first_is_slow=True)
        ensemble = an_ensemble([20] * 4, elastic=elastic, epochs=12)
        finish(tmp_path / f"run-{elastic}", ensemble, cluster)
        (slow,) = cluster.slower
        widths = [workers for member, workers, *_ in cluster.launched if member == slow]
        assert widths == sorted(set(widths)) and (len(widths) > 1) == elastic


def test_trials_are_settled_by_what_was_measured_of_those_before_them(tmp_path: Path) -> None:
    cluster, space = Cluster(cores()), {"rate": choice(10, 20), "lr": choice(0.1, 0.2)}
    ensemble = a_search(8, space=space, resources=Resources())
    state, _ = finish(tmp_path / "run", ensemble, cluster)
    assert len(state.members) == 8
    assert len(cluster.sessions) <= 2, "a trial that departs in lr alone needs no measurement"


def test_the_margin_on_measured_memory_keeps_no_member_from_the_largest_node(tmp_path: Path) -> None:
    cluster = Cluster(cores("small", 2.0, 48.0), cores("large"), memory_gb=60.0)
    finish(tmp_path / "run", an_ensemble([10, 20, 20, 20, 20], resources=Resources()), cluster)
    assert {node for _, _, node, _ in cluster.launched} == {"large"}


def test_a_search_whose_nodes_are_lost_between_two_trials_ends(tmp_path: Path) -> None:
    def lose(event: Event) -> Sequence[Event]:
        ends = cluster.ended and event["type"] == "exited"
        return [{"type": "node_lost", "node": "cpu"}] if ends else ()

    cluster = Cluster(cores("cpu", 1.0), after=lose)
    _, said = run(tmp_path / "run", a_search(2, "grid"), cluster)
    assert "there is no node" in of(said, "run_stopped")[0]["reason"]


def test_no_trial_is_proposed_for_a_place_that_another_one_is_measured_for(tmp_path: Path) -> None:
    cluster, ahead = Cluster(cores(), measuring_s=100.0), list[int]()
    space = {"rate": choice(*(10.0 + n for n in range(12)))}
    _, said = run(tmp_path / "run", a_search(12, space=space, resources=Resources()), cluster)
    open_now: set[str] = set()
    for event in said:
        if event["type"] == "member":
            open_now.add(event["member"])
            ahead.append(len(open_now))
        elif event["type"] == "finished":
            open_now.discard(event["member"])
    assert len(cluster.sessions) > 2 and max(ahead) <= 2, "no more than the node has places"


def test_members_that_share_nothing_keep_nobody_waiting(tmp_path: Path) -> None:
    cluster = Cluster(gpus("a", 4))
    ensemble = an_ensemble([20] * 6 + [5] * 6, sharing="independent", epochs=12, resources=Resources())
    _, said = run(tmp_path / "run", ensemble, cluster)
    assert of(said, "remedy") == [] and len(of(said, "finished")) == 12


def test_the_loss_of_the_widest_node_stops_no_other_member(tmp_path: Path) -> None:
    def lose(event: Event) -> Sequence[Event]:
        if event["type"] != "epoch" or len(cluster.nodes) == 1:
            return ()
        gone = [job for job, _ in cluster.live.values() if job.node == "wide"]
        names = {job.identity.member for job in gone}
        cluster.nodes = cluster.nodes[1:]
        cluster.coming = [item for item in cluster.coming if item[2]["member"] not in names]
        heapq.heapify(cluster.coming)
        for job, rank in [(each, rank) for each in gone for rank in range(each.identity.workers)]:
            cluster._say(job, 0.0, "exited", rank=rank, outcome=None, detail="", node_lost=True)
        return [{"type": "node_lost", "node": "wide"}]

    cluster = Cluster(gpus("wide", 4), gpus("narrow", 1), after=lose)
    _, said = finish(tmp_path / "run", an_ensemble([5, 10, 20, 40, 40, 40], retries=3), cluster)
    assert any(workers > 1 for _, workers, *_ in cluster.launched)
    # with more ranks than there are GPUs they go on, on the cores
    assert of(said, "run_finished")


def test_who_can_never_be_placed_fails_alone_after_a_node_is_lost(tmp_path: Path) -> None:
    def lose(event: Event) -> Sequence[Event]:
        first = event["type"] == "epoch" and not lost
        lost.extend([event] if first else [])
        return [{"type": "node_lost", "node": "wide"}] if first else ()

    lost: list[Event] = []
    narrow = {"workers": 2, "gpus_per_worker": 1.0, "cpus_per_worker": 1.0, "memory_gb": 0.1}
    members = [Member({"rate": 20}, **narrow) for _ in range(4)]
    members += [Member({"rate": 20}, **narrow | {"workers": 4}) for _ in range(2)]
    cluster = Cluster(gpus("wide", 4), gpus("narrow", 2), after=lose)
    state, _ = run(tmp_path / "run", an_ensemble([], members=members, resources=Resources()), cluster)
    ended = {name: member.state for name, member in state.members.items()}
    wide = {ended["member-4"], ended["member-5"]}
    assert "failed" in wide and {ended[f"member-{n}"] for n in range(4)} == {"finished"}
    assert state.ended is not None and state.ended.type == "run_finished"
    assert "workers" in str(next(m.error for m in state.members.values() if m.state == "failed"))


def test_a_planner_that_lacks_an_import_is_not_taken_for_an_absent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ensemble.controller.planner", None)
    assert load_planner() is None
    monkeypatch.delitem(sys.modules, "ensemble.controller.planner")
    monkeypatch.setitem(sys.modules, "ensemble.schedule.flotilla.allocate", None)
    with pytest.raises(ModuleNotFoundError, match="allocate"):
        load_planner()
