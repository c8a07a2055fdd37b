"""Transforms of albumentations as stages: what they are given, and their randomness."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pipelines import Feeder, Pipeline, attach, sources
from pipelines.errors import ForeignRandomness

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # else it asks the network for a newer version when it is imported

N = 12
IMAGES = np.random.default_rng(0).integers(0, 256, (N, 3, 24, 20), np.uint8)
MASKS = (IMAGES[:, :1] > 127).astype(np.uint8)


def pipe(**fields: Any) -> Pipeline:
    return Pipeline(sources.arrays(image=IMAGES, **fields), seed=3)


def read(batches: Any, field: str = "image") -> Any:
    """The values of a field in the order of the source."""
    rows = {int(i): x.numpy().copy() for b in batches for i, x in zip(b["index"], b[field], strict=True)}
    return np.stack([rows[i] for i in range(N)])


ALBUMENTATIONS: dict[str, tuple[Callable[[Any], Any], str, tuple[int, ...]]] = {
    "bare": (lambda a: a.HorizontalFlip(p=0.5), "uint8", (3, 24, 20)),
    "seeded by its user": (lambda a: a.Compose([a.ColorJitter(p=1)], seed=7), "uint8", (3, 24, 20)),
    "composed": (lambda a: a.Compose([a.RandomCrop(10, 8), a.Blur(p=0.5), a.Normalize()]), "float32", (3, 10, 8)),
}


@pytest.mark.parametrize("name", ["bare", "seeded by its user", pytest.param("composed", marks=pytest.mark.more)])
def test_a_transform_of_albumentations_is_seeded_for_each_sample(name: str) -> None:
    make, dtype, shape = ALBUMENTATIONS[name]
    mapped = pipe().map(make(pytest.importorskip("albumentations")), field="image", id=name)
    assert mapped.stages[0].random == "own"
    first = read(mapped.loader(4, range(1)))
    assert (first.dtype, first.shape) == (dtype, (N, *shape))
    torch.manual_seed(1), np.random.seed(1)
    assert (read(mapped.loader(5, range(1))) == first).all()
    assert (read(mapped.loader(5, range(1, 2))) != first).any()
    if name == "composed":  # the feeder's worker imports the library, which is dear
        with Feeder(mapped) as feeder:
            shared = attach(feeder.address, mapped, batch_size=4, epochs=1)
            assert (read(shared) == first).all() and shared.stats()["private_batches"] == 0


def test_all_targets_of_albumentations_are_moved_with_their_image() -> None:
    a = pytest.importorskip("albumentations")
    boxes = np.tile(np.array([[2.0, 3, 9, 13]], np.float32), (N, 1, 1))
    options = {"bbox_params": a.BboxParams("pascal_voc", label_fields=["kinds"])}
    flip = a.Compose([a.HorizontalFlip(p=0.5)], additional_targets={"depth": "image"}, **options)
    source = pipe(depth=IMAGES, mask=MASKS, bboxes=boxes, kinds=np.ones((N, 1), np.int64), other=np.arange(N))
    mapped = source.map(flip, id="flip")
    moved = {field: read(mapped.loader(5, 1), field) for field in mapped.fields}
    turned = (moved["image"] != IMAGES).any((1, 2, 3))
    assert 0 < turned.sum() < N and (moved["other"] == np.arange(N)).all()
    for field, before in (("image", IMAGES), ("depth", IMAGES), ("mask", MASKS)):
        assert (moved[field] == np.where(turned[:, None, None, None], before[..., ::-1], before)).all()
    expected = np.where(turned[:, None], [11.0, 3, 18, 13], [2.0, 3, 9, 13])
    np.testing.assert_allclose(moved["bboxes"][:, 0], expected, rtol=1e-5)


def test_a_transform_of_albumentations_that_does_the_same_to_all_images_is_known() -> None:
    a = pytest.importorskip("albumentations")
    still = pipe().map(a.Compose([a.PadIfNeeded(30, 30), a.Resize(10, 10), a.Normalize()]), field="image", id="s")
    assert still.random_stage is None and len(still.resident()) == N
    assert (read(still.loader(4, range(1))) == read(still.loader(5, range(1, 2)))).all()
    for transform in (
        *(a.LongestMaxSize([10, 12]), a.PadIfNeeded(30, 30, position="random"), a.Normalize(p=0.5)),
        *(a.OneOf([a.Normalize()]), a.RandomCrop(4, 4)),
    ):
        assert pipe().map(transform, field="image").stages[0].random == "own", transform
    grey = pipe().map(a.ToGray(p=1), field="image", random=False, id="grey")  # of which only its user knows
    assert grey.random_stage is None
    values = read(grey.resident().loader(5))
    assert (values[:, 0] == values[:, 2]).all() and (values != IMAGES).any()


def test_a_function_that_calls_albumentations_is_refused() -> None:
    a = pytest.importorskip("albumentations")
    flip = a.Compose([a.HorizontalFlip(p=0.5)])
    with pytest.raises(ForeignRandomness, match=r"draws from .*Compose.*a random.Random of its own.*mapped i"):
        pipe().map(lambda image: flip(image=image)["image"], field="image").fields  # noqa: B018
