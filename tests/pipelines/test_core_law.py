"""The law: a batch is a function. What is shared equals, to the last bit, what each prepares alone."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
from core_pipes import (
    Child,
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
)

from pipelines import Loader, PipelineError, attach
from pipelines.loader.batch import ReadRange
from pipelines.order.stream import min_capacity


def crowd(kind: str) -> list[Job]:
    """Members of many kinds: batch sizes, ranks, dropped last batches, resumes; each spoils what it got."""
    return [
        Job(kind=kind, batch_size=16, epochs=(0, 3)),
        *(Job(kind=kind, batch_size=7, epochs=(0, 3), rank=r, world=2) for r in range(2)),
        *(Job(kind=kind, batch_size=25, epochs=(0, 3), rank=r, world=3, drop_last=True) for r in range(3)),
        Job(kind=kind, batch_size=1, epochs=(0, 2)),
        Job(kind=kind, batch_size=10, epochs=(0, 3), start_step=4),
    ]


def check_epochs(jobs: list[Job], results: list[list[Any]]) -> None:
    """In each epoch the ranks together have each sample once, except those left out on purpose."""
    for key in {dataclasses.replace(job, rank=0) for job in jobs}:
        for epoch in range(*key.epochs):
            steps = ReadRange(N, key.batch_size, range(1), drop_last=key.drop_last).steps
            left_out = key.start_step * key.batch_size if epoch == key.epochs[0] else 0
            ranks = [r for job, r in zip(jobs, results, strict=True) if dataclasses.replace(job, rank=0) == key]
            seen = [i for records in ranks for e, _, _, index, _ in records if e == epoch for i in index]
            assert len(seen) == len(set(seen)), "a sample came twice"
            if key.kind != "skip":
                assert len(seen) == max(0, min(N, steps * key.batch_size) - left_out), "a sample did not come"


@pytest.mark.filterwarnings("ignore:left out")
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("torch", 2),
        ("skip", 3),
        *(pytest.param(*each, marks=pytest.mark.more) for each in (("plain", 1), ("numpy", 2))),
    ],
)
def test_shared_batches_equal_private_ones_for_everyone(kind: str, workers: int) -> None:
    jobs = crowd(kind)
    slow = Job(kind=kind, batch_size=16, epochs=(0, 3), name="slow", pause_s=0.02)
    expected = [alone(job) for job in [*jobs, dataclasses.replace(slow, name="")]]
    capacity = min_capacity(25, None)
    names = 2 + sum(job.rank == 0 for job in jobs)
    with Feeder(pipe(kind), workers=workers, capacity=capacity, expect=names) as feeder:
        child = Child(feeder.address, slow, dataclasses.replace(jobs[0], name="other process"))
        results = together([partial(shared, job, feeder.address) for job in jobs])
        others = child.results()
        prepared = feeder.stats()["prepared"]
    assert [records for records, _ in [*results, *others]] == [*expected, expected[0]]
    assert all(counts["private_batches"] == 0 for _, counts in [*results, *others])
    left_out = results[0][1]["skipped"] // 3
    assert prepared == 3 * (N - left_out) and (left_out > 0) == (kind == "skip"), "each is prepared once for all"
    check_epochs(jobs, [records for records, _ in results])


@pytest.mark.parametrize(
    ("batch_size", "capacity", "block"),
    [
        *(
            (size, min_capacity(min(size, N), None), None) for size in (N - 1, N, 3 * N)
        ),  # the smallest that is taken
        *((1, 2, 1), (8, 11, 3), (8, 700, 50)),
    ],
)
def test_neither_the_ring_nor_its_blocks_change_a_batch(batch_size: int, capacity: int, block: int | None) -> None:
    job = Job(batch_size=batch_size, epochs=(1, 3))
    with Feeder(pipe("numpy"), capacity=capacity, block=block, workers=2) as feeder:
        records, counts = shared(job, feeder.address)
    assert records == alone(job) and counts["private_batches"] == 0


def test_a_copied_batch_is_the_callers_own_and_stays_valid() -> None:
    with Feeder(pipe("numpy"), capacity=16) as feeder:
        kept = list(attach(feeder.address, pipe("numpy"), 8, range(2), copy=True))
    assert [record(b) for b in kept] == alone(Job())


def test_an_epoch_read_again_is_the_same_epoch() -> None:
    job = Job(batch_size=8, epochs=(0, 2))
    steps = -(-N // 8)
    with Feeder(pipe("numpy"), capacity=16) as feeder:
        loader = job.attach(feeder.address)
        epochs = loader.epochs()
        first = next(epochs)
        assert len(first) == steps and first.epoch == 0
        beginning = [record(batch) for _, batch in zip(range(5), first, strict=False)]
        again = read(first, job)
        assert [*again, *read(next(epochs), job)] == alone(job)
        assert beginning == again[:5]
        assert list(epochs) == []
        # From the beginning once more, by another loader: the stream goes back for its only reader.
        loader.close()
        assert read(job.attach(feeder.address), job) == alone(job)


def test_each_pass_over_a_loader_without_epochs_is_the_next_epoch() -> None:
    def passes(loader: Loader) -> list[Any]:
        seen = []
        for _ in range(3):
            records = [record(batch) for batch in loader]
            assert len(loader) == len(records)
            seen += records
        return seen

    def resumed(loader: Loader) -> list[Any]:
        assert len(loader) == -(-N // 8) - 4
        next(iter(loader))  # a pass that is left is a pass, too
        return [record(batch) for epoch in loader.epochs() for batch in epoch]

    wanted = alone(Job(batch_size=8, epochs=(0, 3)))
    private = pipe("numpy").loader(8)
    assert passes(private) == wanted and private.stats()["batches"] == len(wanted)
    second = [record for record in wanted if record[0] == 1]
    assert resumed(pipe("numpy").loader(8, start_step=4)) == second
    with Feeder(pipe("numpy"), capacity=16, expect=2) as feeder:
        loaders = [attach(feeder.address, pipe("numpy"), 8, name=f"{number}") for number in range(2)]
        assert together([partial(passes, loader) for loader in loaders]) == [wanted] * 2
        # Who comes at the end of an epoch finds the stream there, and goes on in it.
        assert loaders[0].stats()["samples"] == 3 * N
        late = attach(feeder.address, pipe("numpy"), 8)
        assert {record[0] for record in passes(late)} == {3, 4, 5}
        assert late.stats()["private_batches"] == 0


@pytest.mark.parametrize("epochs", [range(2, 4), 2])
def test_a_second_pass_over_epochs_that_were_asked_for_is_refused(epochs: Any) -> None:
    def twice(loader: Loader) -> None:
        assert len(list(loader)) == len(loader) == 2 * -(-N // 8) - start_step
        for again in (iter, list, Loader.epochs):
            with pytest.raises(PipelineError, match=r"second pass .* epochs \d to \d .* leave epochs= out"):
                again(loader)

    start_step = 3
    twice(pipe("numpy").loader(8, epochs, start_step=3))
    with Feeder(pipe("numpy"), capacity=16) as feeder:
        twice(attach(feeder.address, pipe("numpy"), 8, epochs, start_step=3))


def test_epochs_may_be_left_early_or_passed_over() -> None:
    with Feeder(pipe("numpy"), capacity=16) as feeder:
        loader = Job(epochs=(0, 4)).attach(feeder.address)
        got = []
        for epoch in loader.epochs():
            if epoch.epoch == 1:
                continue
            for batch in epoch:
                got.append(record(batch))
                if batch.step == 2:
                    break
    expected = [r for r in alone(Job(epochs=(0, 4))) if r[0] != 1 and r[1] <= 2]
    assert got == expected and loader.stats()["private_batches"] == 0


def test_an_empty_rank_still_gets_its_batches() -> None:
    jobs = [Job(batch_size=2, epochs=(0, 1), rank=r, world=3) for r in range(3)]
    with Feeder(pipe("numpy"), capacity=16) as feeder:
        results = together([partial(shared, job, feeder.address) for job in jobs])
    assert [records for records, _ in results] == [alone(job) for job in jobs]
    assert [len(index) for *_, index, _ in results[0][0]][:3] == [0, 0, 0]
    assert {size for _, _, size, _, _ in results[0][0]} == {2, 1}


def test_a_batch_knows_its_place() -> None:
    loader = Loader(pipe("numpy"), ReadRange(N, 8, range(2, 3), rank=1, world=2))
    batch = list(loader)[-1]
    assert (batch.epoch, batch.step, batch.global_size) == (2, N // 8, N % 8)
    assert batch.to("cpu").global_size == N % 8
    assert loader.steps_per_epoch == -(-N // 8)
