"""Workers with positions in files, threads and settings of libraries of their own, and what ends them."""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from core_pipes import LIMIT_S, Feeder, N, gone, leaves_nothing, pipe, wait_until  # noqa: F401
from kit.once import is_first
from PIL import ImageFile

from pipelines import Peers, Pipeline, attach, find_shared_stages, resident, sources, stages
from pipelines.environment.library_settings import apply_settings, find_settings, keep_settings
from pipelines.feeder.process import spawn
from pipelines.ipc import memory_pickle
from pipelines.ipc.child_processes import child_environment

RECORDS = 48
_thread: list[threading.Thread] = []


def begin_thread(sample: dict[str, Any]) -> dict[str, Any]:
    if not _thread:
        _thread.append(threading.Thread(target=threading.Event().wait, daemon=True))
        _thread[0].start()
    return sample


@functools.cache
def open_table() -> Any:
    return open(os.environ["TABLE"], "rb", buffering=0)


def look_up(sample: dict[str, Any]) -> dict[str, Any]:
    file = open_table()
    file.seek(4 * int(sample["label"]))
    time.sleep(0.001)
    return {**sample, "found": np.int64(int.from_bytes(file.read(4), "little"))}


def read_by_workers(pipeline: Pipeline, **options: Any) -> tuple[list[Any], list[bool]]:
    """The batches that a feeder's workers prepare, and of each of these whether it was forked from the feeder."""
    process = spawn(pipeline, block=4, workers=2, **options)
    try:
        for name, still in options.get("resident", {}).items():
            assert sum(len(batch["index"]) for batch in resident(process.address, name, still).loader(8)) == N
        batches = list(attach(process.address, pipeline, 8, 2, copy=True))
        children = psutil.Process(process.pid).children()
        return batches, ["pipelines.workers.worker_main" not in child.cmdline() for child in children]
    finally:
        process.stop()


def tar_rows(folder: Path) -> Pipeline:
    with tarfile.open(folder / "rows.tar", "w") as tar:
        for number in range(64):
            member = tarfile.TarInfo(f"{number}.cls")
            member.size = len(encoded := b"%d" % number)
            tar.addfile(member, io.BytesIO(encoded))
    part, _ = sources.tar(str(folder / "rows.tar")).split(0.5, seed=0)
    return Pipeline(part, seed=0).map(stages.binary("cls", most_bytes=8)).map(stages.drop("key"))


def parquet_rows(folder: Path) -> Pipeline:
    """Of a library that begins a thread when it is imported, which forks do without."""
    pq.write_table(pa.table({"x": np.arange(32)}), folder / "rows.parquet")
    return Pipeline(sources.parquet(str(folder / "rows.parquet")), seed=0)


FILES = {"a tar file": tar_rows, "a Parquet file": parquet_rows}


@pytest.mark.parametrize("kind", ["a file that a stage keeps open", "a thread", *FILES, "nothing"])
def test_workers_are_forked_from_the_feeders_process_but_where_a_stage_has_begun_a_thread_or_keeps_a_file_open(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table").write_bytes(np.arange(1000, dtype="<u4").tobytes())
    monkeypatch.setenv("TABLE", str(tmp_path / "table"))
    stage = {"a thread": begin_thread, "a file that a stage keeps open": look_up}.get(kind)
    made = FILES[kind](tmp_path) if kind in FILES else pipe("plain")
    held = MappingProxyType({"valid": pipe("still")})  # any mapping of resident sets reaches it
    options = {"resident": held} if kind == "nothing" else {}
    batches, are_forked = read_by_workers(made.map(stage, id=kind) if stage else made, **options)
    assert sum(len(batch["index"]) for batch in batches) == 2 * len(made) and are_forked == [not stage] * 2
    assert stage is not look_up or all(batch["found"].tolist() == batch["label"].tolist() for batch in batches)


def with_a_thread(sample: dict[str, Any]) -> dict[str, Any]:
    """Starts in a worker a thread that an interpreter waits for at its end."""
    if sys.argv[0].endswith("worker_main.py") and sample["x"] in (0, 1):
        threading.Thread(target=time.sleep, args=(1e6,)).start()
    return sample


def short_of_descriptors_once(sample: dict[str, Any]) -> dict[str, Any]:
    """What ends a worker: nothing is wrong with the record."""
    if sample["x"] == 17 and is_first(Path(os.environ["ONCE"])):
        raise OSError(errno.EMFILE, "too many open files")
    return sample


def numbers() -> Pipeline:
    source = sources.arrays(x=np.arange(RECORDS))
    return Pipeline(source, seed=0, on_error="skip", max_skipped=1.0).map(with_a_thread)


def test_a_worker_that_fails_is_replaced_though_a_stage_has_started_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    pipeline = numbers().map(short_of_descriptors_once)
    with Feeder(pipeline, capacity=16, block=4, workers=2) as feeder:
        before = feeder.stats()["workers"]
        read = [int(x) for batch in attach(feeder.address, pipeline, 8, range(2)) for x in batch["x"]]
        assert sorted(read) == sorted([*range(RECORDS), *range(RECORDS)])
        stats = feeder.stats()
    assert stats["restarts"] == 1 and stats["failure"] is None and any(map(gone, before))


def test_workers_end_with_a_killed_feeder_though_a_stage_has_started_threads() -> None:
    process = spawn(numbers(), capacity=16, workers=2)
    try:
        assert len(list(attach(process.address, numbers(), 8, range(1)))) == RECORDS // 8
        workers = [child.pid for child in psutil.Process(process.pid).children()]
    finally:
        process.kill()
        process.stop()
    wait_until(lambda: all(map(gone, workers)))
    assert len(workers) == 2


def test_numpy_integers_paths_and_iterables_are_taken_for_what_they_are(tmp_path: Path) -> None:
    loader = pipe("plain").loader(np.int64(8), np.int64(2), rank=np.int32(0))  # type: ignore[arg-type]
    assert loader.reading.epochs == range(2) and type(loader.reading.batch_size) is int
    peers = Peers(tmp_path, np.int64(0), np.int64(2))  # type: ignore[arg-type]
    assert (peers.directory, type(peers.node), type(peers.nodes)) == (str(tmp_path), int, int)
    assert len(find_shared_stages(pipe("plain") for _ in range(2))) == len(pipe("plain"))


def test_what_a_killed_feeder_left_is_cleared_away_and_nothing_else() -> None:
    killed, fresh, alive = (spawn(pipe("plain")) for _ in range(3))
    other = Path(tempfile.gettempdir()) / "feeder-notes"
    other.mkdir()
    (other / "socket").touch()
    try:
        for process in (killed, fresh):
            process.kill()
            process._process.wait(LIMIT_S)
        gone_by, kept = (Path(process.address).parent for process in (killed, alive))
        for directory in (gone_by, kept, other):
            os.utime(directory, (time.time() - 120,) * 2)
        with Feeder(pipe("plain")):
            assert not gone_by.exists()
            assert kept.exists() and other.exists() and Path(fresh.address).exists()
    finally:
        for process in (killed, fresh, alive):
            process.stop()
        shutil.rmtree(other)


def test_where_temporary_files_lie_too_deep_for_a_socket_it_lies_in_tmp_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with Feeder(pipe("plain")) as feeder:
        assert len(list(attach(feeder.address, pipe("plain"), 8))) > 0
    assert not list(deep.iterdir()) and not Path(feeder.address).parent.exists()
    assert len([line for line in caplog.messages if str(deep) in line]) == 1


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
    payload, expected = memory_pickle.dump(make_pipeline()), find_settings()
    try:
        command = [sys.executable, "-c", LOADS, str(payload)]
        output = subprocess.check_output(command, pass_fds=[payload], env=child_environment())
    finally:
        os.close(payload)
    assert {"torch.set_default_dtype", "torch.backends.cuda.matmul.fp32_precision"} <= expected.keys()
    assert json.loads(output) == [[], expected, "torch.float64", True]


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
    before = find_settings()
    with keep_settings():
        for named in ({}, {"torch.set_default_dtype": "torch.bfloat16"}):
            apply_settings(named)
            assert find_settings() == named, "what is not named has its default"
        assert not ImageFile.LOAD_TRUNCATED_IMAGES
    assert find_settings() == before


def test_contexts_that_overlap_leave_the_settings_of_before_the_first() -> None:
    before, contexts = find_settings(), (keep_settings(), keep_settings())
    for context, dtype in zip(contexts, ("torch.bfloat16", "torch.float16"), strict=True):  # as two threads do
        context.__enter__()
        apply_settings({"torch.set_default_dtype": dtype})
    for context in contexts:
        context.__exit__(None, None, None)
    assert find_settings() == before
