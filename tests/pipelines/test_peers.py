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

import pytest
from core_pipes import (
    Feeder,
    Job,
    N,
    alone,
    check_until,
    leaves_nothing,  # noqa: F401
    pipe,
    read,
    record,
    shared,
    together,
    until,
    wait_until,
)

from pipelines import Peers
from pipelines.feeder import process as feed
from pipelines.multinode.link import LinkProcess


def start(stack: ExitStack, directory: Path, nodes: int, kind: str = "numpy", **options: Any) -> list[Feeder]:
    """Feeders of so many nodes, for a member each, in this process."""
    # Readers wait for the first group, however long a busy machine takes to load torch.
    common = {"capacity": 64, "expect": 1, "gate_timeout_s": 600.0, **options}
    peers = [Peers(str(directory / "peers"), i, nodes, "lo") for i in range(nodes)]
    feeders = [Feeder(pipe(kind), peers=each, **common) for each in peers]
    for feeder in feeders:
        stack.callback(feeder.close)
    return feeders


def jobs(nodes: int, **options: Any) -> list[Job]:
    return [Job(batch_size=5 + i, name=f"member-{i}", **options) for i in range(nodes)]


def nodes_of(*feeders: Feeder) -> list[list[int]]:
    return [feeder.stats()["group"]["nodes"] for feeder in feeders]


def sent_bytes(feeder: Feeder) -> int:
    return int(feeder.stats()["group"]["sent_bytes"])


def check(found: list[tuple[list[Any], dict[str, Any]]], wanted: list[Job]) -> None:
    for (records, _), job in zip(found, wanted, strict=True):
        assert records == alone(job)


def of_one_pace(nodes: int) -> list[Job]:
    """Jobs that go on for long, none faster than another: only nodes that are near each other meet anew."""
    return [replace(job, epochs=(0, 99), pause_s=0.006 * job.batch_size) for job in jobs(nodes)]


@pytest.mark.parametrize(
    ("design", "preparers"),
    [
        pytest.param("all", None, marks=pytest.mark.more),
        pytest.param("multi", 2, marks=pytest.mark.more),
        pytest.param("single", 1, marks=pytest.mark.more),
    ],
    ids=lambda v: str(v),
)
def test_what_the_nodes_prepare_together_is_what_each_would_alone(
    tmp_path: Path, design: str, preparers: int | None
) -> None:
    wanted = jobs(3)
    with ExitStack() as stack:
        feeders = start(stack, tmp_path, 3, design=design, preparers=preparers, overwrite_released=True)
        pairs = zip(wanted, feeders, strict=True)
        found = together([functools.partial(shared, job, feeder.address) for job, feeder in pairs])
        check(found, wanted)
        assert all(stats["private_batches"] == 0 for _, stats in found)
        sample_bytes = 3 * 7 * 4 + 5 + 1 + 8 + 8 + 8 + 1  # image, mask, flag, label, draw, index, _ok
        # What has come is read at once; that it is sent is known a moment later.
        wait_until(lambda: sum(sent_bytes(each) for each in feeders) >= 2 * 2 * N * sample_bytes)
        stats = [feeder.stats() for feeder in feeders]
    prepared = [each["prepared"] for each in stats]
    assert sum(prepared) == 2 * N, "each sample once over all nodes"
    assert sum(bool(count) for count in prepared) == (preparers or 3)
    assert [each["group"]["received"] for each in stats] == [2 * N - count for count in prepared]
    assert sum(each["group"]["sent_bytes"] for each in stats) == 2 * 2 * N * sample_bytes
    assert not os.listdir(tmp_path / "peers")


@pytest.mark.more
def test_a_feeder_that_dies_takes_nobody_with_it_and_its_successor_is_taken_in(tmp_path: Path) -> None:
    wanted, over = of_one_pace(3), threading.Event()
    peers = [Peers(str(tmp_path / "peers"), i, 3, "lo") for i in range(3)]
    address = str(tmp_path / "s" / "socket")
    options: dict[str, Any] = {"capacity": 128, "expect": 1, "design": "all"}
    with ExitStack() as stack:
        killed = feed.spawn(pipe("numpy"), peers=peers[0], address=address, **options)
        stack.callback(killed.stop)
        others = [Feeder(pipe("numpy"), peers=peer, **options) for peer in peers[1:]]
        for feeder in others:
            stack.callback(feeder.close)

        def fault() -> None:
            wait_until(lambda: others[0].stats()["consumed"] > 100)
            assert others[0].stats()["group"]["nodes"] == [0, 1, 2]
            killed.kill()
            wait_until(lambda: nodes_of(*others) == [[1, 2], [1, 2]])
            killed.stop()
            successor = feed.spawn(pipe("numpy"), peers=peers[0], address=address, replacement=True, **options)
            stack.callback(successor.stop)
            wait_until(lambda: nodes_of(*others) == [[0, 1, 2], [0, 1, 2]])
            over.set()

        addresses = [address, *(feeder.address for feeder in others)]
        reading = [functools.partial(until, over, *pair) for pair in zip(wanted, addresses, strict=True)]
        *found, _ = together([*reading, fault])
        check_until(found, wanted)
        assert found[1][1]["private_batches"] == found[2][1]["private_batches"] == 0
        assert found[0][1]["private_batches"] > 0


@pytest.mark.more
def test_a_link_that_dies_is_replaced_and_all_nodes_meet_again(tmp_path: Path) -> None:
    wanted, over = of_one_pace(3), threading.Event()
    with ExitStack() as stack:
        feeders = start(stack, tmp_path, 3, design="all", capacity=128)

        def fault() -> None:
            for number in (0, 1):
                wait_until(lambda: nodes_of(*feeders) == [[0, 1, 2]] * 3)
                os.kill(feeders[number].stats()["group"]["pid"], signal.SIGKILL)
                wait_until(lambda: nodes_of(*feeders) != [[0, 1, 2]] * 3)
            wait_until(lambda: nodes_of(*feeders) == [[0, 1, 2]] * 3)
            over.set()

        pairs = zip(wanted, feeders, strict=True)
        *found, _ = together([*(functools.partial(until, over, job, f.address) for job, f in pairs), fault])
        check_until(found, wanted)
        assert all(stats["private_batches"] == 0 for _, stats in found)
        assert all(feeder.stats()["group"]["lost_groups"] >= 2 for feeder in feeders)


def test_a_link_that_cannot_start_is_tried_again_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[float] = []
    start_link = LinkProcess.start

    def start_and_note(link: LinkProcess) -> None:
        started.append(time.monotonic())
        start_link(link)

    monkeypatch.setattr(LinkProcess, "start", start_and_note)
    monkeypatch.setattr("pipelines.multinode.link.sys", SimpleNamespace(executable="/bin/false"))
    with Feeder(pipe("numpy"), peers=Peers(str(tmp_path / "peers"), 0, 2)) as feeder:
        wait_until(lambda: len(started) >= 2)
        assert feeder.stats()["failure"] is None
    assert started[1] - started[0] >= 2


def test_nodes_that_lose_the_directory_or_were_given_different_designs_work_by_themselves(tmp_path: Path) -> None:
    wanted = jobs(2)
    with ExitStack() as stack:
        said = stack.enter_context(warnings.catch_warnings(record=True))
        peers = [Peers(str(tmp_path / "peers"), i, 2) for i in range(2)]
        options: dict[str, Any] = {"capacity": 64, "expect": 1, "gate_timeout_s": 3.0}
        designs = zip(peers, ("all", "single"), strict=True)
        feeders = [Feeder(pipe("numpy"), peers=each, design=design, **options) for each, design in designs]
        for feeder in feeders:
            stack.callback(feeder.close)
        wait_until(lambda: any("or design" in str(warning.message) for warning in said))
        shutil.rmtree(tmp_path / "peers")
        pairs = zip(wanted, feeders, strict=True)
        check(together([functools.partial(shared, job, feeder.address) for job, feeder in pairs]), wanted)
        assert [feeder.stats()["failure"] for feeder in feeders] == [None, None]
    assert any("cannot meet other nodes" in str(warning.message) for warning in said)


@pytest.mark.more
def test_a_member_that_stalls_on_one_node_does_not_stall_the_others_for_ever(tmp_path: Path) -> None:
    held, quick = jobs(2, epochs=(0, 3))
    with ExitStack() as stack:
        feeders = start(stack, tmp_path, 2, design="all", stall_limit_s=3.0, overwrite_released=True)
        batches = iter(held.attach(feeders[0].address))
        finished: list[bool] = []

        def hold() -> list[Any]:
            in_hand = next(batches)
            first = record(in_hand)
            wait_until(lambda: finished)
            assert record(in_hand) == first
            return [first, *read(batches, held)]

        def run() -> Any:
            result = shared(quick, feeders[1].address)
            finished.append(True)
            return result

        slow, (records, stats) = together([hold, run])
        assert slow == alone(held)
        assert records == alone(quick)
        assert feeders[0].stats()["detached"] == 1
        if not feeders[1].stats()["detached"]:  # on a busy machine the quick one may have been slow, too
            assert stats["private_batches"] == 0


def test_a_node_whose_peers_never_come_begins_by_itself(tmp_path: Path) -> None:
    job = jobs(1)[0]
    peers = Peers(str(tmp_path / "peers"), 1, 2, "lo")
    with Feeder(pipe("numpy"), capacity=64, expect=1, peers=peers, gate_timeout_s=1.0) as feeder:
        records, stats = shared(job, feeder.address)
        assert records == alone(job)
        assert stats["private_batches"] == 0
