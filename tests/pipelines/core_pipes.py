"""Pipelines, readers and a reading process for the tests of the shared stream.

Run as a script (`python core_pipes.py ADDRESS JOBS`) it is a consumer process: JOBS is a JSON list of `Job`
fields, each read in a thread of its own; it prints one JSON line a job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest

import pipelines
from pipelines import Batch, Loader, Pipeline, attach, sources
from pipelines.ipc.child_processes import child_environment
from pipelines.shm.ring import Layout, map_writable
from pipelines.sources._origin import find_shared_records

N = 61
LIMIT_S = 300.0  # of what hangs


def count_shared_records(one: Any, other: Any) -> int:
    return int(find_shared_records(one, other).sum())


def nameless(sample: dict[str, Any]) -> dict[str, Any]:
    """A stage that no fingerprint covers: what it makes may depend on the environment."""
    return sample if os.environ.get("NAMELESS") is None else {}


def noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    image = sample["image"] + rng.random(sample["image"].shape, dtype=np.float32)
    return {**sample, "image": image, "draw": rng.integers(1 << 40)}


def dropped_pixels(image: Any) -> Any:
    import torch

    tensor = torch.from_numpy(image)
    return tensor * torch.rand(tensor.shape) + torch.randn(()).item()


def refuse_some(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["label"] % 10 == 3 or sample["label"] >= N - 3:
        raise ValueError("a bad record")
    return sample


def slowly(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.004)
    return sample


def laid_out(sample: dict[str, Any]) -> dict[str, Any]:
    """Arrays as decoders leave them, transposed; a label of 40 and more in ways that no ring gives back."""
    image = np.ascontiguousarray(sample["image"].T).T
    label = sample["label"]
    if label >= 50:
        image = np.ascontiguousarray(image)
    return {**sample, "image": image, "label": int(label) if 40 <= label < 45 else np.asarray(label)}


def summed_up(sample: dict[str, Any]) -> dict[str, Any]:
    """Last bits that depend on the memory order; writes into what it was given."""
    image, total = sample["image"], np.float32(0)
    image *= np.float32(1.1)
    sample["mask"][:2] = 9
    assert isinstance(sample["label"], int | np.ndarray) and image.flags.writeable
    for value in image.ravel(order="K"):
        total += value
    return {**sample, "total": total, "kind": np.int64(isinstance(sample["label"], int))}


def refuse_others(sample: dict[str, Any]) -> dict[str, Any]:
    if int(sample["label"]) % 10 == 7:
        raise ValueError("a bad end")
    return sample


def plain_label(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "label": np.int64(sample["label"])}


def data(n: int = N) -> Any:
    """Records of float, byte, boolean and scalar fields; rows of 84 and 5 bytes lie across page bounds."""
    rng, label = np.random.default_rng(0), np.arange(n)
    image, mask = rng.random((n, 3, 7), dtype=np.float32), rng.integers(0, 255, (n, 5), dtype=np.uint8)
    return sources.arrays(image=image, mask=mask, flag=label % 2 == 0, label=label)


def pipe(kind: str, seed: int = 3) -> Pipeline:
    """One of the pipelines that parent and children build alike."""
    if kind == "still":
        return Pipeline(data(), shuffle=False)
    if kind.startswith("ended"):
        made = pipe(kind.replace("ended", "begun"), seed)
        if "skip" in kind:
            made = made.map(refuse_others)
        made = made.map(summed_up).map(plain_label)
        made = made.map(noise) if "numpy" in kind else made
    else:
        made = Pipeline(data(), seed=seed, on_error="skip" if "skip" in kind else "raise", max_skipped=1.0)
        if kind.startswith("begun"):
            return made.map(laid_out)
        made = made.map(refuse_some) if kind == "skip" else made
        made = made.map(noise) if kind != "plain" else made
        made = made.map(slowly) if kind == "slow" else made
    return made.map(dropped_pixels, field="image", random="torch") if "torch" in kind else made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What one rank of one consumer reads, and how it behaves."""

    kind: str = "numpy"
    batch_size: int = 8
    epochs: tuple[int, int] = (0, 2)
    rank: int = 0
    world: int = 1
    drop_last: bool = False
    start_step: int = 0
    name: str = ""
    spoil: bool = True
    pause_s: float = 0.0

    def arguments(self) -> dict[str, Any]:
        own = {key: getattr(self, key) for key in ("batch_size", "rank", "world", "drop_last", "start_step")}
        return {**own, "epochs": range(*self.epochs)}

    def attach(self, address: str) -> Loader:
        name = self.name or f"b{self.batch_size}-{self.world}-{self.start_step}-{self.drop_last}"
        return attach(address, pipe(self.kind), name=name, **self.arguments())


def record(batch: Batch) -> list[Any]:
    """All of a batch, to the last bit, as a JSON value; checks its alignment on the way."""
    fields = {}
    for name, tensor in batch.items():
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0, f"{name} is not aligned"
        digest = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
        fields[name] = [str(tensor.dtype), list(tensor.shape), digest]
    return [batch.epoch, batch.step, batch.global_size, batch["index"].tolist(), fields]


def spoil(batch: Batch) -> None:
    for tensor in batch.values():
        tensor.fill_(77)


def read(loader: Any, job: Job) -> list[Any]:
    """The records of all batches, each batch spoilt after it was recorded."""
    records = []
    for batch in loader:
        records.append(record(batch))
        if job.spoil:
            spoil(batch)
        if job.pause_s:
            time.sleep(job.pause_s)
    return records


@functools.cache
def alone(job: Job) -> list[Any]:
    own = dataclasses.replace(job, spoil=False, pause_s=0.0)
    return read(pipe(job.kind).loader(**own.arguments()), own)


def together(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Results of functions that run in threads at the same time; the first error is raised."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = jobs[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a consumer waits for ever"
    if errors:
        raise errors[0]
    return results


def shared(job: Job, address: str) -> tuple[list[Any], dict[str, Any]]:
    """What a job reads from a feeder in a thread of this process, and the loader's counters."""
    loader = job.attach(address)
    return read(loader, job), loader.stats()


def check_shared(pipeline: Pipeline, epochs: int = 2, **options: Any) -> None:
    with Feeder(pipeline, capacity=64, expect=1, **options) as feeder:
        loader = attach(feeder.address, pipeline, 8, epochs=range(epochs))
        assert [record(batch) for batch in loader] == [record(batch) for batch in pipeline.loader(8, epochs)]
        assert loader.stats()["private_batches"] == 0


class Feeder(pipelines.Feeder):
    """A feeder whose time limits no busy machine comes to, where a test does not set them.

    With `overwrite_released` it overwrites released samples at once: who still reads one has other bits then.
    """

    def __init__(self, pipeline: Pipeline, *, overwrite_released: bool = False, **options: Any) -> None:
        self._overwrites = overwrite_released
        super().__init__(pipeline, **{"gate_timeout_s": LIMIT_S, "stall_limit_s": LIMIT_S, **options})

    def _timeout_s(self) -> float | None:
        if self._overwrites and self._stream.has_started:
            stream, ring = self._stream, self._buffers.ring_buffer
            columns = map_writable(ring.fd, Layout(ring.pipeline.fields, ring.capacity))
            low = stream.retained_from
            for position in range(max(stream.floor, low - stream.capacity), low):
                slot = position % stream.capacity
                for column in columns.values():
                    column[slot : slot + 1].view("uint8")[...] = 0xA5
            stream.base = max(stream.base, low)  # no later reader can join there
        return super()._timeout_s()


def read_until(over: threading.Event, job: Job, loader: Loader) -> tuple[list[Any], dict[str, Any]]:
    """What a job reads to the end of the first epoch that began when all was over, and the loader's counters."""
    records = []
    for epoch in loader.epochs():
        last = over.is_set()
        records += read(epoch, job)
        if last:
            break
    loader.close()
    return records, loader.stats()


def check_until(results: list[tuple[list[Any], dict[str, Any]]], jobs: list[Job]) -> None:
    """That each has read what it reads alone, in as many epochs."""
    for (records, _), job in zip(results, jobs, strict=True):
        assert records == alone(dataclasses.replace(job, epochs=(job.epochs[0], records[-1][0] + 1)))


class Child:
    def __init__(self, address: str, *jobs: Job) -> None:
        command = [sys.executable, __file__, address, json.dumps([dataclasses.asdict(job) for job in jobs])]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment())

    def results(self) -> list[tuple[list[Any], dict[str, Any]]]:
        """(records, counters) of each job."""
        out, _ = self.process.communicate(timeout=LIMIT_S)
        assert self.process.returncode == 0, f"the consumer ended with {self.process.returncode}"
        return [(line[0], line[1]) for line in map(json.loads, out.splitlines())]


def wait_until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def descriptors() -> dict[str, str]:
    """This process's descriptors of sockets, memory, pipes and of /proc, and what each of them is.

    Once Ray has been in this process, TCP sockets do not count: threads of Ray open and close channels at any
    time, also after `ray.shutdown`.
    """
    links = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # another thread has closed it
            link = os.readlink(f"/proc/self/fd/{number}")
            if link.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as same:
                    family = same.family
                if "ray" in sys.modules and family in (socket.AF_INET, socket.AF_INET6):
                    continue
                link += f" {family!r}"
            links[number] = link
    ours = ("socket:", "/memfd:", "pipe:", "anon_inode:")
    return {n: link for n, link in links.items() if link.startswith(ours) or link.endswith("/pagemap")}


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test: no child process, no socket file or directory, no descriptor is left.

    The directory for temporary files has a short path. `multiprocessing` binds sockets in a directory below it,
    and where their path is too long for that, a worker of torch's `DataLoader` prints the error and never answers.
    """
    import torch  # noqa: F401 - its own descriptors are none of ours

    tmp_path_factory.getbasetemp()  # decided at its first use, from the directory for temporary files
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp", ignore_cleanup_errors=True) as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.setenv("TMPDIR", directory)
        before, others = set(descriptors().items()), set(psutil.Process().children(recursive=True))
        yield
        try:
            # Children of an earlier test, or of what it imported, are none of this test's.
            wait_until(lambda: not set(psutil.Process().children()) - others)
        finally:  # one failure stays one
            for child in set(psutil.Process().children(recursive=True)) - others:
                child.kill()
        assert os.listdir(directory) == []
    if not set(descriptors().items()) <= before:
        gc.collect()  # dear with torch among the objects
    # A Ray that an earlier test has used opens and closes sockets of its own for a while.
    end = time.monotonic() + 30
    while (opened := set(descriptors().items()) - before) and time.monotonic() < end:
        time.sleep(0.05)
    assert not opened, f"left open: {sorted(opened)}"


def main(address: str, listed: str) -> None:
    jobs = [Job(**{**fields, "epochs": tuple(fields["epochs"])}) for fields in json.loads(listed)]
    for result in together([functools.partial(shared, job, address) for job in jobs]):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
