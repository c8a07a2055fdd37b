"""The real members of the study: one small network with emulated accelerators of uneven speed, one pipeline.

The pipeline decodes generated photographs, crops, flips and scales them. An accelerator is a timed wait of so many
milliseconds for a whole batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.spec import Ensemble, Recipe, Resources

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pipelines import Pipeline

CLASSES, CROP, POOLED = 10, 0.875, 8
_PIXELS = 384  # of a side
PREP_WORKERS = 1  # of a feeder
LEAST_MS, RATIO = 40.0, 4.0
_MEAN, _STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
_DIFFERENT = 64  # different photographs, which are repeated


def steps_ms(members: int) -> list[float]:
    """Uneven steps: the slowest takes four times as long as the fastest, evenly spread in ratio."""
    return [LEAST_MS * RATIO ** (n / max(1, members - 1)) for n in range(members)]


def make_photographs(count: int, pixels: int, seed: int = 0) -> list[bytes]:
    """JPEG files of `pixels` a side, about as large as camera pictures of that size are."""
    import cv2

    rng = np.random.default_rng(seed)
    made = []
    for _ in range(min(count, _DIFFERENT)):
        smooth = cv2.resize(rng.uniform(0, 255, (9, 9, 3)).astype(np.float32), (pixels, pixels))
        grain = rng.normal(0, 12, (pixels, pixels, 3))
        done, data = cv2.imencode(".jpg", np.clip(smooth + grain, 0, 255).astype(np.uint8))
        assert done
        made.append(data.tobytes())
    return [made[number % len(made)] for number in range(count)]


def make_pipeline(samples: int) -> Pipeline:
    """Photographs, decoded, cropped, flipped, scaled to float32."""
    from pipelines import Pipeline, sources, stages

    label = np.arange(samples, dtype=np.int64) % CLASSES
    return (
        Pipeline(sources.arrays(image=make_photographs(samples, _PIXELS), label=label), seed=0)
        .map(stages.decode_jpeg("image"))
        .map(stages.random_crop("image", size=int(_PIXELS * CROP)))
        .map(stages.random_flip("image"))
        .map(stages.scale("image", mean=_MEAN, std=_STD))
    )


def model(params: dict[str, Any]) -> nn.Module:
    """A small network and its emulated accelerator."""
    from torch import nn

    class OnAccelerator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.AdaptiveAvgPool2d(POOLED),
                nn.Conv2d(3, 8, 3, padding=1),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(8 * POOLED * POOLED, CLASSES),
            )

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            """Images [b, 3, h, w] to scores [b, classes], after the accelerator's time."""
            time.sleep(params["step_ms"] / 1000 * len(images) / params["batch_size"])
            return self.net(images)  # type: ignore[no-any-return]

    return OnAccelerator()


def loss(net: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of each sample, [b]."""
    from torch.nn import functional

    return functional.cross_entropy(net(batch["image"]), batch["label"], reduction="none")


def declare(
    train: Pipeline, steps: Sequence[float], *, epochs: int, batch_size: int, cores: float, sharing: str
) -> Ensemble:
    """An ensemble with a member for each step time (ms), each with so many cores."""
    return Ensemble(
        name="schedule",
        recipe=Recipe(model=model, loss=loss),
        members=[{"step_ms": step, "batch_size": batch_size, "lr": 0.01} for step in steps],
        train=train,
        epochs=epochs,
        batch_size=batch_size,
        sharing=sharing,
        prep_workers=PREP_WORKERS,
        devices="cpu",
        resources=Resources(workers=1, cpus_per_worker=cores, gpus_per_worker=0.0, memory_gb=0.5),
    )
