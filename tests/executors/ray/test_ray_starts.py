"""Fifty nodes start side by side. The nodes are simulated: each takes a second of a clock to answer a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ensemble.executors.ray.placement import make_worker
from execute_members import an_ensemble

from ensemble.executors.ray import RayExecutor
from ensemble.store import RunDir

pytestmark = pytest.mark.ray

NODES = 50
BROKEN = 7
SILENT = object()


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
        self.failure: type[Exception] = ray.exceptions.GetTimeoutError
        monkeypatch.setattr(ray, "get", self.get)
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr("ensemble.executors.ray.executor.Session", lambda: SimpleNamespace(nodes=self.nodes))
        monkeypatch.setattr(RayExecutor, "_start_agent", lambda executor, ray_id, name: self.agent(int(ray_id)))

    def nodes(self) -> list[dict[str, Any]]:
        offered = {"CPU": 4.0, "memory": 2.0**33}
        return [
            {"NodeID": str(n), "NodeManagerAddress": f"10.0.0.{n}", "NodeManagerHostname": f"n{n}"}
            | {"Resources": offered}
            for n in range(NODES)
        ]

    def agent(self, number: int) -> SimpleNamespace:
        described = {"name": f"n{number}", "cpus": 4, "gpus": (), "memory_gb": 8, "host": f"n{number}"}
        described |= {"interface": "eth0"}
        feeds: Any = self.failure("no room for the ring") if number == BROKEN else "listens"
        says = {
            "describe": (described, f"/tmp/of-{number}/forks"),
            "events": SILENT,
            "start_feeder": feeds,
            "expect_readers": None,
        }
        methods = {
            name: SimpleNamespace(remote=lambda *_, said=said: self.ask(said)) for name, said in says.items()
        }
        for method in methods.values():
            method.options = lambda method=method, **_: method
        return SimpleNamespace(**methods)

    def ask(self, said: Any) -> Call:
        return Call(math.inf if said is SILENT else self.now + 1.0, said)

    def get(self, asked: Call | Sequence[Call], timeout: float | None = None) -> Any:
        calls = [asked] if isinstance(asked, Call) else list(asked)
        self.now = max(self.now, *(call.done for call in calls))
        for call in calls:
            if isinstance(call.said, Exception):
                raise call.said
        return calls[0].said if isinstance(asked, Call) else [call.said for call in calls]

    def wait(self, calls: list[Call], num_returns: int, timeout: float | None) -> tuple[list[Call], list[Call]]:
        if timeout != 0:
            self.now = max(self.now, sorted(call.done for call in calls)[num_returns - 1])
        return [call for call in calls if call.done <= self.now], []


def test_agents_and_feeders_of_fifty_nodes_take_as_long_as_those_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Simulated(monkeypatch)
    declared = an_ensemble(devices="cpu")
    executor = RayExecutor()
    nodes = executor.open(RunDir.create(tmp_path / "run", declared), declared, lambda events: None)
    assert [node.name for node in nodes] == [f"n{n}" for n in range(NODES)]
    assert cluster.now == 1.0, "seconds in which all agents have come up"

    addresses = [executor.start_feeder(node.name, 3, 1, 64) for node in nodes]
    assert addresses[9] == "/tmp/of-9/feeder-3"
    executor.expect_readers("n0", 3, 1)
    assert cluster.now == 1.0, "nobody waits for a node while feeders start"
    [told] = [event for event in executor.events(None) if event["type"] == "feeder_exited"]
    assert cluster.now == 2.0, "seconds in which all feeders have started, too"
    assert (told["node"], told["started"]) == (f"n{BROKEN}", False)
    assert "no room for the ring" in told["detail"]


@pytest.mark.parametrize("gpus", [None, 1.0])
def test_a_clusters_agents_and_workers_trust_the_group_as_the_driver_does(
    gpus: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    given: list[dict[str, Any]] = []

    def remote(**options: Any) -> Any:
        given.append(options.get("runtime_env", {}).get("env_vars", {}))
        return lambda actor_class: SimpleNamespace(remote=lambda *arguments: None)

    monkeypatch.setattr(ray, "remote", remote)
    declared = an_ensemble(devices="cpu")
    executor = RayExecutor()
    executor._run_dir = RunDir.create(tmp_path / "run", declared)
    executor._session = SimpleNamespace(directory=None)  # type: ignore[assignment]
    for trusts in ("", "1"):
        if trusts:
            monkeypatch.setenv("ENSEMBLE_TRUST_GROUP", trusts)
        else:
            monkeypatch.delenv("ENSEMBLE_TRUST_GROUP", raising=False)
        executor._start_agent("0" * 56, "n0")
        make_worker("0" * 56, ("n0", 1.0, 2**30), gpus)
    assert [one.get("ENSEMBLE_TRUST_GROUP") for one in given] == [None, None, "1", "1"]
    assert ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" in given[3]) == (gpus is not None)
