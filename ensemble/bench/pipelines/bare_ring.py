"""The limit of the pipelines study: a bare ring, the least that shared preparation can cost.

Producers, eventfds and views: no protocol, no guard, no order to speak of, no failure that it survives.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from ensemble.bench.pipelines.config import RING_BATCHES, Config, say
from ensemble.bench.pipelines.step import Step
from pipelines import Pipeline


class BareRing:
    """Memory of eight batches; producer p of n prepares the batches p, p + n, p + 2 n ... in turn.

    For each producer and consumer there is a semaphore of full and one of free batches.
    """

    def __init__(self, config: Config) -> None:
        self.producers = config.prep_workers
        batches = max(2, RING_BATCHES // self.producers)  # of each producer
        shape = (batches * self.producers * config.batch_size, 3, config.size, config.size)
        memory = mmap.mmap(-1, int(np.prod(shape)))
        self.images = np.frombuffer(memory, np.uint8).reshape(shape)
        self.consumers = {number: place for place, number in enumerate(config.here)}
        each, flags = range(len(self.consumers)), os.EFD_SEMAPHORE
        self.full = [[os.eventfd(0, flags) for _ in each] for _ in range(self.producers)]
        self.free = [[os.eventfd(batches, flags) for _ in each] for _ in range(self.producers)]

    def produce(self, config: Config, pipeline: Pipeline, producer: int) -> None:
        """Decode and resize in order, straight into the ring."""
        import cv2
        import simplejpeg

        cv2.setNumThreads(0)
        source, total = pipeline.source, len(config.epochs(pipeline)) * len(pipeline)
        for start in range(producer * config.batch_size, total, self.producers * config.batch_size):
            for free in self.free[producer]:
                os.eventfd_read(free)
            for position in range(start, min(total, start + config.batch_size)):
                image = simplejpeg.decode_jpeg(source[position % len(source)]["image"])
                image = cv2.resize(image, (config.size, config.size), interpolation=cv2.INTER_LINEAR)
                cv2.split(image, list(self.images[position % len(self.images)]))
            for full in self.full[producer]:
                os.eventfd_write(full, 1)

    def consume(self, config: Config, pipeline: Pipeline, number: int) -> Step:
        """Take a view of each batch and give it back."""
        step, place = Step(config), self.consumers[number]
        total = len(config.epochs(pipeline)) * len(pipeline)
        for batch, start in enumerate(range(0, total, config.batch_size)):
            producer = batch % self.producers
            os.eventfd_read(self.full[producer][place])
            slot = start % len(self.images)
            if start == 0:
                say("first", number)
            step(self.images[slot : slot + min(config.batch_size, total - start)])
            os.eventfd_write(self.free[producer][place], 1)
        return step
