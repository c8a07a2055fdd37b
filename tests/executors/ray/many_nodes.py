"""A cluster of hundreds of nodes without Ray: the run's own decisions, and what they cost, on a virtual clock.

The session, the model of the cluster and the leases are those of any run. Ray, agents and members are stood in
for: a request for a named node is met at once, an agent answers after seconds or never, a member takes seconds.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from ensemble import Ensemble, Recipe, Resources
from ensemble.controller.actions import Action, Demand, Launch, Propose
from ensemble.controller.feeders import SharedStream
from ensemble.controller.session import Session
from ensemble.executors.ray import lease_manager, leases
from ensemble.executors.ray.agents import Action as NodeAction
from ensemble.executors.ray.agents import Answered, Died, News, StartAgent
from ensemble.executors.ray.cluster_model import ClusterModel
from ensemble.executors.ray.lease_manager import LeaseManager
from ensemble.executors.ray.leases import Lease
from ensemble.store import RunDir, RunState
from pipelines import Pipeline, sources

CORES, MEMORY_GB = 4, 16.0
NEVER, LATEST_S = 0.03, 40.0  # the share of agents that never answer, and the latest answer of the others
TRAINS_S = 90.0
Result = TypeVar("Result")


def declare(members: int) -> Ensemble:
    return Ensemble(
        name="crowd",
        recipe=Recipe(model=dict, loss=dict, task="classification"),
        train=Pipeline(sources.arrays(x=np.zeros((64, 2), np.float32))),
        members=[{"lr": 0.1 / (1 + number)} for number in range(members)],
        resources=Resources(cpus_per_worker=1.0, gpus_per_worker=0.0, memory_gb=1.0),
        sharing="independent",
        devices="cpu",
        epochs=1,
    )


class Crowd:
    """A run on so many nodes.

    Attributes:
        cpu_s: CPU-seconds of the session, and of the model with its leases.
        slowest_s: of the costliest second.
        finished: members.
    """

    def __init__(self, nodes: int, members: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random, self.now, self.clock = Random(seed), 1000.0, itertools.count()
        self.cpu_s, self.finished, self.slowest_s = Counter[str](), set[str](), 0.0
        resources = {"CPU": float(CORES), "memory": MEMORY_GB * 2**30}
        hosts = [f"host-{number}" for number in range(nodes)]
        self.records = {
            host: {"NodeID": host, "NodeManagerHostname": host, "Resources": dict(resources)} for host in hosts
        }
        self.free = {host: dict(resources) for host in hosts}
        self.later: list[tuple[float, int, str, News]] = []
        self.silent, self.running = set[str](), Counter[str]()
        self._stand_in_for_ray(monkeypatch)
        self.ensemble = declare(members)
        self.identities = [self.ensemble.identify(number) for number in range(members)]
        self.manager = LeaseManager("crowd", "cpu", self.identities)
        self.model = ClusterModel(self.manager, on_gpus=False)
        stream = SharedStream(self.ensemble)
        stream.check()
        self.session = Session(
            ensemble=self.ensemble,
            run_dir=RunDir(Path("/nowhere/crowd")),
            run=RunState(),
            nodes=[],
            stream=stream,
            awaits_pruner=False,
            streaming=False,
            trials_left=members,
            list_cluster=lambda: self.model.cluster,
            can_measure=False,
        )
        self.proposed = iter(self.identities)
        self._look()
        self.perform(self.session.start([{"type": "run_started", "name": "crowd", "epochs": 1}], *self.time))
        self.perform(self.session.open_queue({}, {}, *self.time))

    def _stand_in_for_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (leases, lease_manager):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(leases, "_request", self._request)
        monkeypatch.setattr(leases, "_find_given", self._find_given)
        monkeypatch.setattr(leases, "_find_nodes", lambda lease: None)
        monkeypatch.setattr(lease_manager._compat, "list_draining_nodes", lambda timeout_s: {})
        monkeypatch.setattr("ray.util.remove_placement_group", self._give_back)

    def _request(self, request: Any, name: str, avoided: Iterable[str] = ()) -> Lease:
        return Lease(request, request, request.bundle, since=self.now)

    def _find_given(self, lease: Lease) -> list[tuple[str, tuple[str, ...]]] | None:
        ray_id, bundle = lease.request.ray_id, lease.request.bundle
        if ray_id is None or self.free[ray_id]["CPU"] < bundle.cpus:
            return None
        self.free[ray_id]["CPU"] -= bundle.cpus
        self.free[ray_id]["memory"] -= bundle.memory_gb * 2**30
        return [(ray_id, ())]

    def _give_back(self, group: Any) -> None:
        if group.ray_id is not None:
            self.free[group.ray_id]["CPU"] += group.bundle.cpus
            self.free[group.ray_id]["memory"] += group.bundle.memory_gb * 2**30

    @property
    def time(self) -> tuple[float, float]:
        return self.now, 1e9 + self.now

    def _count(self, whose: str, do: Callable[..., Result], *args: Any) -> Result:
        began = time.thread_time()
        try:
            return do(*args)
        finally:
            self.cpu_s[whose] += time.thread_time() - began

    def run(self, most_s: int) -> None:
        """Until all members have finished."""
        for _ in range(most_s):
            if self.session.is_over:
                return
            before = self.cpu_s.total()
            self.step()
            self.slowest_s = max(self.slowest_s, self.cpu_s.total() - before)
        raise AssertionError(f"after {most_s} s {len(self.finished)} members have finished")

    def step(self) -> None:
        """A second."""
        self.now += 1.0
        while self.later and self.later[0][0] <= self.now:
            _, _, name, news = heapq.heappop(self.later)
            self._carry_out(self._count("model", self.model.handle, name, news, self.now))
            ended = [each["member"] for each in news if each["type"] == "exited"] if isinstance(news, list) else []
            self.finished.update(ended)
            self.running[name] -= len(ended)
        for agent in list(self.model.agents.values()):
            if agent.described is not None and int(self.now) % 20 == 0:
                self._count("model", self.model.handle, agent.name, [], self.now)  # it lives
        for name, reason in self._count("model", self.model.find_silent, self.now):
            self._carry_out(self._count("model", self.model.handle, name, Died(reason), self.now))
        for ray_id in self._count("model", self.model.collect):
            self._carry_out(self._count("model", self.model.open_node, ray_id, self.now))
        if self.manager.is_replan_due:
            self._look()
            self._count("model", self.manager.replan)
        self._count("model", self.model.release_unused, self.now)
        for report in self.model.take_reports():
            self.perform(self._count("session", self.session.handle, report, *self.time))
        self.perform(self._count("session", self.session.reconcile, *self.time))
        while self.session.is_placement_due:
            self.perform(self._count("session", self.session.reconcile, *self.time))

    def _look(self) -> None:
        self._count("model", self.model.see_nodes, self.records.values(), self.free)

    def _carry_out(self, actions: Iterable[NodeAction]) -> None:
        for action in actions:
            if isinstance(action, StartAgent):
                if self.random.random() < NEVER:
                    self.silent.add(action.name)
                    continue
                self._say(self.random.uniform(0.0, LATEST_S), action.name, Answered(_describe(action.name), ""))

    def _say(self, in_s: float, name: str, news: News) -> None:
        heapq.heappush(self.later, (self.now + in_s, next(self.clock), name, news))

    def perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Propose):
                proposed = {"type": "proposed", "identity": next(self.proposed)}
                self.perform(self._count("session", self.session.handle, proposed, *self.time))
            elif isinstance(action, Demand):
                self._count("model", self.manager.set_demand, action.waiting, action.placed)
            elif isinstance(action, Launch):
                self._count("model", self.model.launch, action.jobs, action.devices)
                self._train(action)

    def _train(self, action: Launch) -> None:
        (job,) = action.jobs
        self.running[job.node] += 1
        assert self.running[job.node] <= CORES, f"{job.node} has more members than cores"
        who = {"member": job.identity.member, "attempt": job.attempt}
        ends = [{"type": "finished", **who, "epoch": 0, "step": 0, "metrics": {}}]
        ends += [{"type": "exited", **who, "rank": 0, "outcome": "finished", "detail": "", "preparing": []}]
        self._say(0.0, job.node, [{"type": "started", **who, "pid": 1, "epoch": 0, "step": 0, "first_epoch": 0}])
        self._say(self.random.uniform(0.5, 1.0) * TRAINS_S, job.node, ends)


def _describe(name: str) -> dict[str, Any]:
    none: dict[str, Any] = dict.fromkeys(("gpus", "gpu_ids", "gpu_memory_gb", "gpu_names", "gpu_reasons"), ())
    return {"name": name, "host": name, "cpus": float(CORES), "memory_gb": MEMORY_GB, **none}
