"""Preparation workers that are threads of one process: the same batches, and a death that loses only time."""

import os
import signal
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from core_pipes import Feeder, Job, alone, data, gone, leaves_nothing, pipe, shared, together, wait_until  # noqa: F401

from pipelines import Pipeline, PipelineError

JOBS = [Job(batch_size=8, name="a"), Job(batch_size=5, name="b", rank=1, world=2)]


class Counting:
    """Keeps a count from call to call, which two threads at a time would spoil; says who it is."""

    def __init__(self) -> None:
        self.inside = 0

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.inside += 1
        alone_here = self.inside == 1
        np.linalg.svd(np.ones((60, 60)))  # lets other threads run
        self.inside -= 1
        where = threading.get_ident() % (1 << 31)
        return {**sample, "alone": alone_here, "thread": where, "pid": os.getpid()}


@pytest.mark.parametrize("kind", ["numpy", "skip"])
def test_batches_from_threads_equal_those_prepared_alone(kind: str) -> None:
    jobs = [Job(kind=kind, batch_size=job.batch_size, name=job.name) for job in JOBS]
    with Feeder(pipe(kind), workers=3, threads=True, capacity=32, expect=2) as feeder:
        results = together([partial(shared, job, feeder.address) for job in jobs])
        assert len(feeder.stats()["workers"]) == 1
    assert [records for records, _ in results] == [alone(job) for job in jobs]
    assert all(stats["private_batches"] == 0 for _, stats in results)


def test_each_thread_has_stages_of_its_own() -> None:
    counting = Pipeline(data()).map(Counting(), id="counting")
    with Feeder(counting, workers=3, threads=True, capacity=32) as feeder:
        from pipelines import attach

        batches = [batch.copy() for batch in attach(feeder.address, counting, 8, 4, copy=True)]
        (pid,) = feeder.stats()["workers"]
        assert feeder.stats()["cpu_s"]["prepare"] > 0
    assert all(batch["alone"].all() and (batch["pid"] == pid).all() for batch in batches)
    assert len({int(thread) for batch in batches for thread in batch["thread"]}) == 3


def test_killing_the_threads_process_loses_only_time() -> None:
    jobs = [Job(kind="slow", name="a"), Job(kind="slow", name="b", batch_size=13)]
    with Feeder(pipe("slow"), workers=2, threads=True, capacity=24, expect=2) as feeder:
        killed: list[int] = []

        def kill() -> None:
            for done in (8, 40):
                wait_until(lambda done=done: feeder.stats()["consumed"] > done)
                (pid,) = feeder.stats()["workers"]
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                wait_until(lambda: feeder.stats()["restarts"] == len(killed))

        results = together([kill, *(partial(shared, job, feeder.address) for job in jobs)])[1:]
        assert feeder.stats()["failure"] is None
        assert len(feeder.stats()["workers"]) == 1
    assert [records for records, _ in results] == [alone(job) for job in jobs]
    assert all(stats["private_batches"] == 0 for _, stats in results)
    assert all(gone(pid) for pid in killed)


def test_threads_are_refused_where_a_stage_draws_from_torchs_one_generator() -> None:
    with pytest.raises(
        PipelineError, match=r"dropped_pixels\('image'\) draws from torch's generator.*threads=False"
    ):
        Feeder(pipe("torch"), workers=2, threads=True)
