"""Fifty nodes start side by side. The nodes are simulated: each takes a second of a clock to answer a call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.execute_members import an_ensemble

from ensemble.executors.ray import RayExecutor, _compat, agent_link
from ensemble.executors.ray.agent_link import AgentLink, start_agent
from ensemble.executors.ray.cluster_model import ClusterModel
from ensemble.executors.ray.lease_manager import LeaseManager
from ensemble.executors.ray.loop import ClusterLoop
from ensemble.spec import Resources
from ensemble.store import RunDir

NODES = 50


@dataclass(eq=False)
class Call:
    """Something that was asked of a node: when it will have been done, and what it says then."""

    done: float
    said: Any


class Simulated:
    """Stands for Ray's calls to the agents of `NODES` nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import ray

        self.now = 0.0
        self.commands: list[tuple[str, int, list[Any]]] = []
        monkeypatch.setattr(ray, "get", lambda call: call.said)
        monkeypatch.setattr(ray, "wait", self.wait)
        session = SimpleNamespace(
            nodes=self.nodes, directory=Path("/tmp/ray-of-this-run"), is_lost=False, calling=nullcontext
        )
        monkeypatch.setattr("ensemble.executors.ray.executor.RayConnection", lambda: session)
        monkeypatch.setattr(agent_link, "start_agent", self.start_agent)
        monkeypatch.setattr(_compat, "is_head_answering", lambda timeout_s: True)

    def nodes(self) -> list[dict[str, Any]]:
        offered = {"CPU": 4.0, "memory": 2.0**33}
        return [
            {"NodeID": str(n), "NodeManagerAddress": f"10.0.0.{n}", "NodeManagerHostname": f"n{n}"}
            | {"Resources": offered}
            for n in range(NODES)
        ]

    def start_agent(self, record: dict[str, Any], name: str, *_: Any, **__: Any) -> Any:
        described = {"name": name, "cpus": 4, "gpus": (), "memory_gb": 8, "host": name, "interface": "eth0"}
        described |= {"gpu_ids": (), "gpu_memory_gb": (), "gpu_names": [], "gpu_reasons": []}
        silent = SimpleNamespace(remote=lambda: Call(math.inf, None))
        return SimpleNamespace(
            describe=SimpleNamespace(remote=lambda *_: Call(self.now + 1.0, (described, f"/tmp/of-{name}"))),
            events=SimpleNamespace(options=lambda **_: silent),
            perform=SimpleNamespace(remote=lambda number, what: self.commands.append((name, number, what))),
        )

    def wait(
        self, calls: Sequence[Call], num_returns: int, timeout: float | None
    ) -> tuple[list[Call], list[Call]]:
        if timeout != 0:
            self.now = min(max(self.now, sorted(call.done for call in calls)[num_returns - 1]), self.now + 1.0)
        return [call for call in calls if call.done <= self.now], []


def test_agents_of_fifty_nodes_take_as_long_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Simulated(monkeypatch)
    declared = an_ensemble(devices="cpu")
    executor = RayExecutor()
    nodes = executor.open(RunDir.create(tmp_path / "run", declared), declared, lambda events: None)
    assert [node.name for node in nodes] == [f"n{n}" for n in range(NODES)]
    assert cluster.now == 1.0, "seconds in which all agents have come up"

    addresses = [executor.start_feeder(node.name, 3, 1, 64) for node in nodes]
    assert addresses[9] == "/tmp/of-n9/feeder-3"
    executor.expect_readers("n0", 3, 1)
    executor.events(0.0)
    assert cluster.now == 1.0, "nobody waits for a node while feeders start"
    commands = {name: (number, what) for name, number, what in cluster.commands}
    assert len(cluster.commands) == NODES, "what is for one agent is one call"
    assert commands["n0"] == (0, [("start_feeder", 3, 1, 64, None, False), ("expect_readers", 3, 1)])


def test_a_run_that_cannot_be_opened_ends_its_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    session = SimpleNamespace(
        nodes=list,
        directory=None,
        is_lost=False,
        calling=nullcontext,
        close=lambda: closed.append("ray"),
        ray_directory=tmp_path,
    )
    monkeypatch.setattr("ensemble.executors.ray.executor.RayConnection", lambda: session)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the log cannot be read")

    monkeypatch.setattr("ensemble.executors.ray.executor.LeaseManager", fail)
    declared, executor = an_ensemble(devices="cpu"), RayExecutor()
    with pytest.raises(OSError, match="the log cannot be read"):
        executor.open(RunDir.create(tmp_path / "run", declared), declared, lambda events: None)
    executor.close()
    assert closed == ["ray"]


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_clusters_agents_trust_the_folders_that_the_driver_does_and_see_the_gpus(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    def options(**given_options: Any) -> Any:
        given.append(given_options.get("runtime_env", {}).get("env_vars", {}))
        return SimpleNamespace(remote=lambda *arguments: None)

    monkeypatch.setattr(agent_link, "make_actor_class", lambda: SimpleNamespace(options=options))
    run_dir = RunDir.create(tmp_path / "run", an_ensemble(devices="cpu"))
    record = {"NodeID": "0" * 56, "Resources": {"CPU": 1.0, "GPU": float(gpus)}}
    for trusts in ("", "/shared"):
        if trusts:
            monkeypatch.setenv("ENSEMBLE_TRUST_FOLDER", trusts)
        else:
            monkeypatch.delenv("ENSEMBLE_TRUST_FOLDER", raising=False)
        start_agent(record, "n0", run_dir, None, on_gpus=True)
    assert [one.get("ENSEMBLE_TRUST_FOLDER") for one in given] == [None, "/shared"]
    assert all(("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" in one) == bool(gpus) for one in given)


@dataclass(eq=False)
class Reports(Iterator[Call]):
    """The events of an agent that reports each second; when the next are there."""

    done: float

    def __next__(self) -> Call:
        self.done += 1.0
        return Call(0.0, [])


def open_cluster(tmp_path: Path) -> RayExecutor:
    declared = an_ensemble(devices="cpu")
    executor = RayExecutor()
    executor.open(RunDir.create(tmp_path / "run", declared), declared, lambda events: None)
    return executor


def test_agents_are_not_silent_while_the_driver_waits_for_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Simulated(monkeypatch)
    executor = open_cluster(tmp_path)
    executor._link._streams = {Reports(cluster.now): name for name in executor._model.agents}

    def wait_for_head() -> None:
        for agent in executor._model.agents.values():
            agent.heard_at -= 90.0

    monkeypatch.setattr(executor._loop, "_renew_leases", wait_for_head)
    assert [executor.events(1.0) for _ in range(3)] == [[], [], []]


@pytest.mark.parametrize("grows", [False, True])
def test_an_autoscaler_is_asked_once_a_second_also_while_something_is_to_be_reported(
    grows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[float] = []
    clock = [0.0]

    def is_growing() -> bool:
        asked.append(clock[0])
        return grows and len(asked) < 5

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    simulated = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    monkeypatch.setattr("ensemble.executors.ray.executor.time", simulated)
    monkeypatch.setattr("ensemble.executors.ray.loop.time", simulated)
    monkeypatch.setattr(agent_link, "time", simulated)
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
