"""The Ray executor on a cluster that gives and takes nodes, also fifty. Ray is a model, agents answer as told."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from kit.execute_members import an_ensemble
from lent_cluster import LOST, Event, Lender, Run
from ray_model import World

from ensemble.executors.ray import RayExecutor, _compat, agent_link, loop
from ensemble.executors.ray import executor as executor_module
from ensemble.executors.ray.agent_link import AgentLink, start_agent
from ensemble.executors.ray.cluster_model import ClusterModel
from ensemble.executors.ray.lease_manager import LeaseManager
from ensemble.executors.ray.loop import ClusterLoop
from ensemble.spec import Resources, SpecError
from ensemble.store import RunDir

UNSEEN = ray.exceptions.RayError("it does not see the run directory")
Make = Callable[..., tuple[Lender, Run]]


@pytest.fixture
def make(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """A cluster of one node with two cores, or of several with one, and a run, which gives all back at its end."""
    runs: list[Run] = []

    def made(nodes: int = 1, **options: int) -> tuple[Lender, Run]:
        lender = Lender(world, monkeypatch, [(2.0 if nodes == 1 else 1.0, 8.0, 0)] * nodes)
        runs.append(Run(lender, tmp_path, **options))
        return lender, runs[-1]

    yield made
    for run in runs:
        run.executor.close()
        assert not run.lender.cluster.groups, "all is given back"


def list_types(events: list[Event], *left_out: str) -> list[str]:
    return [event["type"] for event in events if event["type"] not in left_out]


def lose_agent(lender: Lender) -> None:
    lender.actors["node-0"][0].stream.news = [ray.exceptions.RayError(LOST)]


def find_held(lender: Lender) -> set[str | None]:
    return {piece.node for group in lender.cluster.groups for piece in group.pieces}


def offer_of(event: Event) -> tuple[Any, ...]:
    return event["type"], event["node"], event["cpus"]


def test_a_node_that_was_given_back_is_offered_again_only_by_a_new_agent(make: Make) -> None:
    lender, run = make()
    assert run.open() == ["node-0"]
    run.executor.request([], [])
    [gone] = run.wait(20)
    assert offer_of(gone) == ("node", "node-0", 0)
    [first] = lender.actors["node-0"]
    assert first.commands == [("close",)]

    run.executor.request(run.identities, [])  # before that agent has ended
    assert run.wait(5) == [], "an agent that ends offers nothing"
    first.stream.news = [StopIteration()]
    [back] = run.wait(5)
    assert offer_of(back) == ("node", "node-0", 1.0) and len(lender.actors["node-0"]) == 2


def test_a_run_that_only_combines_holds_nothing_and_has_the_last_figures_of_its_agents(make: Make) -> None:
    lender, run = make()
    run.open()
    run.wait(2)
    [agent] = lender.actors["node-0"]
    agent.stream.news = [[{"type": "usage", "node": "node-0", "cpu_s": 7.0}], StopIteration()]
    run.executor.release()
    assert agent.commands == [("close",)] and not lender.cluster.groups
    assert list_types(run.executor.events(0.0)) == ["usage"]
    for _ in range(3):
        lender.sleep(60.0)
        assert run.executor.events(0.0) == []


def test_a_node_where_no_agent_can_start_is_left_out_for_good(make: Make) -> None:
    lender, run = make(2, members=2)
    lender.reachable.discard("node-1")
    assert run.open() == ["node-0"]
    lender.answers["node-1"] = [UNSEEN]
    lender.reachable.add("node-1")
    run.executor.request(run.identities[1:], run.placed)
    assert list_types(run.wait(60), "resources") == ["node_unusable"]
    assert len(lender.actors["node-1"]) == 1, "it is not tried again and again"
    assert find_held(lender) == {"node-0", None}


def test_a_node_where_no_agent_can_start_is_named_when_the_run_begins(make: Make) -> None:
    lender, run = make()
    lender.answers["node-0"] = [UNSEEN]
    with pytest.raises(SpecError, match="node node-0 cannot be used: it does not see the run directory"):
        run.open()


def test_an_agent_that_hangs_when_it_replaces_another_is_given_up_and_tried_again(make: Make) -> None:
    lender, run = make()
    run.open()
    run.launch(run.placed[0])
    run.executor.events(0.0)
    lender.answers["node-0"] = [None]
    lose_agent(lender)
    seen = run.executor.events(0.0)
    assert list_types(seen) == ["agent_replaced", "node", "exited"]
    assert seen[1]["cpus"] == 0 and seen[2]["agent_lost"]
    with pytest.raises(OSError, match="node-0 has no agent"):
        run.launch(run.placed[0])

    run.executor.request(run.identities, [])
    until, seen = lender.cluster.clock + 700, list[Event]()
    while lender.cluster.clock < until and not (seen and seen[-1]["type"] == "node"):
        seen += [event for event in run.executor.events(5.0) if event["type"] != "resources"]
    assert list_types(seen) == ["node_unusable", "node"] and "silent for 300 s" in seen[0]["detail"]
    assert seen[0]["retry_s"] == 60 and seen[-1]["cpus"] == 1.0, "another one has answered"


def test_members_wait_for_another_node_like_the_one_that_was_lost(make: Make) -> None:
    lender, run = make()
    run.open()
    lender.reachable.clear()
    lose_agent(lender)
    assert "node_lost" in list_types(run.executor.events(0.0))
    assert run.executor.cluster is not None
    assert [node.cpus for node in run.executor.cluster] == [2.0], "what it could hold before, it may hold again"


def test_a_node_that_is_drained_is_left_once_nothing_runs_there(make: Make) -> None:
    lender, run = make(2, members=2)
    assert set(run.open()) == {"node-0", "node-1"}
    [placement] = [one for one in run.placed if one.node == "node-0"]
    run.launch(placement)
    lender.cluster.draining["node-0"] = 1e9
    assert run.wait(60) == [{"type": "node_draining", "node": "node-0", "deadline": 1e9}]
    [first] = lender.actors["node-0"]
    assert [name for name, *_ in first.commands] == ["launch"], "what runs there is left alone"

    exited = {"type": "exited", "member": placement.member, "attempt": 0, "rank": 0, "outcome": "stopped"}
    run.executor.request([placement.identity], [one for one in run.placed if one is not placement])
    first.stream.news.append([exited])
    seen = [event for event in run.wait(60) if event["type"] not in ("exited", "resources")]
    assert [offer_of(event) for event in seen] == [("node", "node-0", 0)]
    assert first.commands[-1] == ("close",) and "node-0" not in find_held(lender)


def test_a_run_begins_on_the_nodes_that_are_not_drained_and_withdraws_what_it_asked_of_one(make: Make) -> None:
    lender, run = make(3, members=2)
    lender.cluster.draining["node-0"] = None
    lender.reachable.discard("node-2")
    assert run.open() == ["node-1"] and "node-0" not in lender.actors

    def list_pinned() -> set[str | None]:
        return {piece.pinned for group in lender.cluster.groups for piece in group.pieces if not piece.node}

    lender.reachable.add("node-2")
    lender.is_late = True
    run.executor.request(run.identities[1:], run.placed)
    run.wait(3)
    assert "node-2" in list_pinned()
    lender.cluster.draining["node-2"] = 1e9
    run.wait(3)
    assert "node-2" not in list_pinned()


def test_the_end_of_an_agent_on_a_drained_node_is_the_end_of_the_node(make: Make) -> None:
    lender, run = make()
    run.open()
    run.launch(run.placed[0])
    lender.cluster.draining["node-0"] = 1e9
    run.wait(5)
    lose_agent(lender)
    seen = run.executor.events(0.0)
    assert list_types(seen) == ["node_lost", "exited"] and seen[1]["node_lost"]
    assert len(lender.actors["node-0"]) == 1, "Ray would start no other there"


def test_the_loss_of_one_node_of_a_member_ends_the_agent_of_the_other_once_nobody_uses_it(make: Make) -> None:
    lender, run = make(2, workers=2)
    assert set(run.open()) == {"node-0", "node-1"}
    lender.reachable.discard("node-0")
    lose_agent(lender)
    assert list_types(run.wait(5)) == ["node_lost"]
    assert lender.cluster.groups, "the controller has not said yet that the member has ended"
    run.executor.request([], [])
    assert [offer_of(event) for event in run.wait(20)] == [("node", "node-1", 0)]
    assert lender.actors["node-1"][0].commands == [("close",)] and not lender.cluster.groups


def test_a_node_that_is_frozen_is_offered_again_only_when_it_has_answered(make: Make) -> None:
    lender, run = make()
    run.open()
    run.launch(run.placed[0])
    lender.answers["node-0"] = [None]
    until, seen = lender.cluster.clock + 70, list[Event]()
    while lender.cluster.clock < until:  # nobody answers
        seen += run.executor.events(0.5)
    assert list_types(seen) == ["agent_replaced", "node", "exited"] and seen[2]["agent_lost"]
    assert "silent for 60 s" in seen[0]["detail"]
    assert offer_of(seen[1]) == ("node", "node-0", 0) and seen[1]["gpus"] == []

    run.executor.request(run.identities, [])
    groups, until = list(lender.cluster.groups), lender.cluster.clock + 30
    while lender.cluster.clock < until:
        assert "node" not in list_types(run.executor.events(0.5))
    assert [group for group in lender.cluster.groups if group not in groups and group.is_placed] == []

    agent = lender.actors["node-0"][-1]
    agent.answer.news.append((lender.describe("node-0"), "/tmp/of-node-0"))
    back, *_ = [event for event in run.wait(2) if event["type"] == "node"]
    assert offer_of(back) == ("node", "node-0", 1.0), "it has answered"


FULL = "no private directory can be made: [Errno 28] No space left on device: '/tmp'"
DIED = "The actor is dead because its worker process has died."


@pytest.mark.parametrize(
    ("error", "detail"), [(FULL, "device: '/tmp'"), (DIED, "is the disk of its temporary directory full?")]
)
def test_a_node_whose_disk_is_full_is_named_and_tried_again_and_the_run_begins_on_others(
    make: Make, error: str, detail: str
) -> None:
    lender, run = make(2, members=2)
    lender.answers["node-0"] = [ray.exceptions.RayError(error)]
    assert run.open() == ["node-1"]
    run.executor.request(run.identities[1:], run.placed)
    [named] = [event for event in run.wait(5) if event["type"] == "node_unusable"]
    assert (named["node"], named["retry_s"]) == ("node-0", 60) and named["detail"].endswith(detail)
    assert "node-0" not in find_held(lender), "what was lent there is given back"
    [back] = [event for event in run.wait(90) if event["type"] == "node"]
    assert offer_of(back) == ("node", "node-0", 1.0) and len(lender.actors["node-0"]) == 2


NODES = 50


def test_agents_of_fifty_nodes_start_side_by_side_and_get_their_commands_in_one_call(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender, started = Lender(world, monkeypatch, [(1.0, 8.0, 0)] * NODES), list[int]()
    monkeypatch.setattr("ray.get", lambda call: started.append(len(lender.actors)) or lender.get(call))
    run = Run(lender, tmp_path, members=NODES)
    assert len(nodes := run.open()) == NODES and started[0] == NODES, "all, before the first has answered"
    before = {name: agent.calls for name, [agent] in lender.actors.items()}
    began = lender.cluster.clock
    assert [run.executor.start_feeder(name, 3, 1, 64) for name in nodes] == [
        f"/tmp/of-{n}/feeder-3" for n in nodes
    ]
    run.executor.expect_readers("node-0", 3, 1)
    run.executor.events(0.0)
    assert lender.cluster.clock == began, "nobody waits for a node while feeders start"
    assert {agent.calls - before[name] for name, [agent] in lender.actors.items()} == {1}
    [first] = lender.actors["node-0"]
    assert first.commands[-2:] == [("start_feeder", 3, 1, 64, None, False), ("expect_readers", 3, 1)]


def test_agents_are_not_silent_while_the_driver_waits_for_the_head(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(Lender(world, monkeypatch, [(1.0, 8.0, 0)] * 2), tmp_path, members=2)
    run.open()

    def wait_for_head() -> None:
        for agent in run.executor._model.agents.values():
            agent.heard_at -= 90.0

    monkeypatch.setattr(run.executor._loop, "_renew_leases", wait_for_head)
    assert [event["type"] for event in run.wait(1.5)] == []


def test_a_run_that_cannot_be_opened_ends_its_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    session = SimpleNamespace(
        nodes=list, directory=None, is_lost=False, calling=nullcontext, ray_directory=tmp_path
    )
    session.close = lambda: closed.append("ray")
    monkeypatch.setattr("ensemble.executors.ray.executor.RayConnection", lambda: session)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the log cannot be read")

    monkeypatch.setattr("ensemble.executors.ray.executor.LeaseManager", fail)
    declared, executor = an_ensemble(devices="cpu"), RayExecutor()
    with pytest.raises(OSError, match="the log cannot be read"):
        executor.open(RunDir.create(tmp_path / "run", declared), declared, lambda events: None)
    executor.close()
    assert closed == ["ray"]


def test_a_clusters_agents_trust_the_folders_that_the_driver_does_and_see_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables: list[dict[str, Any]] = []

    def options(**options: Any) -> Any:
        variables.append(options.get("runtime_env", {}).get("env_vars", {}))
        return SimpleNamespace(remote=lambda *arguments: None)

    monkeypatch.setattr(agent_link, "make_actor_class", lambda: SimpleNamespace(options=options))
    run_dir = RunDir.create(tmp_path / "run", an_ensemble(devices="cpu"))
    records = [{"NodeID": "0" * 56, "Resources": {"CPU": 1.0, "GPU": gpus}} for gpus in (0.0, 1.0)]
    monkeypatch.delenv("ENSEMBLE_TRUST_FOLDER", raising=False)
    for _ in ("trusts none", "trusts one"):
        for record in records:
            start_agent(record, "n0", run_dir, None, on_gpus=True)
        monkeypatch.setenv("ENSEMBLE_TRUST_FOLDER", "/shared")
    assert [names.get("ENSEMBLE_TRUST_FOLDER") for names in variables] == [None, None, "/shared", "/shared"]
    sees_all = ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" in names for names in variables]
    assert sees_all == [False, True] * 2


@pytest.mark.parametrize("grows", [False, True])
def test_an_autoscaler_is_asked_once_a_second_also_while_something_is_to_be_reported(
    grows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, clock = list[float](), [0.0]

    def is_growing() -> bool:
        asked.append(clock[0])
        return grows and len(asked) < 5

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    simulated = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    for module in (executor_module, loop, agent_link):
        monkeypatch.setattr(module, "time", simulated)
    monkeypatch.setattr(_compat, "is_autoscaler_growing", is_growing)
    needs = Resources(cpus_per_worker=64, nodes={"team": "vision"})
    executor, declared = RayExecutor(), an_ensemble(devices="cpu", resources=needs)
    model = executor._model = ClusterModel(LeaseManager("run", "cpu", []))
    monkeypatch.setattr(_compat, "is_head_answering", lambda timeout_s: True)
    session: Any = SimpleNamespace(is_lost=False, calling=nullcontext)
    executor._loop = ClusterLoop(model, AgentLink(RunDir(tmp_path), None, on_gpus=False), session)
    monkeypatch.setattr(executor._loop, "_renew_leases", lambda: None)
    model.reports.append({"type": "resources", "missing": "1 x (64 cores)"})
    assert executor._await_growth(declared)
    assert {round(after - before) for before, after in itertools.pairwise(asked)} == {1} and len(asked) > 10
    assert ("waiting for the cluster's autoscaler" in caplog.text) == grows
