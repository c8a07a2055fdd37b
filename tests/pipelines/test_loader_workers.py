"""A loader with preparation workers of its own: the same batches, in time, and nothing left behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from core_pipes import (
    LIMIT_S,
    N,
    data,
    gone,
    leaves_nothing,  # noqa: F401 - a fixture that every test here uses
    noise,
    pipe,
    record,
    refuse_some,
    spoil,
    wait_until,
)
from hypothesis import given
from hypothesis import strategies as st

import pipelines
from pipelines import Loader, Pipeline, PipelineError, SampleError, sources
from pipelines.ipc.child_processes import child_environment
from pipelines.loader.private_feeder import LoaderTimeout, choose_block, choose_capacity, default_prefetch
from pipelines.order.rank_rows import RankRows
from pipelines.workers import worker_pool
from pipelines.workers.start_limit import StartLimit
from pipelines.workers.starting import has_message

h5py = pytest.importorskip("h5py")


def read(loader: Any, *, spoils: bool = True) -> list[Any]:
    records = []
    for batch in loader:
        records.append(record(batch))
        if spoils:
            spoil(batch)
    return records


# --- the law ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "batch_size", "world", "drop_last"),
    [
        ("plain", N, 3, False),
        ("numpy", 7, 2, True),
        ("torch", 8, 1, False),
        ("skip", 5, 8, False),
        ("ended numpy torch", 100, 1, False),
    ],
)
def test_batches_are_bitwise_those_without_workers(
    kind: str, batch_size: int, world: int, drop_last: bool
) -> None:
    for rank in {0, world - 1}:
        options = {"epochs": 2, "rank": rank, "world": world, "drop_last": drop_last, "start_step": 1}
        alone = read(pipe(kind).loader(batch_size, **options), spoils=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of records that are left out
            assert read(pipe(kind).loader(batch_size, **options, workers=2)) == alone


@pytest.mark.parametrize("prefetch", [1, 7])
def test_neither_prefetch_nor_another_thread_changes_a_bit(prefetch: int) -> None:
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: read(pipe("torch").loader(8, 2, workers=3, prefetch=prefetch))).result()
    assert found == read(pipe("torch").loader(8, 2))


def test_passes_are_the_epochs_one_after_the_other_by_the_same_workers() -> None:
    loader, alone = pipe("numpy").loader(8, workers=2), pipe("numpy").loader(8)
    pids = set()
    for _ in range(3):
        assert len(loader) == len(alone) == -(-N // 8)
        assert read(loader) == read(alone)
        pids |= set(loader._workers.pids)
    assert len(pids) == 2
    loader.close()


def test_weights_and_copies() -> None:
    def double(index: Any) -> Any:
        return index * 2.0

    kept = list(pipe("plain").loader(8, 1, workers=2, weights=double, copy=True))
    for batch, other in zip(kept, pipe("plain").loader(8, 1, weights=double), strict=True):
        assert record(batch) == record(other)
        assert torch.equal(batch["weight"], batch["index"].float() * 2)


@given(
    n=st.integers(1, 60),
    batch_size=st.integers(1, 70),
    world=st.integers(1, 9),
    drop_last=st.booleans(),
    cut=st.integers(1, 13),
)
def test_rank_rows_are_the_rows_that_the_rank_reads(
    n: int, batch_size: int, world: int, drop_last: bool, cut: int
) -> None:
    from pipelines.loader.batch import ReadRange

    for rank in range(world):
        reading = ReadRange(n, batch_size, range(1), rank, world, drop_last)
        rows = RankRows(n, batch_size, rank, world, drop_last)
        expected, end = [], 0
        for step in range(reading.steps):
            first, last = reading.own(*reading.places(step))
            assert rows.bounds(step) == (end, end + last - first)
            expected += range(first, last)
            end += last - first
        assert rows.per_epoch == len(expected)
        found: list[int] = []
        for start in range(0, len(expected), cut):
            for first, last in rows.places(start, min(len(expected), start + cut)):
                found += range(first, last)
        assert found == expected


@given(batch=st.integers(1, 5000), workers=st.integers(1, 64), prefetch=st.integers(1, 20))
def test_the_ring_holds_the_batches_ahead_and_little_more(batch: int, workers: int, prefetch: int) -> None:
    block = choose_block(batch, workers)
    capacity = choose_capacity(batch, block, prefetch)
    assert batch * (prefetch + 1) + block - 1 <= capacity <= batch * (prefetch + 1) + 9 * block
    assert 1 <= block <= min(64, batch)


def test_the_default_prefetch_is_that_of_a_dataloader_unless_batches_are_large() -> None:
    assert default_prefetch(4, 1 << 20) == 8
    assert default_prefetch(4, 100 << 20) == 2
    assert default_prefetch(1, 1) == 2


# --- what is valid how long -------------------------------------------------------------------------------


def wide() -> Pipeline:
    """Samples of several pages, which batches hold as views."""
    source = sources.arrays(x=np.arange(64 * 4096, dtype=np.float32).reshape(64, 4096))
    return Pipeline(source, seed=1)


def test_a_batch_is_a_view_and_stays_valid_when_the_loop_ends_early() -> None:
    loader, alone = wide().loader(4, workers=2, prefetch=1), wide().loader(4)
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


def test_the_next_epoch_is_prepared_between_two_passes() -> None:
    loader = pipe("plain").loader(8, workers=1, prefetch=2)
    read(loader)
    used = loader.stats()["waited_s"]
    worker = psutil.Process(loader._workers.pids[0])
    feeder = loader._workers._feeder
    assert feeder is not None
    stream = feeder._stream
    assert stream.head >= N + 2 * 8 - stream.block_size
    assert worker.is_running() and used > 0
    loader.close()


# --- errors -----------------------------------------------------------------------------------------------


def test_a_bad_record_raises_the_original_error_in_this_process() -> None:
    loader = Pipeline(data(), seed=3).map(refuse_some).loader(8, 1, workers=2)
    with pytest.raises(SampleError, match="a bad record") as caught:
        list(loader)
    assert isinstance(caught.value.__cause__, ValueError)
    assert loader._workers.pids == []


def forever_at_17(sample: dict[str, Any]) -> dict[str, Any]:
    if int(sample["label"]) == 17 and os.environ.get("FOREVER") == str(os.getppid()):
        threading.Event().wait()
    return sample


def test_a_timeout_says_what_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREVER", str(os.getpid()))
    loader = Pipeline(data(), shuffle=False).map(forever_at_17).loader(8, 1, workers=1, timeout_s=10.0)
    with pytest.raises(LoaderTimeout) as caught:
        list(loader)
    said = str(caught.value)
    assert "step 2 of epoch 0" in said and "timeout_s=10" in said
    assert "preparing sample 17 (arrays(" in said and "worker " in said
    assert isinstance(caught.value, TimeoutError) and isinstance(caught.value, PipelineError)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": -1}, "workers must be at least 0"),
        ({"workers": 1, "prefetch": 0}, "prefetch must be at least 1"),
        ({"prefetch": 2}, "prefetch= needs workers=1 or more"),
        ({"timeout_s": 2.0}, "timeout_s= needs workers=1 or more"),
        ({"workers": 1, "timeout_s": 0}, "timeout_s must be above 0"),
        ({"workers": True}, "workers must be an integer"),
        ({"copy": 1}, "copy must be True or False"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PipelineError, match=said):
        pipe("plain").loader(8, **options)


def test_what_cannot_be_given_to_workers_is_refused_with_the_reason() -> None:
    lock = threading.Lock()

    def locked(sample: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return sample

    loader = pipe("plain").map(locked).loader(8, workers=1)
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


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "concatenated"])
def test_a_dataset_that_opens_its_file_at_the_first_read_is_given_to_workers(nested: bool, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(64)
    parts = [LazyFile(tmp_path / "a.h5", first) for first in (0, 32)]
    items: Any = torch.utils.data.ConcatDataset(parts) if nested else parts[0]
    pipeline = Pipeline(sources.dataset(items, id="lazy"), seed=0)
    found = [batch["x"].tolist() for batch in pipeline.loader(8, range(1))]  # the file is open here now
    assert sorted(index for batch in found for index in batch) == list(range(len(items)))
    assert [batch["x"].tolist() for batch in pipeline.loader(8, range(1), workers=2)] == found
    with pipelines.Feeder(pipeline) as feeder:
        assert [batch["x"].tolist() for batch in pipelines.attach(feeder.address, pipeline, 8, range(1))] == found
    assert all(part.file is None for part in parts)


def test_what_is_opened_outside_a_read_is_named_with_the_remedy(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(64)
    opened = LazyFile(tmp_path / "a.h5")
    assert opened[3]["x"] == 3
    pipeline = Pipeline(sources.dataset(opened, id="lazy"), seed=0)
    for start in (lambda: next(iter(pipeline.loader(8, workers=1))), lambda: pipelines.Feeder(pipeline)):
        with pytest.raises(PipelineError, match=r"cannot be given to workers: h5py .*__getstate__"):
            start()


def test_large_arrays_are_not_copied_to_workers() -> None:
    big = np.zeros((64, 1 << 20), np.uint8)  # 64 MiB, all written
    big += 1
    loader = Pipeline(sources.dataset([{"x": row} for row in big], id="big")).map(_total).loader(8, workers=2)
    own = Pipeline(sources.arrays(x=big, id="big")).map(_total).loader(8, workers=2)
    for each in (own, loader):
        assert next(iter(each))["total"].tolist() == [1 << 20] * 8
        held = sum(psutil.Process(pid).memory_full_info().uss for pid in each._workers.pids)
        assert held < 48 << 20
        each.close()


def _total(sample: dict[str, Any]) -> dict[str, Any]:
    return {"total": sample["x"].sum(dtype=np.int64)}


# --- the ends of processes --------------------------------------------------------------------------------


def kill_own_process(sample: dict[str, Any]) -> dict[str, Any]:
    if os.environ.get("PARENT") != str(os.getpid()):
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def test_workers_that_always_die_are_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARENT", str(os.getpid()))
    loader = Pipeline(data().take(4)).map(kill_own_process).loader(4, 1, workers=1)
    with pytest.raises(PipelineError, match=r"workers in a row ended|ends every process that prepares it"):
        list(loader)


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fail)
    loader = pipe("numpy").loader(8, 1, workers=2)
    with pytest.warns(UserWarning, match="prepares its batches itself, without workers: .*unavailable"):
        assert read(loader) == read(pipe("numpy").loader(8, 1))


def test_no_process_can_replace_one_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    loader, seen = pipe("slow").loader(8, 1, workers=2, prefetch=1), []

    def loop() -> None:
        for batch in loader:
            seen.append(record(batch))
            if batch.step == 1:
                monkeypatch.setattr(os, "fork", fail)
                for pid in loader._workers.pids:
                    os.kill(pid, signal.SIGKILL)

    with pytest.warns(UserWarning, match="without workers: .*unavailable"):
        loop()
    assert seen == read(pipe("slow").loader(8, 1), spoils=False)


@pytest.mark.parametrize("end", ["dropped", "closed", "raised", "left"])
def test_workers_end_with_the_loader(end: str) -> None:
    gc.disable()  # they end with the last reference, not at some later collection
    try:
        loader: Loader | None = pipe("slow").loader(8, None if end != "left" else 2, workers=2)
        pids: list[int] = []

        def loop() -> None:
            assert loader is not None
            for _ in loader:
                pids.extend(loader._workers.pids)
                if end == "raised":
                    raise KeyboardInterrupt
                return

        if end == "raised":
            with pytest.raises(KeyboardInterrupt) as caught:
                loop()
            del caught
        else:
            loop()
        assert len(pids) == 2
        if end == "closed":
            assert loader is not None
            loader.close()
        if end != "left":  # a pass that was left early was the only one
            loader = None
        wait_until(lambda: all(map(gone, pids)))
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


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("os._exit(3)", id="exit-now", marks=pytest.mark.more),
        pytest.param("sys.exit(0)", id="exit", marks=pytest.mark.more),
        pytest.param("raise RuntimeError('an error in the loop')", id="error", marks=pytest.mark.more),
        pytest.param("signal.pause()", id="ctrl-c"),
        pytest.param(
            "if not os.fork(): time.sleep(900)\nos.kill(os.getpid(), signal.SIGKILL)", id="kill-fork-beside"
        ),
    ],
)
def test_nothing_is_left_of_a_process_that_ends(end: str) -> None:
    before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(here=str(Path(__file__).parent), end=end)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=child_environment(),
        start_new_session=True,
    )
    assert process.stdout is not None
    own, *workers = map(int, process.stdout.readline().split())
    try:
        assert len(workers) == 2 and own == process.pid
        if end == "signal.pause()":
            os.killpg(own, signal.SIGINT)  # as a terminal does: all processes of the group
        process.wait(LIMIT_S)
        wait_until(lambda: all(map(gone, workers)))
    finally:
        os.killpg(own, signal.SIGKILL) if any(not gone(pid) for pid in _group(own)) else None
        process.wait(LIMIT_S)
        process.stdout.close()
    assert set(os.listdir("/dev/shm")) <= before
    assert os.listdir(tempfile.gettempdir()) == []


def _group(leader: int) -> list[int]:
    found = []
    for each in psutil.process_iter():
        try:
            if os.getpgid(each.pid) == leader:
                found.append(each.pid)
        except ProcessLookupError:
            continue
    return found


def test_a_copy_of_the_loader_in_a_forked_process_has_workers_of_its_own() -> None:
    loader = pipe("numpy").loader(8, workers=2)
    batches = iter(loader)
    first = record(next(batches))
    pids = set(loader._workers.pids)
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            again = record(next(iter(pipe("numpy").loader(8, workers=1))))
            rest = read(batches)
            mine = loader._workers.pids
            loader.close()
            os.write(sender, json.dumps([again, len(rest), mine]).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe_end:
        said = json.loads(pipe_end.read())
    os.waitpid(child, 0)
    assert said[:2] == [json.loads(json.dumps(first)), -(-N // 8) - 1]
    assert not set(said[2]) & pids
    assert set(loader._workers.pids) == pids and not any(map(gone, pids))
    assert len(read(batches)) == -(-N // 8) - 1
    loader.close()


@pytest.mark.more
def test_another_librarys_dataloader_beside_it() -> None:
    loader = pipe("numpy").loader(8, 1, workers=2)
    batches = iter(loader)
    seen = [record(next(batches))]
    beside = torch.utils.data.DataLoader(list(range(32)), batch_size=4, num_workers=2, timeout=300)
    for _ in beside:
        batch = next(batches, None)
        if batch is not None:
            seen.append(record(batch))
    seen += read(batches)
    assert seen == read(pipe("numpy").loader(8, 1), spoils=False)


def test_counters() -> None:
    loader = pipe("slow").map(noise).loader(8, 1, workers=2)
    read(loader)
    stats = loader.stats()
    assert (stats["samples"], stats["batches"], stats["private_batches"]) == (N, 8, 8)
    assert stats["waited_s"] > 0 and stats["prepare_cpu_s"] > 0
    assert loader.num_workers == 2 and loader.batch_size == 8 and len(loader.dataset) == N


_lock = threading.Lock()


class NeedsLock:
    """A stage whose copies wait for a lock when they are made."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample

    def __setstate__(self, _: Any) -> None:
        with _lock:
            pass

    def __getstate__(self) -> dict[str, Any]:
        return {"any": 1}


def _hold_lock_until_fork() -> None:
    _lock.acquire()
    os.register_at_fork(after_in_parent=lambda: _lock.locked() and _lock.release())


def test_a_worker_that_was_forked_while_a_lock_was_held_is_replaced_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "_FORK_START_S", 0.5)
    pipeline = Pipeline(data(), seed=0).map(NeedsLock(), random=False, id="needs lock")
    expected = read(pipeline.loader(8, 1))
    loader = pipeline.loader(8, 1, workers=1)
    _hold_lock_until_fork()
    with pytest.warns(
        UserWarning, match=r"1 had not begun within 0\.5 s \(process \d+\) and are replaced, with 1 s"
    ):
        assert read(loader) == expected


def test_the_limit_for_beginning_grows_once_for_all_that_are_late_and_falls_with_quick_ones() -> None:
    limit = StartLimit(15.0)
    with pytest.warns(UserWarning, match="12 had not begun within 15 s"):
        limit.report_late(range(12), 15.0)
    assert limit.limit_s == 30.0
    limit.report_begun(0.0, 16.0)  # started before
    assert limit.limit_s == 30.0
    with pytest.warns(UserWarning, match="1 had not begun within 30 s"):
        limit.report_late([7], 45.0)
    limit.report_begun(46.0, 66.0)  # others that were started with it still have time
    assert limit.limit_s == 60.0
    limit.report_begun(66.0, 66.01)
    assert limit.limit_s == 15.0


@pytest.mark.filterwarnings("ignore:of the preparation workers:UserWarning")
def test_workers_that_never_begin_end_the_preparation() -> None:
    limit = StartLimit(15.0)
    for count in range(7):
        limit.report_late([count], 1.0 + count)
    with pytest.raises(PipelineError, match=r"1 had not begun within 1920 s .*8 times in a row"):
        limit.report_late([7], 9.0)


def test_a_pause_of_the_training_loop_is_no_hang_of_a_worker() -> None:
    loader = pipe("numpy").loader(8, 1, workers=2)
    batches = iter(loader)
    next(batches)
    assert loader._workers._feeder is not None
    pool, pids = loader._workers._feeder._pool, loader._workers.pids
    given_blocks = [worker.connection for worker in pool._workers if worker.blocks]
    assert given_blocks
    for connection in given_blocks:
        wait_until(lambda connection=connection: has_message(connection))
    pool._timeout_s, pool._next_check = 0.0, 0.0  # all time is too long
    pool.tick()
    assert loader._workers.pids == pids
    batches.close()  # type: ignore[attr-defined]


def test_a_program_that_ends_within_a_pass_says_nothing(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np\nfrom pipelines import Pipeline, sources\n"
        "loader = Pipeline(sources.arrays(x=np.zeros((64, 4096)))).loader(16, workers=1)\n"
        "batches = iter(loader)\nnext(batches)\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], env=child_environment(), capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


HANDLER = """
import signal, sys, time
from pipelines import Feeder, Pipeline, attach, sources

class Late(TimeoutError):
    pass

def handle(number, frame):
    raise Late("of the handler")

def wait(sample):
    time.sleep(3600)

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
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", HANDLER, kind],
        env=child_environment(), capture_output=True, text=True, timeout=LIMIT_S, start_new_session=True,
    )  # fmt: skip
    assert (child.stdout, child.stderr) == ("of the handler\n", "")
