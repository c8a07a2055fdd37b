"""Several nodes share one stream: real feeders, workers, links and sockets, all on the loopback interface."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import threading
import time
import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import core_pipes as pipes
import pytest
from core_pipes import Feeder, Job, N, leaves_nothing, pipe  # noqa: F401

from pipelines import Peers
from pipelines.feeder import process as feed
from pipelines.multinode.link import LinkProcess


def start(stack: ExitStack, directory: Path, nodes: int, kind: str = "numpy", **options: Any) -> list[Feeder]:
    """Feeders of so many nodes, for a member each, in this process."""
    # Readers wait for the first group, however long a busy machine takes to load torch.
    common = {"capacity": 64, "expect": 1, "gate_timeout_s": 600.0, **options}
    peers = [Peers(str(directory / "peers"), i, nodes, "lo") for i in range(nodes)]
    return [stack.enter_context(Feeder(pipe(kind), peers=peer, **common)) for peer in peers]


def jobs(nodes: int, **options: Any) -> list[Job]:
    return [Job(batch_size=5 + i, name=f"member-{i}", **options) for i in range(nodes)]


def nodes_of(*feeders: Feeder) -> list[list[int]]:
    return [feeder.stats()["group"]["nodes"] for feeder in feeders]


@pytest.mark.more
@pytest.mark.parametrize(("design", "preparers"), [("all", None), ("multi", 2), ("single", 1)])
def test_what_the_nodes_prepare_together_is_what_each_would_alone(
    tmp_path: Path, design: str, preparers: int | None
) -> None:
    wanted = jobs(3)
    with ExitStack() as stack:
        feeders = start(stack, tmp_path, 3, design=design, preparers=preparers, overwrite_released=True)
        pairs = zip(wanted, feeders, strict=True)
        results = pipes.together([functools.partial(pipes.shared, job, feeder.address) for job, feeder in pairs])
        assert [records for records, _ in results] == [pipes.alone(job) for job in wanted]
        assert all(stats["private_batches"] == 0 for _, stats in results)
        sample_bytes = 3 * 7 * 4 + 5 + 1 + 8 + 8 + 8 + 1  # image, mask, flag, label, draw, index, _ok
        sent_bytes = 2 * 2 * N * sample_bytes
        # What has come is read at once; that it is sent is known a moment later.
        pipes.wait_until(lambda: sum(f.stats()["group"]["sent_bytes"] for f in feeders) >= sent_bytes)
        stats = [feeder.stats() for feeder in feeders]
    prepared, groups = [of_node["prepared"] for of_node in stats], [of_node["group"] for of_node in stats]
    assert sum(prepared) == 2 * N, "each sample once over all nodes"
    assert sum(map(bool, prepared)) == (preparers or 3)
    assert [group["received"] for group in groups] == [2 * N - count for count in prepared]
    assert sum(group["sent_bytes"] for group in groups) == sent_bytes and not os.listdir(tmp_path / "peers")


@pytest.mark.more
def test_a_link_or_feeder_that_dies_takes_nobody_with_it_and_is_replaced(tmp_path: Path) -> None:
    # None is faster than another: only nodes that are near each other meet anew.
    wanted = [replace(job, epochs=(0, 99), pause_s=0.006 * job.batch_size) for job in jobs(3)]
    over, everybody = threading.Event(), [[0, 1, 2], [0, 1, 2]]
    peers = [Peers(str(tmp_path / "peers"), i, 3, "lo") for i in range(3)]
    address = str(tmp_path / "s" / "socket")
    options: dict[str, Any] = {"capacity": 128, "expect": 1, "design": "all"}
    with ExitStack() as stack:
        killed = feed.spawn(pipe("numpy"), peers=peers[0], address=address, **options)
        stack.callback(killed.stop)
        others = [stack.enter_context(Feeder(pipe("numpy"), peers=peer, **options)) for peer in peers[1:]]

        def fault() -> None:
            pipes.wait_until(lambda: nodes_of(*others) == everybody and others[0].stats()["consumed"] > 100)
            os.kill(others[0].stats()["group"]["pid"], signal.SIGKILL)
            pipes.wait_until(lambda: nodes_of(*others) != everybody)
            pipes.wait_until(lambda: nodes_of(*others) == everybody)
            killed.kill()
            pipes.wait_until(lambda: nodes_of(*others) == [[1, 2], [1, 2]])
            killed.stop()
            successor = feed.spawn(pipe("numpy"), peers=peers[0], address=address, replacement=True, **options)
            stack.callback(successor.stop)
            pipes.wait_until(lambda: nodes_of(*others) == everybody)
            over.set()

        pairs = zip(wanted, [address, *(feeder.address for feeder in others)], strict=True)
        reading = [lambda j=job, a=a: pipes.read_until(over, j, j.attach(a)) for job, a in pairs]
        *results, _ = pipes.together([*reading, fault])
        pipes.check_until(results, wanted)
        assert results[1][1]["private_batches"] == results[2][1]["private_batches"] == 0
        assert results[0][1]["private_batches"] > 0
        assert all(feeder.stats()["group"]["lost_groups"] >= 2 for feeder in others)


def test_a_link_that_cannot_start_is_tried_again_after_a_pause(tmp_path: Path, monkeypatch: Any) -> None:
    started: list[float] = []
    start_link = LinkProcess.start

    def start_and_note(link: LinkProcess) -> None:
        started.append(time.monotonic())
        start_link(link)

    monkeypatch.setattr(LinkProcess, "start", start_and_note)
    monkeypatch.setattr("pipelines.multinode.link.sys", SimpleNamespace(executable="/bin/false"))
    with Feeder(pipe("numpy"), peers=Peers(str(tmp_path / "peers"), 0, 2)) as feeder:
        pipes.wait_until(lambda: len(started) >= 2)
        assert feeder.stats()["failure"] is None
    assert started[1] - started[0] >= 2


def test_nodes_that_lose_the_directory_or_were_given_different_designs_work_by_themselves(tmp_path: Path) -> None:
    wanted = jobs(2)
    with ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        options: dict[str, Any] = {"capacity": 64, "expect": 1, "gate_timeout_s": 3.0}
        feeders = []
        for node, design in enumerate(("all", "single")):
            feeder = Feeder(pipe("numpy"), peers=Peers(str(tmp_path / "peers"), node, 2), design=design, **options)
            feeders.append(stack.enter_context(feeder))
        pipes.wait_until(lambda: any("or design" in str(warning.message) for warning in caught))
        shutil.rmtree(tmp_path / "peers")
        pairs = zip(wanted, feeders, strict=True)
        results = pipes.together([functools.partial(pipes.shared, job, feeder.address) for job, feeder in pairs])
        assert [records for records, _ in results] == [pipes.alone(job) for job in wanted]
        assert [feeder.stats()["failure"] for feeder in feeders] == [None, None]
    assert any("cannot meet other nodes" in str(warning.message) for warning in caught)


@pytest.mark.more
def test_a_member_that_stalls_on_one_node_does_not_stall_the_others_for_ever(tmp_path: Path) -> None:
    held, quick = jobs(2, epochs=(0, 3))
    with ExitStack() as stack:
        feeders = start(stack, tmp_path, 2, design="all", stall_limit_s=3.0, overwrite_released=True)
        batches, over = iter(held.attach(feeders[0].address)), threading.Event()

        def hold() -> list[Any]:
            in_hand = next(batches)
            first = pipes.record(in_hand)
            assert over.wait(pipes.LIMIT_S) and pipes.record(in_hand) == first
            return [first, *pipes.read(batches, held)]

        def run() -> Any:
            result = pipes.shared(quick, feeders[1].address)
            over.set()
            return result

        slow, (records, stats) = pipes.together([hold, run])
        assert (slow, records) == (pipes.alone(held), pipes.alone(quick))
        assert feeders[0].stats()["detached"] == 1
        if not feeders[1].stats()["detached"]:  # on a busy machine the quick one may have been slow, too
            assert stats["private_batches"] == 0


def test_a_node_whose_peers_never_come_begins_by_itself(tmp_path: Path) -> None:
    job = jobs(1)[0]
    peers = Peers(str(tmp_path / "peers"), 1, 2, "lo")
    with Feeder(pipe("numpy"), capacity=64, expect=1, peers=peers, gate_timeout_s=1.0) as feeder:
        records, stats = pipes.shared(job, feeder.address)
        assert records == pipes.alone(job)
        assert stats["private_batches"] == 0
