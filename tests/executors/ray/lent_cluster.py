"""A cluster that lends nodes to the Ray executor: Ray is a model, agents answer as they are told to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.execute_members import an_ensemble, make_job
from ray_model import World, make_record

from ensemble import Resources
from ensemble.executors.ray import RayExecutor, agent_link, executor, loop
from ensemble.schedule.needs import Placement
from ensemble.schedule.packing import pack
from ensemble.store import RunDir

Event = dict[str, Any]
LOST = "the actor died"


@dataclass(eq=False)
class Call:
    """An answer, or a stream of events, of an agent: `news` are to be read, in order; an exception ends it."""

    news: list[Any] = field(default_factory=list)

    def __next__(self) -> Call:
        if isinstance(self.news[0], StopIteration):
            raise self.news.pop(0)
        return self


class Actor:
    def __init__(self, answer: Any, name: str, run: str) -> None:
        self.name, self.run = name, run  # of its node, and of the run's directory
        self.running: set[tuple[str, int, int]] = set()
        self.is_closing, self.calls, self.commands = False, 0, list[tuple[Any, ...]]()
        self.answer, self.stream = Call([] if answer is None else [answer]), Call()
        self.describe = SimpleNamespace(remote=lambda address: self.answer)
        self.events = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: self.stream))
        self.perform = SimpleNamespace(remote=self._perform)

    def _perform(self, number: int, commands: list[tuple[Any, ...]]) -> None:
        self.calls += 1
        self.commands += commands


class Lender:
    """A cluster for one executor; `answers` has what agents of a node say at their start, in order."""

    def __init__(self, world: World, patch: pytest.MonkeyPatch, hosts: Sequence[tuple[float, float, int]]) -> None:
        import ray

        self.world, self.cluster = world, world.make(hosts)
        self.actors: dict[str, list[Actor]] = defaultdict(list)
        self.answers: dict[str, list[Any]] = defaultdict(list)
        self.reachable = set(self.cluster.total)
        self.is_late = False  # Ray gives nothing for now
        session = SimpleNamespace(directory=None, is_lost=False, calling=nullcontext, close=lambda: None)
        session.nodes = self.nodes
        patch.setattr(executor, "RayConnection", lambda: session)
        patch.setattr(agent_link, "start_agent", self.start_agent)
        patch.setattr(executor._compat, "is_head_answering", lambda timeout_s: True)
        patch.setattr(loop, "is_reachable", lambda record: record["NodeID"] in self.reachable)
        times = {"monotonic": self.read_clock, "time": self.read_clock, "thread_time": lambda: 0.0}
        clock = SimpleNamespace(sleep=self.sleep, **times)
        for module in (executor, loop, agent_link):
            patch.setattr(module, "time", clock)
        patch.setattr(executor._compat, "list_free_resources", self.list_free)
        patch.setattr(executor._compat, "list_draining_nodes", lambda timeout_s: self.cluster.draining)
        patch.setattr(ray, "wait", self.wait)
        patch.setattr(ray, "get", self.get)
        patch.setattr(ray, "kill", lambda actor: None)

    def read_clock(self) -> float:
        return self.cluster.clock

    def sleep(self, seconds: float) -> None:
        if not self.is_late:
            self.cluster.schedule()
        self.cluster.clock += seconds

    def nodes(self) -> list[dict[str, Any]]:
        more = {"NodeManagerAddress": "10.0.0.1"}
        total = self.cluster.total.items()
        return [make_record(n, h) | more | {"NodeManagerHostname": n} for n, h in total if n in self.reachable]

    def list_free(self) -> dict[str, dict[str, float]]:
        return {offer.ray_id: dict(offer.free) for offer in self.cluster.list_offers(on_gpus=True)}

    def start_agent(self, record: dict[str, Any], name: str, run_dir: RunDir, *_: Any, **__: Any) -> Actor:
        answer = self.answers[name].pop(0) if self.answers[name] else (self.describe(name), f"/tmp/of-{name}")
        self.actors[name].append(Actor(answer, name, str(run_dir.path)))
        return self.actors[name][-1]

    def describe(self, name: str) -> dict[str, Any]:
        host = self.cluster.total[name]
        cores = {"cpus": host.cpus / 1e4, "memory_gb": host.memory / 2**30, "interface": "eth0"}
        gpus = {"gpus": ("A",) * len(host.gpus), "gpu_ids": host.gpus, "gpu_memory_gb": (80.0,) * len(host.gpus)}
        named = {"gpu_names": [(gpu,) for gpu in host.gpus], "gpu_reasons": []}
        return {"name": name, "host": name, **cores, **gpus, **named}

    def wait(self, calls: list[Call], num_returns: int, timeout: float | None) -> tuple[list[Call], list[Call]]:
        self.sleep(timeout or 0.0)
        return [call for call in calls if call.news], []

    def get(self, call: Call) -> Any:
        said = call.news.pop(0)
        if isinstance(said, Exception):
            raise said
        return said


class Run:
    def __init__(self, lender: Lender, path: Path, members: int = 1, workers: int = 1, name: str = "run") -> None:
        self.lender = lender
        one = Resources(workers=workers, cpus_per_worker=1.0, memory_gb=1.0)
        self.declared = an_ensemble([{"lr": 0.1}] * members, resources=one, devices="cpu")
        self.run_dir = RunDir.create(path / name, self.declared)
        self.executor = RayExecutor()
        self.identities = [self.declared.identify(n) for n in range(members)]

    def open(self) -> list[str]:
        nodes = self.executor.open(self.run_dir, self.declared, lambda events: None)
        self.placed = pack(self.identities, [], nodes)
        self.executor.request([], self.placed)
        return [node.name for node in nodes]

    def launch(self, placement: Placement) -> None:
        self.executor.launch([make_job(placement.identity, self.run_dir, node=placement.node)], [None])

    def wait(self, seconds: float) -> list[Event]:
        until, seen = self.lender.cluster.clock + seconds, list[Event]()
        while self.lender.cluster.clock < until:
            for name, agents in self.lender.actors.items():
                if name in self.lender.reachable and not agents[-1].stream.news and not agents[-1].answer.news:
                    agents[-1].stream.news.append([{"type": "power", "node": name}])
            seen += self.executor.events(0.5)
        return [event for event in seen if event["type"] != "power"]
