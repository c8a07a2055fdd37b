"""The processes of a chaos run, each forked from one parent that has imported everything: consumers, feeders.

A process says what it does in JSON lines over a pipe. Nothing else links it to its parent, so that it can be
killed at any point; a torn last line is a batch that nobody trained on.
"""

from __future__ import annotations

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

from chaos_plan import Member, Plan

from pipelines import Batch, Feeder, attach, resident
from pipelines.loader import stream_client

Record = list[Any]
CACHE = "cache"


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
        self.ended = False
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

    def ask_to_end(self) -> None:
        """Close what a feeder waits at."""
        if self._hold >= 0:
            os.close(self._hold)
            self._hold = -1

    def close(self) -> None:
        """Kill it if it lives, and wait for its end."""
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


def train_on(batch: Batch, pause_s: float, overwrite: bool) -> Record:
    """Record a batch and work on it for a while, in which it must stay what it is."""
    seen = record(batch)
    if overwrite:
        spoil(batch)
    before = record(batch)
    if pause_s:
        time.sleep(pause_s)
    if record(batch) != before:
        raise AssertionError(f"the batch {seen[:2]} changed while it was in use")
    return seen


def consume(
    plan: Plan,
    member: Member,
    rank: int,
    epochs: range | None,
    done: int,
    address: str,
    still: list[Record],
    say: Say,
) -> None:
    """One rank of a member, from its `done`-th batch on.

    Args:
        epochs: None to ask the feeder for the next boundary.
        still: what the resident set has to be.
    """
    steps = -(-plan.n // member.batch_size) if not member.drop_last else plan.n // member.batch_size
    passed, step = divmod(done, steps) if steps else (0, 0)
    count = member.epochs[1] - member.epochs[0]
    loader = attach(
        address,
        plan.pipeline(),
        member.batch_size,
        count if epochs is None else range(epochs.start + passed, epochs.stop),
        name=member.name,
        rank=rank,
        world=member.world,
        drop_last=member.drop_last,
        start_step=step,
    )
    say(epochs=[loader.reading.epochs.start, loader.reading.epochs.stop])
    for epoch in loader.epochs():
        for batch in epoch:
            if member.leave_after is not None and done >= member.leave_after:
                if member.leave == "exit":
                    say(stats=loader.stats())
                    os._exit(0)
                loader.close()
                break
            say(batch=train_on(batch, member.pause_s, member.spoil))
            done += 1
        else:
            if member.validate:
                check_resident(plan, address, still)
            continue
        break
    say(stats=loader.stats())


def check_resident(plan: Plan, address: str, still: list[Record]) -> None:
    """Read the resident set, twice, overwriting it each time."""
    held = resident(address, "still", plan.still())
    for _ in range(2):
        if [train_on(batch, 0.0, True) for batch in held.loader(7)] != still:
            raise AssertionError("the resident set is another")


def directory_of(address: str) -> str:
    """Where a stream's feeders keep samples: the next one finds what one that was killed has kept."""
    return os.path.join(os.path.dirname(address), CACHE)


def feed(plan: Plan, address: str, expect: int, say: Say, listening: int) -> None:
    """A feeder, until its parent asks it to end."""
    feeder = Feeder(
        plan.pipeline(),
        workers=plan.workers,
        threads=plan.threads,
        cache=plan.cache,
        cache_dir=directory_of(address) if plan.cache == "disk" else None,
        capacity=plan.capacity,
        expect=expect,
        gate_timeout_s=0.5,
        resident={"still": plan.still()},
        address=address,
        policy=plan.policy,
        stall_limit_s=plan.stall_limit_s,
        overwrite_released=plan.poison,
    )
    with feeder:
        say(ready=True)
        os.read(listening, 1)
    say(stats=feeder.stats())
