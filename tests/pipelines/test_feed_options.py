"""Workers with positions in files, threads and settings of libraries of their own, and what ends them."""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil
import pytest
from core_pipes import Feeder, N, gone, leaves_nothing, pipe, wait_until  # noqa: F401
from kit.once import is_first
from PIL import ImageFile

from pipelines import Pipeline, attach, resident, sources, stages
from pipelines.environment.library_settings import apply_settings, find_settings, keep_settings
from pipelines.feeder.process import spawn
from pipelines.ipc import memory_pickle
from pipelines.ipc.child_processes import child_environment


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


def read_by_workers(pipeline: Pipeline, epochs: int, workers: int) -> tuple[list[Any], list[bool]]:
    """The batches that a feeder's workers prepare, and of each of these whether it was forked from the feeder."""
    process = spawn(pipeline, block=4, workers=workers)
    try:
        batches = list(attach(process.address, pipeline, 8, epochs, copy=True))
        children = psutil.Process(process.pid).children()
        return batches, ["pipelines.workers.worker_main" not in child.cmdline() for child in children]
    finally:
        process.stop()


def test_workers_have_their_own_positions_in_a_file_that_a_stage_keeps_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table").write_bytes(np.arange(1000, dtype="<u4").tobytes())
    monkeypatch.setenv("TABLE", str(tmp_path / "table"))
    batches, are_forked = read_by_workers(pipe("plain").map(look_up, id="look up"), 4, 4)
    assert all(batch["found"].tolist() == batch["label"].tolist() for batch in batches)
    assert are_forked == [False] * 4


def test_files_of_a_source_that_forks_can_share_keep_no_worker_from_being_forked(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "rows.tar", "w") as tar:
        for number in range(64):
            member = tarfile.TarInfo(f"{number}.cls")
            member.size = len(encoded := b"%d" % number)
            tar.addfile(member, io.BytesIO(encoded))
    part, _ = sources.tar(str(tmp_path / "rows.tar")).split(0.5, seed=0)
    pipeline = Pipeline(part, seed=0).map(stages.binary("cls", most_bytes=8)).map(stages.drop("key"))
    batches, are_forked = read_by_workers(pipeline, 2, 2)
    assert sum(len(batch["index"]) for batch in batches) == 64 and are_forked == [True] * 2


def test_workers_are_not_forked_from_a_feeders_process_in_which_a_stage_has_begun_a_thread() -> None:
    batches, are_forked = read_by_workers(pipe("plain").map(begin_thread, id="thread"), 1, 2)
    assert sum(len(batch["index"]) for batch in batches) == N and are_forked == [False] * 2


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


RECORDS = 48


def with_a_thread(sample: dict[str, Any]) -> dict[str, Any]:
    """Starts in a worker a thread that an interpreter waits for at its end."""
    if sys.argv[0].endswith("worker_main.py") and sample["x"] in (0, 1):
        threading.Thread(target=time.sleep, args=(1e6,)).start()
    return sample


def short_of_descriptors_once(sample: dict[str, Any]) -> dict[str, Any]:
    """What ends a worker: nothing is wrong with the record."""
    path = Path(os.environ["ONCE"])
    if sample["x"] == 17 and is_first(path):
        raise OSError(errno.EMFILE, "too many open files")
    return sample


def numbers() -> Pipeline:
    return Pipeline(sources.arrays(x=np.arange(RECORDS)), seed=0, on_error="skip", max_skipped=1.0).map(
        with_a_thread
    )


def test_a_worker_that_fails_is_replaced_though_a_stage_has_started_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    pipeline = numbers().map(short_of_descriptors_once)
    with Feeder(pipeline, capacity=16, block=4, workers=2) as feeder:
        before = feeder.stats()["workers"]
        loader = attach(feeder.address, pipeline, 8, range(2))
        read = [int(x) for batch in loader for x in batch["x"]]
        assert sorted(read) == sorted([*range(RECORDS), *range(RECORDS)])
        stats = feeder.stats()
    assert stats["restarts"] == 1 and stats["failure"] is None
    assert any(gone(pid) for pid in before)


def test_workers_end_with_a_killed_feeder_though_a_stage_has_started_threads() -> None:
    process = spawn(numbers(), capacity=16, workers=2)
    try:
        assert len(list(attach(process.address, numbers(), 8, range(1)))) == RECORDS // 8
        workers = [child.pid for child in psutil.Process(process.pid).children()]
        assert len(workers) == 2
    finally:
        process.kill()
        process.stop()
    wait_until(lambda: all(map(gone, workers)))


torch = pytest.importorskip("torch")

#: A process that has imported neither torch nor Pillow loads a pipeline, and says what is set then.
LOADS = """
import json, sys
from pipelines.ipc import memory_pickle
before = [name for name in ("torch", "PIL") if name in sys.modules]
memory_pickle.load(int(sys.argv[1]))
from pipelines.environment.library_settings import find_settings
from PIL import ImageFile
import torch
print(json.dumps([before, find_settings(), str(torch.empty(0).dtype), ImageFile.LOAD_TRUNCATED_IMAGES]))
"""


@pytest.fixture
def settings() -> Iterator[None]:
    """What a spec may set when it is imported."""
    with keep_settings():
        ImageFile.LOAD_TRUNCATED_IMAGES = True
        torch.set_default_dtype(torch.float64)
        torch.backends.cuda.matmul.allow_tf32 = True
        yield


def make_pipeline() -> Pipeline:
    return Pipeline(sources.arrays(x=[1.0, 2.0])).map(abs, field="x")


def test_a_process_that_prepares_has_the_settings_of_the_one_that_declared(settings: None) -> None:
    payload = memory_pickle.dump(make_pipeline())
    try:
        command = [sys.executable, "-c", LOADS, str(payload)]
        said = subprocess.check_output(command, pass_fds=[payload], env=child_environment())
    finally:
        os.close(payload)
    found = find_settings()
    assert {"torch.set_default_dtype", "torch.backends.cuda.matmul.fp32_precision"} <= found.keys()
    assert json.loads(said) == [[], found, "torch.float64", True]


def test_a_setting_that_changes_samples_is_part_of_what_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprints() -> dict[str, Any]:
        return {name: digest for name, digest, _ in make_pipeline().describe_for_peers()["parts"]}

    usual = fingerprints()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert fingerprints() == usual, "no sample depends on it"
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert {name for name, digest in fingerprints().items() if usual[name] != digest} == {"stage 0 abs('x')"}


def test_a_process_takes_on_the_settings_of_a_run_and_no_others(settings: None) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # torch says then that its two sets of names are mixed
    found = find_settings()
    with keep_settings():
        apply_settings({})
        assert find_settings() == {}
        apply_settings({"torch.set_default_dtype": "torch.bfloat16"})
        assert find_settings() == {"torch.set_default_dtype": "torch.bfloat16"}, (
            "what is not named has its default"
        )
        assert not ImageFile.LOAD_TRUNCATED_IMAGES
    assert find_settings() == found


def test_contexts_that_overlap_leave_the_settings_of_before_the_first() -> None:
    found, contexts = find_settings(), (keep_settings(), keep_settings())
    for context, dtype in zip(contexts, ("torch.bfloat16", "torch.float16"), strict=True):  # as two threads do
        context.__enter__()
        apply_settings({"torch.set_default_dtype": dtype})
    for context in contexts:
        context.__exit__(None, None, None)
    assert find_settings() == found
