"""One run of `single`: a process that reads batches as a user's training script would, and measures itself.

`python -m ensemble.bench.pipelines.single_process JSON`, with the fields of `single.Config`; prints one JSON line.
The DataLoader is one that a careful user writes: an own Dataset around simplejpeg and OpenCV, persistent workers,
one thread in each, the default collation of tensors, records that all workers share where they are in memory.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import cv2
import numpy as np
import pyarrow.parquet
import simplejpeg
import torch
from torch.utils import data

from ensemble.bench.pipelines.processes import process_clock_s, process_tree, proportional_set_bytes
from ensemble.bench.pipelines.single import DATALOADER, PHOTOS, Config
from pipelines import Pipeline, sources, stages

_SIDE = {PHOTOS: 224}  # pixels; of CIFAR-10 32
_WARM_UP_BATCHES = 4


def make_pipeline(config: Config) -> Pipeline:
    """What a user of this library writes."""
    if config.data == PHOTOS:
        source: Any = sources.tar(config.path, rename={"jpeg": "image", "jpg": "image"})
        pipe = Pipeline(source, seed=0).map(stages.decode_jpeg("image"))
        return pipe.map(stages.random_resized_crop("image", size=_SIDE[PHOTOS])).map(stages.select("image"))
    pipe = Pipeline(sources.parquet(config.path, columns=("image", "label")), seed=0)
    return pipe.map(stages.decode_jpeg("image")).map(stages.random_resized_crop("image", size=32))


class JpegDataset(data.Dataset[Any]):
    """What a user of a DataLoader writes: bytes of JPEG files, decoded, cropped at random and resized.

    Args:
        records: JPEG bytes of each record.
        labels: int64 [n], or None.
        side: pixels of a side.
    """

    def __init__(self, records: Any, labels: torch.Tensor | None, side: int) -> None:
        self.records, self.labels, self.side = records, labels, side

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image = simplejpeg.decode_jpeg(self.records[index])
        image = crop_and_resize(image, self.side)
        sample = {"image": torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))}
        if self.labels is not None:
            sample["label"] = self.labels[index]
        return sample


class TarRecords:
    """The files of a tar archive, of which each process opens the archive at its first read."""

    def __init__(self, path: str) -> None:
        with tarfile.open(path, "r:") as archive:
            self.places = [(each.offset_data, each.size) for each in archive if each.isfile()]
        self.path = path
        self.file: io.FileIO | None = None

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> bytes:
        if self.file is None:
            self.file = io.FileIO(self.path)
        offset, size = self.places[index]
        self.file.seek(offset)
        return self.file.read(size)


class ArrowRecords:
    """The column of image bytes of a Parquet file, in memory."""

    def __init__(self, column: Any) -> None:
        self.column = column.combine_chunks().field("bytes")

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> bytes:
        value: bytes = self.column[index].as_py()
        return value


def crop_and_resize(image: np.ndarray[Any, Any], side: int) -> np.ndarray[Any, Any]:
    """Random resized crop of an image [H, W, C], as torchvision draws it."""
    rows, columns = image.shape[:2]
    low, high = math.log(3 / 4), math.log(4 / 3)
    for _ in range(10):
        area = rows * columns * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(low, high))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= columns and 0 < height <= rows:
            top, left = random.randint(0, rows - height), random.randint(0, columns - width)
            image = image[top : top + height, left : left + width]
            break
    return cv2.resize(image, (side, side), interpolation=cv2.INTER_LINEAR)


def make_dataloader(config: Config) -> data.DataLoader[Any]:
    """What a user of a DataLoader writes."""
    if config.data == PHOTOS:
        dataset = JpegDataset(TarRecords(config.path), None, _SIDE[PHOTOS])
    else:
        table = pyarrow.parquet.read_table(config.path, columns=["image", "label"])
        dataset = JpegDataset(ArrowRecords(table["image"]), torch.from_numpy(table["label"].to_numpy()), 32)
    workers: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 2, "worker_init_fn": _start_worker}
    return data.DataLoader(
        dataset, config.batch_size, shuffle=True, num_workers=config.workers, **(workers if config.workers else {})
    )


def _start_worker(_worker: int) -> None:
    cv2.setNumThreads(0)


def read_epochs(loader: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch, as a training script reads them."""
    while True:
        yield from loader


def measure(config: Config) -> dict[str, float]:
    """Read the first batch, then `samples` more, each batch with a step; see `single.Row` for the figures."""
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    before = time.perf_counter()
    loader: Iterable[Any]
    if config.design == DATALOADER:
        loader = make_dataloader(config)
    else:
        loader = make_pipeline(config).loader(config.batch_size, workers=config.workers)
    batches = read_epochs(loader)
    next(batches)
    first_s = time.perf_counter() - before
    for _ in range(_WARM_UP_BATCHES):
        next(batches)
    step: Callable[[], None] = (lambda: time.sleep(config.step_ms / 1000)) if config.step_ms else (lambda: None)
    clocks, start, samples = _cpu_clocks(), time.perf_counter(), 0
    while samples < config.samples:
        batch = next(batches)
        samples += len(batch["image"])
        step()
    wall_s = time.perf_counter() - start
    cpu_s = sum(now - clocks.get(pid, 0.0) for pid, now in _cpu_clocks().items())
    memory = sum(map(proportional_set_bytes, process_tree(os.getpid())))
    return {
        "samples_per_s": samples / wall_s,
        "first_ms": 1000 * first_s,
        "cpu_s_per_1000": 1000 * cpu_s / samples,
        "memory_mb": memory / 1e6,
    }


def _cpu_clocks() -> dict[int, float]:
    return {pid: process_clock_s(pid) for pid in process_tree(os.getpid())}


if __name__ == "__main__":
    print(json.dumps(measure(Config(**json.loads(sys.argv[1])))), flush=True)
