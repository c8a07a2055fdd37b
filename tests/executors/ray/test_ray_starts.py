"""Fifty nodes start side by side, on a model of Ray; what a run asks of a cluster that it opens."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.execute_members import an_ensemble
from lent_cluster import Lender, Run
from ray_model import World

from ensemble.executors.ray import RayExecutor, _compat, agent_link, loop
from ensemble.executors.ray import executor as executor_module
from ensemble.executors.ray.agent_link import AgentLink, start_agent
from ensemble.executors.ray.cluster_model import ClusterModel
from ensemble.executors.ray.lease_manager import LeaseManager
from ensemble.executors.ray.loop import ClusterLoop
from ensemble.spec import Resources
from ensemble.store import RunDir

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
