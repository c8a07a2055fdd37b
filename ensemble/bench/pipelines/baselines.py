"""What shared preparation is compared with: a bare ring (the limit) and a torch DataLoader for each member."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.bench.pipelines.config import RING_BATCHES, Config, send_message
from ensemble.bench.pipelines.step import Step
from pipelines import Pipeline
from pipelines.prepare.sample_maker import SampleMaker

if TYPE_CHECKING:
    import torch


class BareRing:
    """The least that shared preparation can cost: memory of eight batches, eventfds and views.

    There is no protocol, no guard and no recovery. Producer p of n prepares the batches p, p + n, p + 2 n ...;
    for each producer and consumer one semaphore counts full and another free batches.
    """

    def __init__(self, config: Config) -> None:
        self.producers = config.prep_workers
        batches = max(2, RING_BATCHES // self.producers)  # of each producer
        shape = (batches * self.producers * config.batch_size, 3, config.size, config.size)
        memory = mmap.mmap(-1, int(np.prod(shape)))
        self.images = np.frombuffer(memory, np.uint8).reshape(shape)
        self.consumers = {number: place for place, number in enumerate(config.local_members)}
        each, flags = range(len(self.consumers)), os.EFD_SEMAPHORE
        self.full = [[os.eventfd(0, flags) for _ in each] for _ in range(self.producers)]
        self.free = [[os.eventfd(batches, flags) for _ in each] for _ in range(self.producers)]

    def produce(self, config: Config, pipeline: Pipeline, producer: int) -> None:
        """Decode and resize photographs in order, into the ring."""
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
        """Pass a view of each batch to the member's step and release it."""
        step, place = Step(config), self.consumers[number]
        total = len(config.epochs(pipeline)) * len(pipeline)
        for batch, start in enumerate(range(0, total, config.batch_size)):
            producer = batch % self.producers
            os.eventfd_read(self.full[producer][place])
            slot = start % len(self.images)
            if start == 0:
                send_message("first", number)
            step(self.images[slot : slot + min(config.batch_size, total - start)])
            os.eventfd_write(self.free[producer][place], 1)
        return step


class Photographs:
    """A map-style dataset of decoded and resized images, uint8 [3, size, size]."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._maker = SampleMaker(pipeline)

    def __len__(self) -> int:
        return len(self._maker.pipeline)

    def __getitem__(self, index: int) -> torch.Tensor:
        import torch

        return torch.from_numpy(self._maker.make(index, epoch=0)["image"])


def make_dataloader(config: Config, pipeline: Pipeline, number: int) -> Any:
    """The DataLoader of one member: the same source and stages, with persistent workers."""
    import torch

    return torch.utils.data.DataLoader(
        Photographs(pipeline),  # type: ignore[arg-type]  # any object with a length and items
        batch_size=config.batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(number),
        num_workers=config.prep_workers,
        persistent_workers=True,
        worker_init_fn=_start_worker,
    )


def _start_worker(_worker: int) -> None:
    import cv2

    cv2.setNumThreads(0)
    send_message("producer", os.getpid())
