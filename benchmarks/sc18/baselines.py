"""What shared preparation is compared with: a bare ring (the limit) and a torch DataLoader for each member."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.sc18.config import RING_BATCHES, Config
from pipelines import Pipeline
from pipelines.sources import Source

if TYPE_CHECKING:
    import torch


class BareRing:
    """The least that shared preparation can cost: memory of eight batches, eventfds and views.

    There is no protocol, no guard and no recovery. Producer p of n prepares the batches p, p + n, p + 2 n ...;
    for each producer and consumer one semaphore counts full and another free batches.
    """

    def __init__(self, config: Config, pipeline: Pipeline) -> None:
        self.config, self.source = config, pipeline.source
        self.total = len(config.epochs(pipeline)) * len(pipeline)
        self.producers = config.prep_workers
        batches = max(2, RING_BATCHES // self.producers)  # of each producer
        shape = (batches * self.producers * config.batch_size, 3, config.size, config.size)
        self.images = np.frombuffer(mmap.mmap(-1, int(np.prod(shape))), np.uint8).reshape(shape)
        self.consumers = {number: place for place, number in enumerate(config.local_members)}
        consumer_range, flags = range(len(self.consumers)), os.EFD_SEMAPHORE
        self.full = [[os.eventfd(0, flags) for _ in consumer_range] for _ in range(self.producers)]
        self.free = [[os.eventfd(batches, flags) for _ in consumer_range] for _ in range(self.producers)]

    def produce(self, producer: int) -> None:
        """Decode and resize photographs in order, into the ring."""
        import cv2

        cv2.setNumThreads(0)
        size = self.config.batch_size
        for start in range(producer * size, self.total, self.producers * size):
            for free in self.free[producer]:
                os.eventfd_read(free)
            for position in range(start, min(self.total, start + size)):
                image = prepare_image(self.source[position % len(self.source)]["image"], self.config)
                cv2.split(image, list(self.images[position % len(self.images)]))
            for full in self.full[producer]:
                os.eventfd_write(full, 1)

    def read(self, number: int) -> Iterator[dict[str, Any]]:
        """Views of each batch for one member; a batch is released when the next one is asked for."""
        place = self.consumers[number]
        for batch, start in enumerate(range(0, self.total, self.config.batch_size)):
            producer = batch % self.producers
            os.eventfd_read(self.full[producer][place])
            slot = start % len(self.images)
            yield {"image": self.images[slot : slot + min(self.config.batch_size, self.total - start)]}
            os.eventfd_write(self.free[producer][place], 1)


def prepare_image(jpeg: bytes, config: Config) -> np.ndarray[Any, Any]:
    """The decoded and resized image, uint8 [size, size, 3], by simplejpeg and OpenCV alone."""
    import cv2
    import simplejpeg

    image: np.ndarray[Any, Any] = simplejpeg.decode_jpeg(jpeg)
    return np.asarray(cv2.resize(image, (config.size, config.size), interpolation=cv2.INTER_LINEAR))


class JpegImages:
    """A map-style dataset as a user of a DataLoader writes it: images uint8 [3, size, size]."""

    def __init__(self, source: Source, config: Config) -> None:
        self.source, self.config = source, config

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        import torch

        image = prepare_image(self.source[index]["image"], self.config)
        return {"image": torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))}


def make_dataloader(dataset: Any, batch_size: int, workers: int) -> torch.utils.data.DataLoader[Any]:
    """A DataLoader as a careful user makes it: persistent workers, of one thread each."""
    from torch.utils.data import DataLoader

    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
        worker_init_fn=_start_worker,
    )


def _start_worker(_worker: int) -> None:
    import cv2

    cv2.setNumThreads(0)
