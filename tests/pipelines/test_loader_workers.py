"""A loader with preparation workers of its own: the same batches, in time, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import core_pipes as pipes
import numpy as np
import psutil
import pytest
import torch
from core_pipes import N, leaves_nothing, pipe  # noqa: F401
from kit.leftovers import named_memory, new_named_memory

import pipelines
from pipelines import Loader, Pipeline, PipelineError, SampleError, sources
from pipelines.ipc.child_processes import child_environment
from pipelines.loader import workers as loader_workers
from pipelines.loader.private_feeder import PrivateFeeder
from pipelines.workers import worker_pool

h5py = pytest.importorskip("h5py")


read = partial(pipes.read, job=pipes.Job())


def test_weights_and_copies() -> None:
    options: dict[str, Any] = {"epochs": 1, "weights": lambda index: index * 2.0}
    kept = list(pipe("plain").loader(8, workers=2, copy=True, **options))
    for batch, other in zip(kept, pipe("plain").loader(8, **options), strict=True):
        assert pipes.record(batch) == pipes.record(other)
        assert torch.equal(batch["weight"], batch["index"].float() * 2)


LAW = [("plain", N, 3, False, None), ("numpy", 7, 2, True, 1), ("torch", 8, 1, False, 7)]
LAW += [("skip", 5, 8, False, None), ("ended numpy torch", 100, 1, False, None)]


@pytest.mark.parametrize(("kind", "batch_size", "world", "drop_last", "prefetch"), LAW)
@pytest.mark.filterwarnings("ignore:left out:UserWarning", "ignore:.*left out:UserWarning")
def test_batches_are_bitwise_those_without_workers_whatever_the_prefetch_and_the_thread(
    kind: str, batch_size: int, world: int, drop_last: bool, prefetch: int | None
) -> None:
    for rank in {0, world - 1}:
        options = {"epochs": 2, "rank": rank, "world": world, "drop_last": drop_last, "start_step": 1}
        alone = read(pipe(kind).loader(batch_size, **options))
        loader = pipe(kind).loader(batch_size, **options, workers=2, prefetch=prefetch)
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(read, loader).result() == alone
        stats = loader.stats()
        assert (stats["batches"], stats["private_batches"], loader.num_workers) == (len(alone), len(alone), 2)
        assert stats["samples"] == sum(len(record[3]) for record in alone) and stats["prepare_cpu_s"] > 0
        assert (loader.batch_size, len(loader.dataset)) == (batch_size, len(pipe(kind)))


def test_passes_are_the_epochs_in_turn_by_the_same_workers_who_prepare_the_next_in_between() -> None:
    loader, alone = pipe("numpy").loader(8, workers=2, prefetch=2), pipe("numpy").loader(8)
    pids = set()
    for _ in range(3):
        assert len(loader) == len(alone) == -(-N // 8)
        assert read(loader) == read(alone)
        pids |= set(loader._workers.pids)
    assert len(pids) == 2 and all(psutil.Process(pid).is_running() for pid in pids)
    feeder = loader._workers._feeder
    assert feeder is not None and feeder._stream.head >= 3 * N + 2 * 8 - feeder._stream.block_size
    loader.close()


def test_a_batch_is_a_view_and_stays_valid_when_the_loop_ends_early() -> None:
    columns = np.arange(64 * 4096, dtype=np.float32).reshape(64, 4096)  # of several pages: batches are views
    wide = Pipeline(sources.arrays(x=columns), seed=1)
    loader, alone = wide.loader(4, workers=2, prefetch=1), wide.loader(4)
    addresses = set()
    for step, batch in enumerate(loader):
        addresses.add(batch["x"].data_ptr())
        if step == 9:
            break
    assert len(addresses) < 10  # memory is used again
    kept = next(b for i, b in enumerate(alone) if i == 9)
    assert torch.equal(batch["x"], kept["x"])
    # The next pass is the next epoch, and goes twice round the ring.
    assert read(loader) == read(alone)
    assert torch.equal(batch["x"], kept["x"])
    loader.close()
    assert torch.equal(batch["x"], kept["x"])


def test_a_bad_record_raises_the_original_error_in_this_process() -> None:
    loader = Pipeline(pipes.data(), seed=3).map(pipes.refuse_some).loader(8, 1, workers=2)
    with pytest.raises(SampleError, match="a bad record") as caught:
        list(loader)
    assert isinstance(caught.value.__cause__, ValueError)
    assert loader._workers.pids == []


def test_options_are_checked() -> None:
    for wrong in ({"workers": -1}, {"prefetch": 0, "workers": 1}, {"prefetch": 2}, {"workers": True}, {"copy": 1}):
        with pytest.raises(PipelineError, match=rf"{next(iter(wrong))}=? (must be|needs workers=1 or more)"):
            pipe("plain").loader(8, **wrong)


def test_what_cannot_be_given_to_workers_is_refused_with_the_reason() -> None:
    lock = threading.Lock()
    loader = pipe("plain").map(lambda sample: sample if lock else {}, random=False).loader(8, workers=1)
    with pytest.raises(PipelineError, match=r"cannot be given to workers: .*lock.*__getstate__"):
        next(iter(loader))
    assert loader._workers.pids == []


class LazyFile:
    """The usual lazy HDF5 Dataset, without `__getstate__`."""

    def __init__(self, path: Path, first: int = 0) -> None:
        self.path, self.first, self.file = path, first, None

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.file is None:
            self.file = h5py.File(self.path, "r")
        return {"x": self.file["x"][self.first + index]}


def test_a_dataset_that_opens_its_file_at_the_first_read_is_given_to_workers(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(64)
    parts = [LazyFile(tmp_path / "a.h5", first) for first in (0, 32)]
    items: Any = torch.utils.data.ConcatDataset(parts)
    pipeline = Pipeline(sources.dataset(items, id="lazy"), seed=0)
    alone = [batch["x"].tolist() for batch in pipeline.loader(8, range(1))]  # the file is open here now
    assert [batch["x"].tolist() for batch in pipeline.loader(8, range(1), workers=2)] == alone
    assert all(part.file is None for part in parts)
    assert parts[0][3]["x"] == 3  # opened outside a read
    pipeline = Pipeline(sources.dataset(parts[0], id="lazy"), seed=0)
    for start in (lambda: next(iter(pipeline.loader(8, workers=1))), lambda: pipelines.Feeder(pipeline)):
        with pytest.raises(PipelineError, match=r"cannot be given to workers: h5py .*__getstate__"):
            start()


def test_large_arrays_are_not_copied_to_workers() -> None:
    big = np.ones((64, 1 << 20), np.uint8)  # 64 MiB
    for source in (sources.arrays(x=big, id="big"), sources.dataset([{"x": row} for row in big], id="big")):
        reader = Pipeline(source).map(lambda x: x.sum(dtype=np.int64), field="x").loader(8, workers=2)
        assert next(iter(reader))["x"].tolist() == [1 << 20] * 8
        assert sum(psutil.Process(pid).memory_full_info().uss for pid in reader._workers.pids) < 48 << 20
        reader.close()


def test_workers_that_always_die_are_an_error_and_not_a_hang() -> None:
    parent = os.getpid()

    def kill_own_process(sample: dict[str, Any]) -> dict[str, Any]:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    loader = Pipeline(pipes.data().take(1)).map(kill_own_process, id="kills").loader(1, 1, workers=1)
    with pytest.raises(PipelineError, match=r"workers in a row ended|ends every process that prepares it"):
        list(loader)


@pytest.mark.parametrize("from_step", [-1, 1], ids=["none starts", "none replaces one that died"])
def test_where_no_process_can_be_started_it_prepares_itself(monkeypatch: Any, from_step: int) -> None:
    def fail_to_fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    def read_and_kill() -> Iterator[Any]:
        for batch in loader:
            yield pipes.record(batch)
            if batch.step == from_step:
                monkeypatch.setattr(os, "fork", fail_to_fork)
                for pid in loader._workers.pids:
                    os.kill(pid, signal.SIGKILL)

    loader = pipe("slow").loader(8, 1, workers=2, prefetch=1)
    if from_step < 0:
        monkeypatch.setattr(os, "fork", fail_to_fork)
    with pytest.warns(UserWarning, match="prepares its batches itself, without workers: .*unavailable"):
        records = list(read_and_kill())
    assert records == read(pipe("slow").loader(8, 1))


@pytest.mark.parametrize("end", ["dropped", "closed", "raised", "left"])
def test_workers_end_with_the_loader(end: str) -> None:
    def read_one(loader: Loader) -> None:
        for _ in loader:
            pids.extend(loader._workers.pids)
            if end == "raised":
                raise KeyboardInterrupt
            return

    pids: list[int] = []
    gc.disable()  # they end with the last reference, not at some later collection
    try:
        loader: Loader | None = pipe("slow").loader(8, None if end != "left" else 2, workers=2)
        assert loader is not None
        with contextlib.suppress(KeyboardInterrupt):
            read_one(loader)
        if end == "closed":
            loader.close()
        if end != "left":  # a pass that was left early was the only one
            loader = None
        assert len(pids) == 2
        pipes.wait_until(lambda: all(map(pipes.gone, pids)))
    finally:
        gc.enable()


SCRIPT = """
import os, sys, time, signal
sys.path.insert(0, {here!r})
from core_pipes import pipe
loader = pipe("slow").loader(8, workers=2)
batches = iter(loader)
next(batches)
print(os.getpid(), *loader._workers.pids, flush=True)
{end}
"""


ENDS = {"exit": "sys.exit(0)", "ctrl-c": "signal.pause()"}
ENDS["kill-fork-beside"] = "if not os.fork(): time.sleep(900)\nos.kill(os.getpid(), signal.SIGKILL)"
ENDS |= {"exit-now": "os._exit(3)", "error": "raise RuntimeError('an error in the loop')"}
MORE = [pytest.param(end, marks=pytest.mark.more) for end in ("exit-now", "error")]


@pytest.mark.parametrize("end", [*list(ENDS)[:3], *MORE])
def test_nothing_is_left_of_a_process_that_ends(end: str, tmp_path: Path) -> None:
    before, errors = named_memory(), tmp_path / "errors"
    command = [sys.executable, "-c", SCRIPT.format(here=str(Path(__file__).parent), end=ENDS[end])]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "env": child_environment(), "start_new_session": True}
    with errors.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, **options)
    assert process.stdout is not None
    own, *workers = map(int, process.stdout.readline().split())
    try:
        assert len(workers) == 2 and own == process.pid
        if end == "ctrl-c":
            os.killpg(own, signal.SIGINT)  # as a terminal does: all processes of the group
        process.wait(pipes.LIMIT_S)
        pipes.wait_until(lambda: all(map(pipes.gone, workers)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(own, signal.SIGKILL)
        process.wait(pipes.LIMIT_S)
        process.stdout.close()
    assert end != "exit" or errors.read_text() == ""
    assert new_named_memory(before) == set()
    assert os.listdir(tempfile.gettempdir()) == []


def test_a_copy_of_the_loader_in_a_forked_process_has_workers_of_its_own(tmp_path: Path) -> None:
    loader, steps, notes = pipe("numpy").loader(8, workers=2), -(-N // 8), tmp_path / "notes"
    batches = iter(loader)
    first, pids = pipes.record(next(batches)), set(loader._workers.pids)
    if not (child := os.fork()):
        try:
            again = pipes.record(next(iter(pipe("numpy").loader(8, workers=1))))
            count, mine = len(read(batches)), loader._workers.pids
            loader.close()
            notes.write_text(json.dumps([again == first, count, mine]))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    is_same, count, others = json.loads(notes.read_text())
    assert is_same and count == steps - 1 and others and not set(others) & pids
    assert set(loader._workers.pids) == pids and not any(map(pipes.gone, pids))
    assert len(read(batches)) == steps - 1
    loader.close()


class SlowlyCopied:
    """A stage of which each copy takes a while."""

    def __init__(self, seconds: float = 1.2) -> None:
        self.seconds = seconds

    __call__ = staticmethod(dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        time.sleep(state["seconds"])


@pytest.mark.filterwarnings("ignore:a preparation worker:UserWarning")
def test_workers_that_never_begin_in_time_end_the_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "_FORK_START_S", 0.05)
    loader = Pipeline(pipes.data(), seed=0).map(SlowlyCopied(), random=False, id="never").loader(8, 1, workers=1)
    with pytest.raises(PipelineError, match=r"5 preparation workers in a row.* the last within 0\.8 s"):
        next(iter(loader))


@pytest.mark.parametrize(("start_s", "sample_s", "copy_s"), [(0.4, 300.0, 1.2), (60.0, 5.0, 6.0)])
def test_slow_workers_get_twice_the_time_and_as_long_as_samples_may_take_is_no_limit(
    monkeypatch: pytest.MonkeyPatch, start_s: float, sample_s: float, copy_s: float
) -> None:
    monkeypatch.setattr(worker_pool, "_FORK_START_S", start_s)
    monkeypatch.setattr(loader_workers, "PrivateFeeder", partial(PrivateFeeder, prepare_timeout_s=sample_s))
    pipeline = Pipeline(pipes.data(), seed=0).map(SlowlyCopied(copy_s), random=False, id="slow")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert read(pipeline.loader(8, 1, workers=1)) == read(pipeline.loader(8, 1))
    replaced = [str(w.message) for w in caught if "Another one gets twice" in str(w.message)]
    assert bool(replaced) == (start_s == 0.4) and all("did not start within" in message for message in replaced)


def test_a_pause_of_the_training_loop_is_no_hang_of_a_worker() -> None:
    loader = pipe("numpy").loader(8, 1, workers=2)
    batches = iter(loader)
    next(batches)
    assert loader._workers._feeder is not None
    pool, pids = loader._workers._feeder._pool, loader._workers.pids
    given_blocks = [worker.connection for worker in pool._workers if worker.blocks]
    pipes.wait_until(lambda: all(map(worker_pool._has_message, given_blocks)))
    pool._timeout_s, pool._next_check = 0.0, 0.0  # all time is too long
    pool.tick()
    assert given_blocks and loader._workers.pids == pids
    batches.close()  # type: ignore[attr-defined]


HANDLER = """
import signal, sys, time
from pipelines import Feeder, Pipeline, attach, sources

class Late(TimeoutError): pass
def handle(number, frame): raise Late("of the handler")
def wait(sample): time.sleep(3600)
def first_batch(loader):
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        next(iter(loader))
    except Late as error:
        print(error, flush=True)

pipe = Pipeline(sources.arrays(x=[1, 2, 3, 4]))
if sys.argv[1] == "workers":
    slow = pipe.map(wait, fields={"x": ((), "int64")})
    first_batch(slow.loader(2, workers=1))
else:
    with Feeder(pipe, expect=2, gate_timeout_s=3600) as feeder:  # the other one never comes
        first_batch(attach(feeder.address, pipe, 2, on_wait=(lambda: None) if sys.argv[1] == "on_wait" else None))
"""


@pytest.mark.parametrize("kind", ["attached", "on_wait", "workers"])
def test_what_a_signal_handler_raises_while_a_loader_waits_reaches_the_loop(kind: str) -> None:
    """A handler that raises a TimeoutError is the usual way to limit a block of code."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "start_new_session": True}
    command = [sys.executable, "-W", "error", "-c", HANDLER, kind]
    child = subprocess.run(command, env=child_environment(), timeout=pipes.LIMIT_S, **options)
    assert (child.stdout, child.stderr) == ("of the handler\n", "")
