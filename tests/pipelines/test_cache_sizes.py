"""A cache that has no room for all samples says so when the first of them are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_pipes import Feeder, Job, leaves_nothing, read  # noqa: F401
from test_decoded_parts import encode

from pipelines import Pipeline, attach, sources, stages

CROP = stages.random_resized_crop("image", 24)


class Opened:
    """Puts the bytes of a file into its record."""

    def __init__(self, files: list[bytes]) -> None:
        self.files = files

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "image": self.files[int(sample["number"])]}


def reading(pipeline: Pipeline, feeder: Any = None, epochs: int = 3) -> list[Any]:
    loader = pipeline.loader(8, range(epochs)) if feeder is None else attach(feeder.address, pipeline, 8, epochs)
    return read(loader, Job(epochs=(0, epochs)))


def test_too_little_room_is_said_when_the_first_samples_are_known() -> None:
    files = [encode(300, 300, quality=95, seed=i % 4) for i in range(60)]
    pipeline = (
        Pipeline(sources.arrays(number=np.arange(60)), seed=4)
        .map(Opened(files))
        .map(stages.decode_jpeg("image"))
        .map(CROP)
    )
    with pytest.warns(UserWarning, match=r"room for about \d+% of the samples: all need about \d+ MiB"):  # noqa: SIM117
        with Feeder(pipeline, cache="memory", cache_bytes=12 * 2**20) as feeder:
            assert reading(pipeline, feeder, epochs=2) == reading(pipeline, epochs=2)
    kept = feeder.stats()["cache"]
    assert kept["samples"] < 60 and kept["bytes"] <= 12 * 2**20 < kept["expected_bytes"]
