"""Consumers that begin ahead of the stream, that fork, and that write into their batches."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import core_pipes as pipes
import pytest
import torch
from core_pipes import Feeder, Job, N, leaves_nothing, pipe  # noqa: F401
from forked_children import data

from pipelines import Batch, Pipeline, attach
from pipelines.feeder.consumers import Consumers
from pipelines.feeder.hello import Consumer
from pipelines.ipc.child_processes import child_environment
from pipelines.order.stream import min_capacity


def test_one_that_begins_an_epoch_ahead_works_alone_until_it_meets_the_stream() -> None:
    """The stream goes twice as fast as the one ahead of it until they have met, whatever else the machine does."""
    ahead, behind = Job(epochs=(2, 12), name="ahead"), Job(epochs=(0, 12), name="behind")
    epoch = -(-N // behind.batch_size)
    read_ahead: list[Any] = []
    with Feeder(pipe("numpy"), capacity=16) as feeder:
        stream = iter(behind.attach(feeder.address))
        read_behind = [pipes.record(next(stream))]
        loader = ahead.attach(feeder.address)
        assert not loader.shared, "the stream is two epochs away"

        def go_ahead() -> None:
            for batch in loader:
                read_ahead.append(pipes.record(batch))
                pipes.wait_until(lambda: loader.shared or len(read_behind) >= 2 * len(read_ahead))

        def follow() -> None:
            for batch in stream:
                read_behind.append(pipes.record(batch))
                pipes.wait_until(lambda: loader.shared or len(read_behind) <= 2 * len(read_ahead) + epoch)

        pipes.together([go_ahead, follow])
    assert read_ahead == pipes.alone(ahead) and read_behind == pipes.alone(behind)
    assert loader.stats()["private_batches"] > 0 and loader.stats()["shared_batches"] > 0


FORKED = """if True:
    import os, sys, time
    from core_pipes import pipe
    from pipelines import Feeder, attach
    address, what = sys.argv[1:]
    if what == "feeder":
        held = Feeder(pipe("numpy"), address=address, capacity=16)
        pid = held.stats()["workers"][0]
    else:
        held = iter(attach(address, pipe("numpy"), 8, range(99), name="forks"))
        next(held)
        pid = 0
    if (helper := os.fork()) == 0:
        time.sleep(900)
        os._exit(0)
    print(helper, pid, flush=True)
    time.sleep(900)
"""


@contextlib.contextmanager
def forking(what: str, address: str) -> Iterator[tuple[int, Callable[[], None]]]:
    """A worker of a feeder, or 0, and what kills a feeder or a consumer whose forked helper outlives it."""
    command, here = [sys.executable, "-c", FORKED, address, what], Path(__file__).parent
    options: dict[str, Any] = {"env": child_environment(), "cwd": here, "text": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as process:
        assert process.stdout is not None
        helper, worker = map(int, process.stdout.readline().split())

        def kill() -> None:
            process.kill()
            process.wait()
            assert Path(f"/proc/{helper}").exists()

        try:
            yield worker, kill
        finally:
            os.kill(helper, signal.SIGKILL)
            process.kill()


def test_a_feeder_that_has_forked_is_missed_when_it_dies(tmp_path: Path) -> None:
    job, address = Job(epochs=(0, 9)), str(tmp_path / "socket")
    with forking("feeder", address) as (worker, kill):
        batches = iter(job.attach(address))
        begun = [pipes.record(next(batches))]
        kill()
        assert begun + pipes.together([lambda: [pipes.record(batch) for batch in batches]])[0] == pipes.alone(job)
        pipes.wait_until(lambda: pipes.gone(worker))


def test_a_consumer_that_has_forked_paces_nobody_when_it_dies() -> None:
    with Feeder(pipe("numpy"), capacity=16, expect=2) as feeder:
        job = Job(epochs=(0, 3), name="other")
        other = job.attach(feeder.address)
        with forking("consumer", feeder.address) as (_, kill):
            kill()
            records = pipes.together([partial(pipes.read, other, job)])[0]
    assert records == pipes.alone(Job(epochs=(0, 3)))
    assert other.stats()["private_batches"] == 0


FORKED_READER = """if True:
    import json, os
    from core_pipes import pipe, record, spoil
    held = pipe("still").resident()
    def read():
        for batch in held.loader(50):
            yield record(batch)
            spoil(batch)
    first = list(read())
    if (pid := os.fork()) == 0:
        os._exit(0 if [list(read()), list(read())] == [first, first] else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_what_a_forked_reader_wrote_is_gone_when_it_reads_again() -> None:
    command, here = [sys.executable, "-c", FORKED_READER], Path(__file__).parent
    output = subprocess.check_output(command, env=child_environment(), cwd=here, timeout=pipes.LIMIT_S)
    assert output == b"0\n"


def overwrite(batch: Batch) -> None:
    for tensor in batch.values():
        tensor.neg_().add_(1) if tensor.dtype != torch.uint8 else tensor.bitwise_not_()
        tensor.detach().view(-1)[-1:].fill_(9)  # the very last element
        tensor.view(-1)[:1].mul_(0).sub_(4)  # and the very first


@pytest.mark.parametrize("capacity", [min_capacity(13) + 4, 32], ids=["not of whole pages", "mapped twice"])
def test_who_writes_in_place_changes_nothing_for_anybody_where_a_batch_wraps_too(capacity: int) -> None:
    wide = Pipeline(data(53), seed=1)  # fields that are views of the ring, that sometimes are, and that never are

    def read_through(name: str, batch_size: int, writes: bool = False) -> tuple[list[Any], dict[str, Any]]:
        loader, records = attach(feeder.address, wide, batch_size, range(6), name=name), []
        for batch in loader:
            records.append(pipes.record(batch))
            if writes:
                assert capacity != 32 or batch["image"].untyped_storage().nbytes() == batch["image"].nbytes
                before = {field: tensor.data_ptr() for field, tensor in batch.items()}
                overwrite(batch)
                assert before == {field: tensor.data_ptr() for field, tensor in batch.items()}
        return records, loader.stats()

    readers = [("writer", 13, True), ("other writer", 13, True), ("reader", 13), ("by eights", 8)]
    with Feeder(wide, capacity=capacity, expect=4, overwrite_released=True) as feeder:
        results = pipes.together([partial(read_through, *reader) for reader in readers])
    expected = [[pipes.record(batch) for batch in wide.loader(size, range(6))] for size in (13, 8)]
    assert [records for records, _ in results] == [expected[0]] * 3 + [expected[1]]
    assert all(stats["private_batches"] == 0 for _, stats in results)


def test_what_both_ranks_of_a_member_have_released_counts_once() -> None:
    jobs = [Job(name="wide", rank=rank, world=2) for rank in range(2)]
    with Feeder(pipe("numpy"), capacity=16) as feeder:
        loaders = [job.attach(feeder.address) for job in jobs]
        pipes.together([partial(pipes.read, *each) for each in zip(loaders, jobs, strict=True)])
        pipes.wait_until(lambda: feeder.stats()["members"] == 0)
        assert feeder.stats()["consumed"] == 2 * N


def test_a_slow_reader_that_still_releases_samples_is_not_detached() -> None:
    with socket.socket() as connection:
        slow, waiting = (Consumer(connection, want=want, words=memoryview(b"")) for want in (0, 9))
    stream = SimpleNamespace(head=8, ready=8, blocking_readers=lambda: [slow])
    served: Any = SimpleNamespace(_stream=stream, _all=[slow, waiting], _admitted=lambda: [slow, waiting])
    served._waiting_since = slow.last_heard - 60.0
    assert Consumers.find_stalled(served, 30.0)[0] == []
    slow.last_heard -= 60.0
    assert Consumers.find_stalled(served, 30.0)[0] == [slow]
