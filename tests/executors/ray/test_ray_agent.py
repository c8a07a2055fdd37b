"""What needs no Ray that runs: a node's agent by itself, and a cluster that is not there."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ensemble.executors.ray.actors import MemberWorker, NodeAgent, list_import_directories
from execute_members import an_ensemble

from ensemble.executors.node_services import NodeServices
from ensemble.executors.ray.session import Session
from ensemble.executors.spawn import ForkServer
from ensemble.spec import SpecError
from ensemble.store import RunDir
from ensemble.train import Job


def test_an_agent_whose_thread_fails_says_so_and_refuses_what_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(services: NodeServices) -> None:
        raise OSError("no power to be had")

    run_dir = RunDir.create(tmp_path / "run", an_ensemble())
    agent = NodeAgent("here", str(run_dir.path), run_dir.info["run_id"], None, list_import_directories(), None)
    monkeypatch.setattr(NodeServices, "sample", fail)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, agent.events())
        with pytest.raises(OSError, match="no power to be had"):
            reading.result(timeout=60)
        asked = pool.submit(agent.expect_readers, 0, 1)
        with pytest.raises(RuntimeError, match="the agent of node here has ended"):
            asked.result(timeout=60)
    monkeypatch.undo()
    agent._services.close()
    if agent._forks is not None:
        agent._forks.close()


def test_a_cluster_that_is_not_there_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(SpecError, match=f"no Ray answers at RAY_ADDRESS={address}: .*refused"):
            Session()


def test_what_a_rank_is_told_before_it_starts_reaches_it_and_no_other_rank(tmp_path: Path) -> None:
    """An actor may have trained another member before, and is told in another thread than it trains in."""
    declared = an_ensemble([{"lr": 0.1}] * 3, epochs=1)
    run_dir = RunDir.create(tmp_path / "run", declared)
    forks = ForkServer(tmp_path, str(tmp_path / "forks"))

    def ends(number: int, untold: list[tuple[str, dict[str, str]]]) -> str:
        made: dict[str, Any] = {"rendezvous": None, "interface": None, "device": "cpu", "feeder": None}
        job = Job(run_dir=str(run_dir.path), identity=declared.identify(number), attempt=0, rank=0, **made)
        said = list(actor.run(job.as_json(), None, str(tmp_path / "forks"), untold))
        return str(said[-1][-1]["outcome"])

    try:
        actor = MemberWorker([])
        assert ends(0, [("stop", {})]) == "stopped"
        actor.send("member-0", 0, "stop", {})  # it has ended
        actor.send("member-1", 0, "stop", {})
        assert ends(1, []) == "stopped"
        actor.send("member-0", 0, "stop", {})
        actor.send("member-2", 1, "stop", {})
        assert ends(2, []) == "finished"
    finally:
        forks.close()
