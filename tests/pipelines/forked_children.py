"""Processes forked from a parent that has imported everything, for tests that kill consumers and feeders anywhere.

A process says what it does in JSON lines over a pipe, and reads orders from another; nothing else links it to its
parent. A torn last line is a batch that nobody trained on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from core_pipes import noise

from pipelines import Batch, Pipeline, sources
from pipelines.loader import stream_client

Record = list[Any]
BAD = frozenset({3, 13, 14, 15, 16, 17, 30})  # records that cannot be prepared, in `skip` pipelines


def data(n: int) -> Any:
    """Rows that are views of the ring (6912 bytes, a multiple of 64), that sometimes are, and that never are."""
    rng = np.random.default_rng(n)
    return sources.arrays(
        id=f"rows {n}",
        image=rng.random((n, 3, 24, 24), dtype=np.float32),
        mask=rng.integers(0, 255, (n, 1000), dtype=np.uint8),
        label=np.arange(n),
    )


def refuse_bad(sample: dict[str, Any]) -> dict[str, Any]:
    if int(sample["label"]) in BAD:
        raise ValueError("a bad record")
    return sample


def halved(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "image": sample["image"] / 2}


def slowly(sample: dict[str, Any], *, seconds: float) -> dict[str, Any]:
    time.sleep(seconds)
    return sample


def pipeline(kind: str, n: int, slow_s: float = 0.0) -> Pipeline:
    """A pipeline of `plain`, `noise` or `skip`; how slow it is changes no sample."""
    made = Pipeline(data(n), seed=n, on_error="skip" if kind == "skip" else "raise", max_skipped=1.0)
    made = made.map(refuse_bad if kind == "skip" else halved)
    if kind != "plain":
        made = made.map(noise)
    return made.map(functools.partial(slowly, seconds=slow_s)) if slow_s else made


class Say(Protocol):
    """Send one message to the parent."""

    def __call__(self, **said: Any) -> None: ...


class Child:
    """A forked process; `lines` takes what it has said.

    Attributes:
        ended: whether its pipe has come to an end, and so has it.
    """

    def __init__(self, body: Callable[[Say, int], None]) -> None:
        self.reading, writing = os.pipe()
        listening, self._hold = os.pipe()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            stream_client._WAIT_S = 1e6  # no wake-up may be left to the time limit
            _be(body, writing, listening)
        os.close(writing)
        os.close(listening)
        os.set_blocking(self.reading, False)
        self.ended = self.is_closed = False
        self._buffer = b""

    def lines(self) -> list[dict[str, Any]]:
        """The messages that have come since the last call."""
        while not self.ended:
            try:
                got = os.read(self.reading, 1 << 16)
            except BlockingIOError:
                break
            self._buffer += got
            self.ended = not got
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def signal(self, number: int) -> None:
        """Send a signal; one that has ended is still our child, so its number is nobody else's."""
        os.kill(self.pid, number)

    def order(self, orders: bytes) -> None:
        """Write to what it listens at; one that has just died hears nothing."""
        if self._hold >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._hold, orders)

    def ask_to_end(self) -> None:
        """Close what it listens at."""
        if self._hold >= 0:
            os.close(self._hold)
            self._hold = -1

    def close(self) -> None:
        """Kill it if it lives, and wait for its end."""
        if not self.is_closed:
            self.is_closed = True
            self.signal(signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.ask_to_end()
            os.close(self.reading)


def _be(body: Callable[[Say, int], None], writing: int, listening: int) -> None:
    """The child's life; does not return."""
    status = 1
    try:
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd not in (writing, listening):
                # Another's end of a pipe, kept open here, would hide that other's death.
                try:
                    os.close(fd)
                except OSError:
                    continue

        def say(**said: Any) -> None:
            line = json.dumps(said).encode() + b"\n"
            while line:
                line = line[os.write(writing, line) :]

        warnings.simplefilter("error")
        alone = ("working alone: (no feeder|the stream is not)", ".* goes on alone")
        for expected in (*alone, "left out", "no feeder answers"):
            warnings.filterwarnings("ignore", message=expected)
        try:
            body(say, listening)
            status = 0
        except BaseException:
            say(error=traceback.format_exc())
    finally:
        os._exit(status)


def record(batch: Batch) -> Record:
    """All of a batch to the last bit: [epoch, step, global size, indices, digest]."""
    digest = hashlib.sha256()
    for name, tensor in sorted(batch.items()):
        if tensor.numel() and tensor.data_ptr() % 64:
            raise AssertionError(f"{name} is not aligned")
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().data)
    return [batch.epoch, batch.step, batch.global_size, batch["index"].tolist(), digest.hexdigest()[:24]]


def spoil(batch: Batch) -> None:
    """Overwrite all of a batch in place."""
    for tensor in batch.values():
        tensor.fill_(77)
