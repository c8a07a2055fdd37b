"""What needs no Ray that runs: a node's agent by itself, and a cluster that is not there."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from kit.execute_members import an_ensemble, make_job

from ensemble.executors.memory_guard import MemoryGuard, RankMemory
from ensemble.executors.node_services import NodeServices
from ensemble.executors.ray import session
from ensemble.executors.ray.agent import NodeAgent, list_import_directories
from ensemble.executors.ray.agent_link import describe_error
from ensemble.executors.ray.agents import Agent, describe_node, name_nodes
from ensemble.executors.ray.cluster_model import ClusterModel
from ensemble.executors.ray.leases import Lease
from ensemble.executors.ray.request import Bundle, ResourceRequest
from ensemble.executors.ray.session import RayConnection, find_reachable
from ensemble.spec import Ensemble, SpecError
from ensemble.store import RunDir

Event = dict[str, Any]


class Run:
    def __init__(self, path: Path, devices: str = "cpu") -> None:
        self.declared: Ensemble = an_ensemble([{"lr": 0.1}] * 3, epochs=1, devices=devices)
        self.run_dir = RunDir.create(path / "run", self.declared)
        self.agents: list[NodeAgent] = []

    def start_agent(self, replaces: str = "") -> NodeAgent:
        run_id = self.run_dir.info["run_id"]
        agent = NodeAgent("here", str(self.run_dir.path), run_id, None, list_import_directories(), replaces)
        self.agents.append(agent)
        return agent

    def a_job(self, number: int = 0, attempt: int = 0, **params: Any) -> str:
        identity = self.declared.identify(number)
        identity = dataclasses.replace(identity, params=identity.params | params)
        return make_job(identity, self.run_dir, attempt=attempt).as_json()

    def close(self) -> None:
        for agent in self.agents:
            if not agent._closed.is_set():
                agent.perform(agent._next_number, [("close",)])
                agent._closed.wait(300)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


def list_exits(agent: NodeAgent, count: int = 1) -> list[Event]:
    found = (event for events in agent.events() for event in events if event["type"] == "exited")
    return list(itertools.islice(found, count))


def test_commands_are_executed_in_their_order_and_a_rank_ends_for_lack_of_memory_as_one_failure(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = run.start_agent()
    agent.perform(2, [("launch", [run.a_job(1)], [None])])
    agent.perform(1, [("send", "member-0", "stop", {}), ("send", "member-1", "stop", {})])
    agent.perform(0, [("launch", [run.a_job(0)], [None])])
    ended = {event["member"]: event["outcome"] for event in list_exits(agent, 2)}
    assert ended == {"member-0": "stopped", "member-1": "finished"}

    monkeypatch.setattr(agent._guard, "_fraction", lambda: 0.99)
    agent.perform(3, [("launch", [run.a_job(2, step_s=100.0)], [None])])
    [exited] = list_exits(agent)
    assert (exited["outcome"], exited["reason"]) == (None, "oom")
    assert "short of memory" in exited["detail"]


def test_a_member_that_was_killed_after_its_last_word_leaves_the_node_to_its_next_attempt(run: Run) -> None:
    """A rank may have said its last when its member is killed, because another rank failed."""
    agent = run.start_agent()
    agent.perform(0, [("launch", [run.a_job()], [None])])
    assert [event["attempt"] for event in list_exits(agent)] == [0]
    agent.perform(1, [("kill", "member-0"), ("launch", [run.a_job(attempt=1)], [None])])
    assert [(event["attempt"], event["outcome"]) for event in list_exits(agent)] == [(1, "finished")]


def test_an_agent_offers_its_node_only_when_the_ranks_of_the_one_that_it_replaces_are_gone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ensemble.executors.node_services._PREDECESSOR_S", 0.0)  # it is alive: in this process
    first = run.start_agent()
    first.perform(0, [("launch", [run.a_job(step_s=100.0)], [None])])
    events = (event for received in first.events() for event in received)
    rank = psutil.Process(next(event["pid"] for event in events if event["type"] == "started"))
    rank.suspend()
    run.start_agent(replaces=first.describe("127.0.0.1")[1])
    with contextlib.suppress(psutil.NoSuchProcess):  # it was reaped meanwhile
        assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE


def test_an_agent_says_how_its_node_is_and_if_its_thread_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(services: NodeServices) -> None:
        raise OSError("no power to be had")

    agent = run.start_agent()
    agent.describe("127.0.0.1")
    report = next(e for events in agent.events() for e in events if e["type"] == "node_health")
    assert report["free_gb"].keys() == {"run directory", "/tmp", "/dev/shm"} and report["cpus"] > 0
    monkeypatch.setattr(NodeServices, "sample", fail)
    with ThreadPoolExecutor(1) as pool, pytest.raises(OSError, match="no power to be had"):
        pool.submit(list, agent.events()).result(timeout=300)
    monkeypatch.undo()
    agent._close()  # its thread has ended


def make_seen(*gpus: str) -> dict[str, Any]:
    """What an agent says of its node with these GPUs."""
    seen: dict[str, Any] = {"name": "here", "host": "here", "cpus": 4.0, "memory_gb": 16.0, "memory_left_gb": None}
    seen |= {"gpus": ("A",) * len(gpus), "gpu_ids": gpus, "gpu_memory_gb": (80.0,) * len(gpus)}
    return seen | {"power": KNOWN, "gpu_names": [(gpu,) for gpu in gpus], "gpu_reasons": []}


KNOWN, UNKNOWN = {"gpu_activity": "SM utilization"}, {"gpu_activity": "it is not"}
RECORD = {"NodeID": "a", "Resources": {"CPU": 4.0, "memory": 16.0 * 2**30, "GPU": 2}}


def lend(agent: Agent, *gpus: str) -> Lease:
    bundle = Bundle(1.0, 1.0, 1)
    lease = Lease(ResourceRequest(bundle), None, bundle, gpus=gpus)
    lease.devices = agent.find_devices(lease.gpus)
    return lease


def test_a_gpu_that_the_node_does_not_offer_is_unusable_and_one_that_the_run_does_not_hold_is_not_named() -> None:
    agent, without = Agent("here", RECORD, make_seen("GPU-1")), Bundle(1.0, 1.0)
    for gpu, is_unusable in (("GPU-0", True), ("GPU-1", False)):
        assert agent.is_unusable(lend(agent, gpu)) == is_unusable
    assert not agent.is_unusable(Lease(ResourceRequest(without), None, without))
    agent = Agent("here", RECORD, make_seen("GPU-0", "GPU-1"))
    assert agent.described is not None
    reasons = enumerate(("busy", "slow", "broken"))
    agent.described["gpu_reasons"] = [((f"GPU-{n}", f"{n}"), reason) for n, reason in reasons]
    for gpu, said in (("GPU-0", "busy"), ("GPU-1", "slow"), ("2", "broken"), ("3", "Ray offers GPUs that")):
        assert describe_node(agent, [lend(agent, gpu)], on_gpus=True).no_gpus.startswith(said)
    assert not describe_node(agent, [lend(agent)], on_gpus=True).no_gpus
    assert describe_node(agent, None, on_gpus=True).no_gpus == "busy; slow; broken"


def make_change(*free: float) -> Event:
    """A `node` event: processes of others leave these parts of the GPUs GPU-0, GPU-1, ..."""
    gpus, count = tuple(f"GPU-{n}" for n in range(len(free))), len(free)
    parts = {"gpu_parents": gpus, "gpu_shares": (1.0,) * count, "gpu_exclusive": (False,) * count}
    return {"type": "node", **make_seen(*gpus), "gpu_free": free, **parts}


FREE = ((1.0, 1.0, 0.75), (1.0, 1.0, 0.5), (0.96, 1.0, 0.75), (0.92, 1.0, 0.75), (0.88, 1.0, 0.5))


@pytest.mark.parametrize(
    ("gpus", "changes", "field", "reported"),
    [
        (3, [make_change(*free) for free in FREE], "gpu_free", [[0.92, 1.0]]),
        (0, [{**make_change(), "memory_left_gb": gb} for gb in (3.0, 3.0, None)], "memory_left_gb", [3.0, None]),
        (1, [make_change(1.0) | {"power": why} for why in (KNOWN, UNKNOWN)], "power", [UNKNOWN]),
    ],
    ids=["GPUs that are its own", "memory that others leave", "activity that is known no more"],
)
def test_what_changes_for_members_on_a_node_is_reported_once(
    gpus: int, changes: list[Event], field: str, reported: list[Any]
) -> None:
    model, agent = ClusterModel(None), Agent("here", RECORD, make_seen(*(f"GPU-{n}" for n in range(gpus))))
    model.report_node(agent)
    model.take_reports()
    for change in changes:
        model.keep(agent, [change])
    assert [event.get(field) for event in model.take_reports()] == reported
    agent.is_closing = True
    model.keep(agent, [make_change(*(0.1 for _ in range(gpus)))])
    assert not model.take_reports(), "no member is offered a node whose agent is closing"


def test_the_rank_is_ended_that_is_furthest_over_its_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [RankMemory(1, 900, 1000), RankMemory(2, 500, 300), RankMemory(3, 700, 600), RankMemory(4, 100, None)]
    assert MemoryGuard(lambda: 0.95).choose(lambda: ranks) == [2]
    assert MemoryGuard(lambda: 0.90).choose(lambda: ranks) == []
    assert MemoryGuard(lambda: 0.95).choose(list) == []
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.8")
    assert MemoryGuard(lambda: 0.79).choose(lambda: ranks) == [2], "before Ray does"
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    assert MemoryGuard(lambda: 0.99).choose(lambda: ranks) == [], "Ray ends nobody"


def test_a_cluster_that_is_not_there_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(SpecError, match=f"no Ray answers at RAY_ADDRESS={address}: .*refused"):
            RayConnection()


def test_nodes_that_do_not_answer_are_found_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as opened:
        deaf, alive = (opened.enter_context(socket.socket()) for _ in range(2))
        for listens in (deaf, alive):
            listens.bind(("127.0.0.1", 0))
            listens.listen(0 if listens is deaf else 16)
        for _ in range(4):  # its queue is full now, so that connections get no answer
            waits = opened.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex(deaf.getsockname())
        ports = [deaf.getsockname()[1]] * 20 + [alive.getsockname()[1]]
        records = [{"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port} for port in ports]
        all_at_once, usual = threading.Barrier(len(records)), session.is_reachable

        def is_reachable(record: dict[str, Any]) -> bool:
            all_at_once.wait(300)
            return usual(record)

        monkeypatch.setattr(session, "is_reachable", is_reachable)
        assert find_reachable(records) == records[-1:]


def test_nodes_of_one_host_have_names_of_their_own() -> None:
    ids = ["f" * 50 + str(number) for number in range(3)]  # those that Ray's provider for tests gives
    records = [{"NodeID": ray_id, "NodeManagerHostname": "host"} for ray_id in ids]
    names = name_nodes(records, {})
    assert list(names.values())[:2] == ["host", "host-ffffff"] and len(set(names.values())) == 3
    assert name_nodes(records[2:], names) == names, "and keep them"


def test_what_ray_says_of_a_lost_agent_is_told_without_its_ids() -> None:
    orphaned = "The actor is dead because its owner has died. Owner Id: 01ff Owner Ip address: 127.0.0.1 Detail"
    for error, reason in (
        (ray.exceptions.ActorDiedError(), "The actor died unexpectedly before finishing this task."),
        (ray.exceptions.RayActorError(error_msg=orphaned), "The actor is dead because its owner has died. Detail"),
        (ray.exceptions.ActorUnavailableError("Socket closed", b"\0" * 16), "the connection to its agent broke"),
    ):
        assert describe_error(error) == reason
