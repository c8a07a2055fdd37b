"""Consumers of every kind, each exactly once and reproducible: what it reads is what it would read alone.

| what a consumer may do | shown by |
|---|---|
| have another batch size, be one of several ranks, drop last batches | test_core_law: shared_batches_equal |
| be ten times slower than the others | here: ten_times_slower; sent on alone for it: test_core_stall |
| join at the next boundary | test_core_join: a_newcomer_joins, a_member_that_comes_back, a_late_rank |
| join at a given epoch, ahead of the stream or behind | here: an_epoch_ahead; test_core_join: a_reader |
| resume in the middle of an epoch | here: resumed_anywhere; test_loader_state |
| leave at any time, by whatever way, or be killed | test_core_faults: leave_early, killed_consumer; test_chaos |
| be restarted from a checkpoint, under a name that is still there | test_chaos; test_core_faults: of_one_name |
| fork helpers that outlive it | here: forked |
| read another stream of the same pipeline | here: a_second_cohort |
| wait at the start gate, and no longer than its limit | test_core_join: the_gate |
| read resident sets at any pace | here: any_pace; test_core_resident |
| overwrite its batches in place | here: in_place; test_core_ring; all of the above spoil what they get |
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos_plan import data
from core_pipes import (
    LIMIT_S,
    Feeder,
    Job,
    N,
    alone,
    leaves_nothing,  # noqa: F401
    pipe,
    read,
    record,
    shared,
    together,
    wait_until,
)

from pipelines import Batch, Pipeline, attach, resident
from pipelines.ipc.child_processes import child_environment
from pipelines.order.stream import min_capacity

# --- pace ------------------------------------------------------------------------------------------------


def test_one_ten_times_slower_paces_the_others_and_nobody_loses_anything() -> None:
    """Whoever is quick is never further ahead of the slow one than the ring is long."""
    capacity, slow = 24, Job(batch_size=8, epochs=(0, 2), name="slow", pause_s=0.03)
    quick = [Job(batch_size=size, epochs=(0, 2), name=f"quick-{size}") for size in (5, 7)]
    taken = 0

    def train_slowly() -> list[Any]:
        nonlocal taken
        records = []
        for batch in slow.attach(feeder.address):
            taken += len(batch["index"])
            records.append(record(batch))
            time.sleep(slow.pause_s)
        return records

    def follow(job: Job) -> list[Any]:
        records, ahead = [], 0
        for batch in job.attach(feeder.address):
            ahead += len(batch["index"])
            assert ahead <= taken + slow.batch_size + capacity, "it was not paced"
            records.append(record(batch))
        return records

    with Feeder(pipe("numpy"), capacity=capacity, overwrite_released=True, expect=3) as feeder:
        results = together([train_slowly, *(partial(follow, job) for job in quick)])
        stats = feeder.stats()
    assert results == [alone(dataclasses.replace(job, name="")) for job in (slow, *quick)]
    assert stats["detached"] == 0 and stats["prepared"] == 2 * N


def test_resident_sets_are_read_at_any_pace_beside_the_stream() -> None:
    job = Job(epochs=(0, 4))
    still = [record(batch) for batch in pipe("still").loader(9)]
    with Feeder(pipe("numpy"), capacity=16, resident={"valid": pipe("still")}) as feeder:

        def validate(times: int) -> list[Any]:
            held = resident(feeder.address, "valid", pipe("still"))
            half = iter(held.loader(9))
            begun = [spoilt(next(half)) for _ in range(3)]  # goes no further
            whole = [[spoilt(batch) for batch in held.loader(9)] for _ in range(times)]
            half.close()
            return [begun, whole]

        (records, _), *validated = together(
            [partial(shared, job, feeder.address), partial(validate, 1), partial(validate, 10)]
        )
    assert records == alone(job)
    assert validated == [[still[:3], [still] * times] for times in (1, 10)]


def spoilt(batch: Batch) -> list[Any]:
    """The record of a batch, which is then overwritten."""
    seen = record(batch)
    for tensor in batch.values():
        tensor.zero_()
    return seen


# --- where it begins -------------------------------------------------------------------------------------


def test_one_that_begins_an_epoch_ahead_works_alone_until_it_meets_the_stream() -> None:
    """The stream goes twice as fast as the one ahead of it until they have met, whatever else the machine does."""
    ahead, behind = Job(epochs=(2, 12), name="ahead"), Job(epochs=(0, 12), name="behind")
    epoch = -(-N // behind.batch_size)
    read_ahead: list[Any] = []
    with Feeder(pipe("numpy"), capacity=16) as feeder:
        stream = iter(behind.attach(feeder.address))
        read_behind = [record(next(stream))]
        loader = ahead.attach(feeder.address)
        assert not loader.shared, "the stream is two epochs away"

        def go_ahead() -> None:
            for batch in loader:
                read_ahead.append(record(batch))
                wait_until(lambda: loader.shared or len(read_behind) >= 2 * len(read_ahead))

        def follow() -> None:
            for batch in stream:
                read_behind.append(record(batch))
                wait_until(lambda: loader.shared or len(read_behind) <= 2 * len(read_ahead) + epoch)

        together([go_ahead, follow])
    assert read_ahead == alone(ahead) and read_behind == alone(behind)
    assert loader.stats()["private_batches"] > 0 and loader.stats()["shared_batches"] > 0


def test_one_resumed_anywhere_in_a_running_stream_reads_what_was_left() -> None:
    running = Job(batch_size=8, epochs=(0, 4), name="running", pause_s=0.001)
    with Feeder(pipe("numpy"), capacity=40, workers=2) as feeder:
        stream = iter(running.attach(feeder.address))
        begun = [record(next(stream)) for _ in range(8 + 4)]
        places = [(1, 0), (1, 2), (1, 4), (1, 6), (1, 7), (1, 8), (2, 0), (2, 3), (3, 7), (0, 5)]
        resumed = [
            Job(batch_size=8, epochs=(epoch, 4), start_step=step, drop_last=bool(n % 2), name=f"{epoch}-{step}")
            for n, (epoch, step) in enumerate(places)
        ]
        rest, *results = together(
            [
                lambda: [record(batch) for batch in stream],
                *(partial(shared, job, feeder.address) for job in resumed),
            ]
        )
    assert begun + rest == alone(running)
    whole = alone(running)
    for job, place, (records, _) in zip(resumed, places, results, strict=True):
        assert records == alone(dataclasses.replace(job, name="")), job
        left = [each for each in whole if tuple(each[:2]) >= place]
        assert records == [each for each in left if not job.drop_last or each[2] == job.batch_size], job


def test_a_second_cohort_reads_a_stream_of_its_own_at_another_epoch() -> None:
    cohorts = [
        [Job(batch_size=size, epochs=epochs, name=f"{epochs}-{size}") for size in (5, 8)]
        for epochs in ((0, 3), (7, 9))
    ]
    with (
        Feeder(pipe("numpy"), capacity=16, expect=2) as first,
        Feeder(pipe("numpy"), capacity=24, expect=2, workers=2) as second,
    ):
        jobs = [(job, feeder) for cohort, feeder in zip(cohorts, (first, second), strict=True) for job in cohort]
        results = together([partial(shared, job, feeder.address) for job, feeder in jobs])
        prepared = [feeder.stats()["prepared"] for feeder in (first, second)]
    for (job, _), (records, stats) in zip(jobs, results, strict=True):
        assert records == alone(dataclasses.replace(job, name="")) and stats["private_batches"] == 0
    n = len(pipe("numpy"))
    assert prepared == [3 * n, 2 * n], "each cohort's samples are prepared once"


# --- processes that a process forks ----------------------------------------------------------------------

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


class Forking:
    """A feeder or a consumer process that has forked a helper, which outlives it."""

    def __init__(self, what: str, address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKED, address, what],
            stdout=subprocess.PIPE,
            env=child_environment(),
            cwd=Path(__file__).parent,
            text=True,
        )
        assert self.process.stdout is not None
        self.helper, self.worker = map(int, self.process.stdout.readline().split())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert Path(f"/proc/{self.helper}").exists()

    def close(self) -> None:
        os.kill(self.helper, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()


def test_a_feeder_that_has_forked_is_missed_when_it_dies(tmp_path: Path) -> None:
    forking = Forking("feeder", str(tmp_path / "socket"))
    try:
        job = Job(epochs=(0, 9))
        batches = iter(job.attach(str(tmp_path / "socket")))
        begun = [record(next(batches))]
        forking.kill()
        rest = together([lambda: [record(batch) for batch in batches]])[0]
        assert begun + rest == alone(job)
        wait_until(lambda: "Z" in state_of(forking.worker))
    finally:
        forking.close()


def state_of(pid: int) -> str:
    """A process's state as proc(5) has it; Z for one that is no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_a_consumer_that_has_forked_paces_nobody_when_it_dies() -> None:
    with Feeder(pipe("numpy"), capacity=16, expect=2) as feeder:
        job = Job(epochs=(0, 3), name="other")
        other = job.attach(feeder.address)
        forking = Forking("consumer", feeder.address)
        try:
            forking.kill()
            records = together([partial(read, other, job)])[0]
        finally:
            forking.close()
    assert records == alone(Job(epochs=(0, 3)))
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
    command = [sys.executable, "-c", FORKED_READER]
    done = subprocess.run(
        command,
        env=child_environment(),
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        timeout=LIMIT_S,
        check=True,
    )
    assert done.stdout == b"0\n"


# --- writing in place ------------------------------------------------------------------------------------


def wide(n: int = 53) -> Pipeline:
    """Samples of which some fields are views of the ring, some sometimes, some never."""
    return Pipeline(data(n), seed=1)


def by_torch(batch: Batch) -> None:
    for tensor in batch.values():
        tensor.neg_().add_(1) if tensor.dtype != torch.uint8 else tensor.bitwise_not_()
        tensor[..., :1] = 3


def by_numpy(batch: Batch) -> None:
    for tensor in batch.values():
        tensor.numpy()[...] = 7
        tensor.numpy().reshape(-1)[::2] += 1


def by_view(batch: Batch) -> None:
    for tensor in batch.values():
        tensor.detach().view(-1)[-1:].fill_(9)  # the very last element alone
        tensor.view(-1)[:1].mul_(0).sub_(4)  # and the very first


@pytest.mark.parametrize(
    ("write", "capacity"),
    [(by_torch, 32), (by_numpy, min_capacity(13) + 4), (by_view, 32)],
    ids=["mapped twice in a row", "not of whole pages", "single elements"],
)
def test_who_writes_in_place_changes_nothing_for_anybody_where_a_batch_wraps_too(
    write: Any, capacity: int
) -> None:
    def write_all(name: str) -> tuple[list[Any], dict[str, Any]]:
        loader = attach(feeder.address, wide(), 13, range(6), name=name)
        records = []
        for batch in loader:
            records.append(record(batch))
            if capacity == 32:
                assert batch["image"].untyped_storage().nbytes() == batch["image"].nbytes, "it is no view"
            before = {field: tensor.data_ptr() for field, tensor in batch.items()}
            write(batch)
            assert before == {field: tensor.data_ptr() for field, tensor in batch.items()}
        return records, loader.stats()

    def look(name: str, batch_size: int) -> tuple[list[Any], dict[str, Any]]:
        loader = attach(feeder.address, wide(), batch_size, range(6), name=name)
        return [record(batch) for batch in loader], loader.stats()

    with Feeder(wide(), capacity=capacity, expect=4, overwrite_released=True) as feeder:
        results = together(
            [
                partial(write_all, "writer"),
                partial(write_all, "other writer"),
                partial(look, "reader", 13),
                partial(look, "by eights", 8),
            ]
        )
    expected = [[record(batch) for batch in wide().loader(size, range(6))] for size in (13, 8)]
    assert [records for records, _ in results] == [expected[0]] * 3 + [expected[1]]
    assert all(stats["private_batches"] == 0 for _, stats in results)


# --- pauses ----------------------------------------------------------------------------------------------
