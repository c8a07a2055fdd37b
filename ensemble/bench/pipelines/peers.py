"""What the pipelines study compares with: a plain torch DataLoader for each member.

It prepares with the same source and stages, in a Dataset, with as many workers as there are preparation
workers; these stay from epoch to epoch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ensemble.bench.pipelines.config import Config, say
from pipelines import Pipeline
from pipelines.prepare.preparer import Preparer

if TYPE_CHECKING:
    import torch


class Photographs:
    """A map-style dataset of decoded and resized images, uint8 [3, size, size]."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._preparer = Preparer(pipeline)

    def __len__(self) -> int:
        return len(self._preparer.pipeline)

    def __getitem__(self, index: int) -> torch.Tensor:
        import torch

        return torch.from_numpy(self._preparer.sample(index, epoch=0)["image"])


def dataloader(config: Config, pipeline: Pipeline, number: int) -> Any:
    """The DataLoader of one member."""
    import torch

    return torch.utils.data.DataLoader(
        Photographs(pipeline),  # type: ignore[arg-type]  # any object with a length and items will do
        batch_size=config.batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(number),
        num_workers=config.prep_workers,
        persistent_workers=True,
        worker_init_fn=_be_a_worker,
    )


def _be_a_worker(_worker: int) -> None:
    import cv2

    cv2.setNumThreads(0)
    say("producer", os.getpid())
