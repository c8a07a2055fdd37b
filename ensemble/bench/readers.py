"""The member processes of the pipelines study: `python -m ensemble.bench.readers CONFIG`.

It imports what members need once, then forks them, so that a run of sixteen members does not spend its time
on sixteen imports. Each child says "first" when it holds its first batch and "last" after its last one, and
then stays until standard input ends, so that its CPU clock can still be read. One that fails says "died", and
why; the others are ended then.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from pipelines import Feeder, Pipeline, attach, sources, stages

BARE = "bare ring"
RING_BATCHES = 8


@dataclass(frozen=True)
class Config:
    """One configuration of the study.

    Attributes:
        design: "bare ring" (the limit), "independent" or "node".
        members: processes that read.
        prep_workers: preparation processes, of the node or of each independent member.
        batch_size, samples: of each member; samples at least, after its first batch, in whole epochs.
        step_ms: what a member does with a batch: a timed wait that uses no CPU (an emulated accelerator).
        data: the tar archive of JPEG photographs.  size: pixels of a side after decoding.
        address: of the feeder, for "node".
    """

    design: str
    members: int
    prep_workers: int
    batch_size: int
    samples: int
    step_ms: float
    data: str
    size: int
    address: str | None = None

    def pipeline(self) -> Pipeline:
        """Photographs to `size` pixels a side; epochs of all photographs, in an order of their own each."""
        renamed = {"jpeg": "image", "jpg": "image"}
        return (
            Pipeline(sources.tar(self.data, rename=renamed), seed=0)
            .map(stages.decode_jpeg("image"))
            .map(stages.resize("image", size=(self.size, self.size)))
            .map(stages.select("image"))
        )

    def epochs(self, pipeline: Pipeline) -> range:
        """As many epochs as hold `samples` after the first batch, with which the clock starts."""
        return range(-(-(self.samples + self.batch_size) // len(pipeline)))

    def capacity(self) -> int:
        """Ring slots: eight batches."""
        return RING_BATCHES * self.batch_size


def take(config: Config, pipeline: Pipeline, number: int) -> None:
    """One member: take every batch, do nothing with it but wait `step_ms`."""
    with contextlib.ExitStack() as own:
        address = config.address
        if address is None:
            feeder = Feeder(pipeline, workers=config.prep_workers, capacity=config.capacity())
            address = own.enter_context(feeder).address
            own.callback(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # while the feeder is put away
        loader = attach(address, pipeline, config.batch_size, config.epochs(pipeline), f"member-{number}")
        for count, _batch in enumerate(loader):
            if count == 0:
                _say("first", number)
            if config.step_ms:
                time.sleep(config.step_ms / 1000)
        if loader.stats()["private_batches"]:
            raise RuntimeError("it lost its feeder, so that this would be no figure of sharing")
        _until_the_end(number)


def _until_the_end(number: int) -> None:
    """Say that the last batch was taken, and stay, so that the process's clock can still be read."""
    _say("last", number)
    sys.stdin.read()


def _say(word: str, number: int, text: str = "") -> None:
    os.write(1, f"{word} {number} {text}\n".encode())


# --- the limit: a bare ring ------------------------------------------------------------------------------


class BareRing:
    """The least that shared preparation can cost: one producer, eventfds, views, no protocol and no guard.

    Memory of eight batches; each consumer has a semaphore of full and one of free batches.
    """

    def __init__(self, config: Config) -> None:
        shape = (RING_BATCHES * config.batch_size, 3, config.size, config.size)
        memory = mmap.mmap(-1, int(np.prod(shape)))
        self.images = np.frombuffer(memory, np.uint8).reshape(shape)
        flags = os.EFD_SEMAPHORE
        self.full = [os.eventfd(0, flags) for _ in range(config.members)]
        self.free = [os.eventfd(RING_BATCHES, flags) for _ in range(config.members)]

    def produce(self, config: Config, pipeline: Pipeline) -> None:
        """Decode and resize in order, straight into the ring."""
        import cv2
        import simplejpeg

        cv2.setNumThreads(0)
        source, total = pipeline.source, len(config.epochs(pipeline)) * len(pipeline)
        for start in range(0, total, config.batch_size):
            for free in self.free:
                os.eventfd_read(free)
            for position in range(start, min(total, start + config.batch_size)):
                image = simplejpeg.decode_jpeg(source[position % len(source)]["image"])
                image = cv2.resize(image, (config.size, config.size), interpolation=cv2.INTER_LINEAR)
                cv2.split(image, list(self.images[position % len(self.images)]))
            for full in self.full:
                os.eventfd_write(full, 1)

    def consume(self, config: Config, pipeline: Pipeline, number: int) -> None:
        """Take a view of each batch and give it back."""
        total = len(config.epochs(pipeline)) * len(pipeline)
        for start in range(0, total, config.batch_size):
            os.eventfd_read(self.full[number])
            slot = start % len(self.images)
            _view = self.images[slot : slot + config.batch_size]
            if start == 0:
                _say("first", number)
            if config.step_ms:
                time.sleep(config.step_ms / 1000)
            os.eventfd_write(self.free[number], 1)


# --- the processes -----------------------------------------------------------------------------------------


def main() -> None:
    """Fork the members and stay until standard input ends, or one of them dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    config = Config(**json.loads(sys.argv[1]))
    pipeline = config.pipeline()
    ring = BareRing(config) if config.design == BARE else None
    if ring is None:
        import torch

        torch.set_num_threads(1)
    children = {}  # a descriptor that is readable once the process has ended -> its number, its id
    for number in range(-1 if ring else 0, config.members):
        pid = os.fork()
        if not pid:
            _be(config, pipeline, ring, number)
        if number < 0:
            _say("producer", pid)
        children[os.pidfd_open(pid)] = (number, pid)
    select.select([sys.stdin, *children], [], [])
    for number, pid in children.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status < 0:
            _say("died", number, f"killed by signal {-status}")


def _be(config: Config, pipeline: Pipeline, ring: BareRing | None, number: int) -> NoReturn:
    """What a forked process does until it ends: member `number`, or the bare ring's producer (-1)."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    status = 0
    try:
        if ring is None:
            take(config, pipeline, number)
        elif number < 0:
            ring.produce(config, pipeline)
            sys.stdin.read()
        else:
            ring.consume(config, pipeline, number)
            _until_the_end(number)
    except Exception as error:
        _say("died", number, " ".join(f"{type(error).__name__}: {error}".split())[:2000])  # at once, to a pipe
        status = 1
    except SystemExit:
        pass
    finally:
        os._exit(status)  # what the parent process has set up to happen at its end is not ours


if __name__ == "__main__":
    main()
