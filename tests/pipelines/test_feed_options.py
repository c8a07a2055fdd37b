"""What `spawn` takes is what `Feeder` takes."""

from __future__ import annotations

import functools
import io
import os
import tarfile
import threading
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil
import pytest
from core_pipes import N, leaves_nothing, pipe  # noqa: F401

from pipelines import Pipeline, attach, resident, sources, stages
from pipelines.feeder.process import spawn


def test_an_option_that_a_feeder_does_not_have_is_refused_before_anything_starts() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'worker'"):
        spawn(pipe("plain"), worker=2)  # type: ignore[call-arg]


def begin_thread(sample: dict[str, Any]) -> dict[str, Any]:
    if not _thread:
        _thread.append(threading.Thread(target=threading.Event().wait, daemon=True))
        _thread[0].start()
    return sample


_thread: list[threading.Thread] = []


@functools.cache
def open_table() -> Any:
    return open(os.environ["TABLE"], "rb", buffering=0)


def look_up(sample: dict[str, Any]) -> dict[str, Any]:
    file = open_table()
    file.seek(4 * int(sample["label"]))
    time.sleep(0.001)
    return {**sample, "found": np.int64(int.from_bytes(file.read(4), "little"))}


def test_workers_have_their_own_positions_in_a_file_that_a_stage_keeps_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table").write_bytes(np.arange(1000, dtype="<u4").tobytes())
    monkeypatch.setenv("TABLE", str(tmp_path / "table"))
    pipeline = pipe("plain").map(look_up, id="look up")
    process = spawn(pipeline, block=4, workers=4)
    try:
        for batch in attach(process.address, pipeline, 8, 4):
            assert batch["found"].tolist() == batch["label"].tolist()
        workers = psutil.Process(process.pid).children()
        assert all("pipelines.workers.worker_main" in worker.cmdline() for worker in workers)
    finally:
        process.stop()


def test_files_of_a_source_that_forks_can_share_keep_no_worker_from_being_forked(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "rows.tar", "w") as tar:
        for number in range(64):
            member = tarfile.TarInfo(f"{number}.cls")
            member.size = len(encoded := b"%d" % number)
            tar.addfile(member, io.BytesIO(encoded))
    part, _ = sources.tar(str(tmp_path / "rows.tar")).split(0.5, seed=0)
    pipeline = Pipeline(part, seed=0).map(stages.binary("cls", most_bytes=8)).map(stages.drop("key"))
    process = spawn(pipeline, block=4, workers=2)
    try:
        assert sum(len(batch["index"]) for batch in attach(process.address, pipeline, 8, 2)) == 64
        workers = psutil.Process(process.pid).children()
        assert workers and not any("pipelines.workers.worker_main" in worker.cmdline() for worker in workers)
    finally:
        process.stop()


def test_workers_are_not_forked_from_a_feeders_process_in_which_a_stage_has_begun_a_thread() -> None:
    pipeline = pipe("plain").map(begin_thread, id="thread")
    process = spawn(pipeline, block=8, workers=2)
    try:
        assert sum(len(batch["index"]) for batch in attach(process.address, pipeline, 8, 1)) == N
        workers = psutil.Process(process.pid).children()
        assert len(workers) == 2
        assert all("pipelines.workers.worker_main" in worker.cmdline() for worker in workers)
    finally:
        process.stop()


def test_workers_are_forked_from_the_feeders_process_which_any_mapping_of_resident_sets_reaches() -> None:
    process = spawn(pipe("plain"), resident=MappingProxyType({"valid": pipe("still")}), block=8, workers=2)
    try:
        batches = resident(process.address, "valid", pipe("still"))
        assert sum(len(batch["index"]) for batch in batches.loader(8)) == N
        assert len(list(attach(process.address, pipe("plain"), 8))) == -(-N // 8)
        workers = psutil.Process(process.pid).children()
        assert len(workers) == 2
        assert not any("pipelines.workers.worker_main" in worker.cmdline() for worker in workers)
    finally:
        process.stop()
