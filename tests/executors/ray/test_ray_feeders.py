"""Feeders and kept actors of the Ray executor while a node's agent is slow, or an actor has died."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from execute_members import an_ensemble

from ensemble import Resources
from ensemble.executors.ray import RayExecutor
from ensemble.store import RunDir
from ensemble.train import Job

pytestmark = pytest.mark.ray

LONG_S = 100.0  # what takes longer has failed


class Run:
    """An executor on a Ray of its own, and jobs of one member."""

    def __init__(self, path: Path) -> None:
        self.declared = an_ensemble([{"lr": 0.1}], epochs=1, resources=Resources(cpus_per_worker=0.2))
        self.run_dir = RunDir.create(path, self.declared)
        self.executor = RayExecutor()
        self.seen: list[dict[str, Any]] = []

    def open(self) -> None:
        [node] = self.executor.open(self.run_dir, self.declared, lambda events: None)
        self.node = node.name
        usage = self.until(lambda event: event["type"] == "usage" and event["role"] == "orchestrate")
        self.agent = psutil.Process(usage["pid"])

    def launch(self, attempt: int, feeder: str | None = None) -> None:
        job = Job(
            run_dir=str(self.run_dir.path),
            identity=self.declared.identify(0),
            attempt=attempt,
            rank=0,
            rendezvous=None,
            interface=None,
            device="cpu",
            feeder=feeder,
            node=self.node,
        )
        self.executor.launch([job], [None])

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first event from now on that is wanted; all events on the way are `seen`."""
        while True:
            news = self.executor.events(1.0)
            self.seen += news
            for event in news:
                if wanted(event):
                    return event

    def exited(self) -> dict[str, Any]:
        return self.until(lambda event: event["type"] == "exited")

    def feeders(self) -> list[psutil.Process]:
        """Feeder processes of the node."""
        return [each for each in self.agent.children() if "pipelines.feeder.process" in " ".join(each.cmdline())]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "run")
    try:
        run.open()
        yield run
    finally:
        run.executor.close()


def test_nobody_waits_for_an_agent_that_is_slow_and_members_wait_for_their_feeder(run: Run) -> None:
    run.agent.send_signal(signal.SIGSTOP)

    def use() -> None:
        feeder = run.executor.start_feeder(run.node, 0, 1, 64)
        run.launch(0, feeder)
        run.executor.send("member-0", "verdict")
        run.executor.stop_feeder(run.node, 1)

    using = threading.Thread(target=use)
    using.start()
    using.join(LONG_S / 5)
    waited = using.is_alive()
    run.agent.send_signal(signal.SIGCONT)
    using.join()
    assert not waited, "the controller's thread waited for the node"
    assert run.exited()["outcome"] == "finished"
    assert not [event for event in run.seen if event["type"] == "feeder_exited"]
    epochs = [event for event in run.seen if event["type"] == "epoch"]
    assert epochs and not any(event["private_batches"] for event in epochs), "it read its feeder from the start"


def test_a_feeder_that_starts_too_late_is_stopped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ensemble.executors.ray.executor._CALL_S", 0.5)
    run.agent.send_signal(signal.SIGSTOP)
    run.executor.start_feeder(run.node, 0, 1, 64)
    failed = run.until(lambda event: event["type"] == "feeder_exited")
    assert failed["started"] is False and "did not answer" in failed["detail"]
    run.agent.send_signal(signal.SIGCONT)
    run.until(lambda event: event["type"] == "usage" and event["role"] == "feed")
    run.executor.start_feeder(run.node, 1, 1, 64)  # answered once the agent has done all before it
    monkeypatch.setattr("ensemble.executors.ray.executor._CALL_S", LONG_S)
    while run.executor._agents[run.node].starting:
        run.executor.events(1.0)
    assert len(run.feeders()) == 1, "the late one is an orphan"


def test_an_actor_that_died_while_it_was_kept_costs_no_attempt(run: Run) -> None:
    run.launch(0)
    assert run.exited()["outcome"] == "finished"
    [(_, _, kept)] = run.executor._idle._kept
    import ray

    ray.kill(kept)
    run.launch(1)
    exited = run.exited()
    assert (exited["attempt"], exited["outcome"]) == (1, "finished"), exited["detail"]
