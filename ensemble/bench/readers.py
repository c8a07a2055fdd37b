"""The member processes of the pipelines study: `python -m ensemble.bench.readers CONFIG`.

It imports what members need once, then forks them, so that a run of sixteen members does not spend its time
on sixteen imports. Each child says "first" when it holds its first batch and "last" after its last one, and
then stays until standard input ends, so that its CPU clock can still be read.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

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
        batch_size, samples: of each member; samples is a whole number of epochs at least.
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
        """As many epochs as hold `samples`."""
        return range(-(-self.samples // len(pipeline)))

    def capacity(self) -> int:
        """Ring slots: eight batches."""
        return RING_BATCHES * self.batch_size


def take(config: Config, pipeline: Pipeline, number: int) -> None:
    """One member: take every batch, do nothing with it but wait `step_ms`."""
    epochs = config.epochs(pipeline)
    name = f"member-{number}"
    if config.design == "node":
        assert config.address is not None
        _drain(config, attach(config.address, pipeline, config.batch_size, epochs, name))
    else:
        with Feeder(pipeline, workers=config.prep_workers, capacity=config.capacity()) as feeder:
            _drain(config, attach(feeder.address, pipeline, config.batch_size, epochs, name))
            _say("last", number)
            sys.stdin.read()


def _drain(config: Config, loader: Any) -> None:
    number = int(loader._name.rpartition("-")[2])
    for count, _batch in enumerate(loader):
        if count == 0:
            _say("first", number)
        if config.step_ms:
            time.sleep(config.step_ms / 1000)


def _say(word: str, number: int) -> None:
    os.write(1, f"{word} {number}\n".encode())


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


def main() -> None:
    """Fork the members and stay until standard input ends."""
    config = Config(**json.loads(sys.argv[1]))
    pipeline = config.pipeline()
    ring = BareRing(config) if config.design == BARE else None
    if ring is None:
        import torch

        torch.set_num_threads(1)
    children = []
    for number in range(-1 if ring else 0, config.members):
        pid = os.fork()
        if pid:
            children.append(pid)
            continue
        try:
            if ring is None:
                take(config, pipeline, number)
            elif number < 0:
                ring.produce(config, pipeline)
            else:
                ring.consume(config, pipeline, number)
            if number >= 0 and config.design != "independent":
                _say("last", number)
            sys.stdin.read()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    if ring is not None:
        _say("producer", children[0])
    sys.stdin.read()
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
