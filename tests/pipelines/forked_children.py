"""Processes forked from a parent that has imported everything, for tests that kill consumers and feeders anywhere.

A process says what it does in JSON lines over a pipe, and reads orders from another; nothing else links it to its
parent. A torn last line is a batch that nobody trained on.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from core_pipes import noise

from pipelines import Pipeline, sources
from pipelines.loader import stream_client

Record = list[Any]
BAD = frozenset({3, 13, 14, 15, 16, 17, 30})  # records that cannot be prepared, in `skip` pipelines


def data(n: int) -> Any:
    """Rows that are views of the ring (6912 bytes, a multiple of 64), that sometimes are, and that never are."""
    rng = np.random.default_rng(n)
    image, mask = rng.random((n, 3, 24, 24), dtype=np.float32), rng.integers(0, 255, (n, 1000), dtype=np.uint8)
    return sources.arrays(id=f"rows {n}", image=image, mask=mask, label=np.arange(n))


def refuse_bad(sample: dict[str, Any]) -> dict[str, Any]:
    if int(sample["label"]) in BAD:
        raise ValueError("a bad record")
    return sample


def halved(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "image": sample["image"] / 2}


def scaled(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        **batch,
        "mean": batch["image"].mean((1, 2, 3)),
        "norm": torch.linalg.vector_norm(batch["image"], dim=(1, 2, 3)),
    }


def slowly(sample: dict[str, Any], *, seconds: float) -> dict[str, Any]:
    time.sleep(seconds)
    return sample


def pipeline(kind: str, n: int, slow_s: float = 0.0) -> Pipeline:
    """A pipeline of `plain`, `noise` (with a batch stage) or `skip`; how slow it is changes no sample."""
    made = Pipeline(data(n), seed=n, on_error="skip" if kind == "skip" else "raise", max_skipped=1.0)
    made = made.map(refuse_bad if kind == "skip" else halved)
    if kind != "plain":
        made = made.map(noise)
    if kind == "noise":
        made = made.map_batches(scaled, batch_size=6)
    return made.map(functools.partial(slowly, seconds=slow_s)) if slow_s else made


Say = Callable[..., None]  # sends one message, its keywords, to the parent


class Child:
    """A forked process; `lines` takes what it has said; it has `ended` where its pipe has."""

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
        with contextlib.suppress(BlockingIOError):
            while not self.ended:
                received = os.read(self.reading, 1 << 16)
                self._buffer += received
                self.ended = not received
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def order(self, orders: bytes) -> None:
        """Write to what it listens at; one that has just died hears nothing."""
        if self._hold >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._hold, orders)

    def ask_to_end(self) -> None:
        if self._hold >= 0:
            os.close(self._hold)
            self._hold = -1

    def close(self) -> None:
        """Kill it if it lives, and wait for its end: it is still our child, so its number is nobody else's."""
        if not self.is_closed:
            self.is_closed = True
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.ask_to_end()
            os.close(self.reading)


def _be(body: Callable[[Say, int], None], writing: int, listening: int) -> None:
    """The child's life; does not return."""

    def say(**message: Any) -> None:
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(writing, line) :]

    status = 1
    try:
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd not in (writing, listening):
                with contextlib.suppress(OSError):
                    os.close(fd)  # another's end of a pipe, kept open here, would hide that other's death
        warnings.simplefilter("error")
        alone = ("working alone: (no|the stream is not)", ".* goes on alone", "no feeder answers")
        for expected in (*alone, "left out"):
            warnings.filterwarnings("ignore", message=expected)
        try:
            body(say, listening)
            status = 0
        except BaseException:
            say(error=traceback.format_exc())
    finally:
        os._exit(status)
