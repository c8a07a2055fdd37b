"""Feeders and ranks of the Ray executor while a node's agent is slow, or stopped."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.execute_members import an_ensemble, make_job

from ensemble import Resources
from ensemble.executors.ray import RayExecutor
from ensemble.store import RunDir

pytestmark = [pytest.mark.ray, pytest.mark.more]


class Run:
    """An executor, and jobs of one member."""

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

    def launch(self, attempt: int, feeder: str | None = None, **params: float) -> None:
        identity = self.declared.identify(0)
        identity = dataclasses.replace(identity, params=identity.params | params)
        job = make_job(identity, self.run_dir, attempt=attempt, feeder=feeder, node=self.node)
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


@pytest.fixture
def run(one_ray: None, tmp_path: Path) -> Iterator[Run]:
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
        run.executor.send("member-0", "result")
        run.executor.stop_feeder(run.node, 1)

    using = threading.Thread(target=use)
    using.start()
    using.join(300.0)
    waited = using.is_alive()
    run.agent.send_signal(signal.SIGCONT)
    using.join()
    assert not waited, "the controller's thread waited for the node"
    assert run.exited()["outcome"] == "finished"
    assert not [event for event in run.seen if event["type"] == "feeder_exited"]
    epochs = [event for event in run.seen if event["type"] == "epoch"]
    assert epochs and not any(event["private_batches"] for event in epochs), "it read its feeder from the start"


def test_an_agent_that_is_silent_is_replaced_and_its_ranks_are_gone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.launch(0, step_s=100.0)
    rank = psutil.Process(run.until(lambda event: event["type"] == "started")["pid"])
    run.agent.send_signal(signal.SIGSTOP)
    monkeypatch.setattr("ensemble.executors.ray.cluster_model.SILENT_S", 10.0)
    exited = run.exited()
    assert (exited["outcome"], exited["agent_lost"]) == (None, True)
    monkeypatch.setattr("ensemble.executors.ray.cluster_model.SILENT_S", 300.0)
    run.until(lambda event: event["type"] == "node" and event["cpus"] > 0)
    is_left = [p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in (rank, run.agent)]
    assert is_left == [False, False], "nothing is offered there before they are gone"
    run.launch(1)
    assert run.exited()["outcome"] == "finished"
