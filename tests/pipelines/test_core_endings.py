"""Preparation workers end when they have to, whatever their stages have started."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from core_pipes import Feeder, gone, leaves_nothing, wait_until  # noqa: F401

from pipelines import Pipeline, attach, sources
from pipelines.feeder.process import spawn

N = 48


def with_a_thread(sample: dict[str, Any]) -> dict[str, Any]:
    """Starts in a worker a thread that an interpreter waits for at its end."""
    if sys.argv[0].endswith("worker_main.py") and sample["x"] in (0, 1):
        threading.Thread(target=time.sleep, args=(1e6,)).start()
    return sample


def short_of_descriptors_once(sample: dict[str, Any]) -> dict[str, Any]:
    """What ends a worker: nothing is wrong with the record."""
    path = Path(os.environ["ONCE"])
    if sample["x"] == 17 and not path.exists():
        path.touch()
        raise OSError(errno.EMFILE, "too many open files")
    return sample


def numbers() -> Pipeline:
    return Pipeline(sources.arrays(x=np.arange(N)), seed=0, on_error="skip", max_skipped=1.0).map(with_a_thread)


@pytest.mark.parametrize("threads", [False, True])
def test_a_worker_that_fails_is_replaced_though_a_stage_has_started_threads(
    threads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    pipeline = numbers().map(short_of_descriptors_once)
    with Feeder(pipeline, capacity=16, block=4, workers=2, threads=threads) as feeder:
        before = feeder.stats()["workers"]
        loader = attach(feeder.address, pipeline, 8, range(2))
        read = [int(x) for batch in loader for x in batch["x"]]
        assert sorted(read) == sorted([*range(N), *range(N)])
        stats = feeder.stats()
    assert stats["restarts"] == 1 and stats["failure"] is None
    assert any(gone(pid) for pid in before)


@pytest.mark.parametrize("threads", [False, True])
def test_workers_end_with_a_killed_feeder_though_a_stage_has_started_threads(threads: bool) -> None:
    process = spawn(numbers(), capacity=16, workers=2, threads=threads)
    try:
        assert len(list(attach(process.address, numbers(), 8, range(1)))) == N // 8
        workers = [child.pid for child in psutil.Process(process.pid).children()]
        assert len(workers) == (1 if threads else 2)
    finally:
        process.kill()
        process.stop()
    wait_until(lambda: all(map(gone, workers)))
