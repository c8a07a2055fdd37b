"""Transforms of other libraries as stages: what they are given, what they draw from, what of it is refused."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kit.tv import import_torchvision
from light_stages import Compose, RandShiftd, Scaled, Seedable, late, shifted

from pipelines import Feeder, Pipeline, PipelineError, attach, sources, stages
from pipelines.errors import ForeignRandomness

v2 = import_torchvision()
from torchvision import transforms as v1  # noqa: E402
from torchvision import tv_tensors  # noqa: E402
from torchvision.transforms._presets import ImageClassification  # noqa: E402

N = 12
IMAGES = np.random.default_rng(0).integers(0, 256, (N, 3, 24, 20), np.uint8)


@pytest.fixture(autouse=True)
def in_children(monkeypatch: pytest.MonkeyPatch) -> None:
    import_torchvision(monkeypatch)


def pipe(seed: int = 3, **options: Any) -> Pipeline:
    return Pipeline(sources.arrays(image=IMAGES, label=np.arange(N)), seed=seed, **options)


def by_index(batches: Any, field: str) -> dict[int, Any]:
    """Index -> value of a field, of all samples of these batches."""
    return {int(i): x.numpy().copy() for b in batches for i, x in zip(b["index"], b[field], strict=True)}


def images(pipeline: Pipeline, epochs: Any = 1, batch_size: int = 4) -> list[Any]:
    """Epoch by epoch all images in the order of the index."""
    made = (by_index(epoch, "image") for epoch in pipeline.loader(batch_size, epochs).epochs())
    return [np.stack([rows[i] for i in range(N)]) for rows in made]


# name -> (transform, what a fully prepared image is: dtype, shape)
U8, F32, TO_FLOAT = ("uint8", (3, 24, 20)), ("float32", (3, 24, 20)), v2.ToDtype(torch.float32, scale=True)
AS_MANY_WRITE = [v2.ToImage(), v2.RandomHorizontalFlip(), TO_FLOAT, v2.Normalize([0.5] * 3, [0.2] * 3)]
DRAWING: dict[str, tuple[Callable[[], Any], Any]] = {
    "RandomErasing": (lambda: v2.RandomErasing(p=0.9), U8),
    "RandAugment": (lambda: v2.RandAugment(), U8),
    "RandomResizedCrop": (lambda: v2.RandomResizedCrop((8, 9)), ("uint8", (3, 8, 9))),
    "Compose": (lambda: v2.Compose([*AS_MANY_WRITE, v2.RandomErasing()]), F32),
    "Sequential": (lambda: torch.nn.Sequential(v2.RandomInvert(), v2.Pad(1)), ("uint8", (3, 26, 22))),
    "v1": (lambda: v1.Compose([v1.RandomCrop(16), v1.ToTensor()]), ("float32", (3, 16, 16))),
    "v1.RandomChoice": (lambda: v1.RandomChoice([v1.ColorJitter(0.4), v1.Grayscale(3)]), U8),
}


@pytest.mark.parametrize("name", DRAWING)
def test_a_random_transform_is_known_and_is_a_function_of_seed_epoch_and_index(name: str) -> None:
    make, made = DRAWING[name]
    mapped = pipe().map(make(), field="image")
    assert mapped.random_stage is not None
    assert mapped.stages[0].random == ("global" if name.startswith("v1.Random") else "torch")
    assert (mapped.fields["image"].dtype, mapped.fields["image"].shape) == made
    state = random.getstate(), torch.get_rng_state()
    first, second = images(mapped, 2)
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])
    random.seed(99), torch.manual_seed(99)
    again = images(pipe().map(make(), field="image"), 2, batch_size=5)
    assert (first == again[0]).all() and (second == again[1]).all()
    assert (first != second).any() and (first != images(pipe(seed=4).map(make(), field="image"))[0]).any()


PAD = ((0, 0), (0, 0), (1, 1), (1, 1))
PRESET = ImageClassification(crop_size=8, resize_size=20, mean=(0, 0, 0), std=(1, 1, 1))
STILL: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "ToDtype": (TO_FLOAT, lambda x: x / np.float32(255)),
    "ToTensor": (v1.ToTensor(), lambda x: x / np.float32(255)),
    "CenterCrop": (v2.CenterCrop((10, 6)), lambda x: x[:, :, 7:17, 7:13]),
    "ImageClassification": (PRESET, lambda x: x[:, :, 8:16, 6:14] / np.float32(255)),
    "partial": (functools.partial(v2.functional.pad, padding=[1]), lambda x: np.pad(x, PAD)),
}


@pytest.mark.parametrize("name", STILL)
def test_a_deterministic_transform_does_what_it_says_and_stays_deterministic(name: str) -> None:
    transform, expected = STILL[name]
    mapped = pipe().map(transform, field="image")
    assert mapped.random_stage is None
    np.testing.assert_allclose(images(mapped)[0], expected(IMAGES), rtol=2e-7)
    if name != "partial":
        with pytest.warns(UserWarning, match=r"draws nothing at random: leave out random='torch'"):
            pipe().map(transform, field="image", random="torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        declared = pipe().map(v2.RandomInvert(), field="image", random="torch", id="j")
    assert declared.fingerprint == pipe().map(v2.RandomInvert(), field="image", id="j").fingerprint


def test_tensors_go_from_one_transform_to_the_next_and_into_our_stages() -> None:
    begun = pipe(shuffle=False).map(v2.ToImage(), field="image")
    chain = begun.map(v2.ToDtype(torch.float32), field="image")
    assert (images(chain)[0] == IMAGES).all() and chain.fields["image"].dtype == "float32"
    cropped = begun.map(stages.center_crop("image", (10, 6)))
    assert (images(cropped)[0] == IMAGES[:, :, 7:17, 7:13]).all()
    crops = next(iter(begun.map(v2.FiveCrop(8), field="image").loader(N)))["image"]
    assert len(crops) == 5 and (crops[0].numpy() == IMAGES[:, :, :8, :8]).all()


def test_an_array_with_its_channels_last_is_never_left_as_it_is() -> None:
    rows = Pipeline(sources.arrays(image=np.ascontiguousarray(IMAGES.transpose(0, 2, 3, 1))), shuffle=False)
    for transform in (v2.RandomHorizontalFlip(), v2.ColorJitter(0.5), v2.RandomErasing(p=1.0)):
        with pytest.raises(PipelineError, match=r"leave an array \[24, 20, 3\] as it is: .*begin with v2.ToI"):
            rows.map(transform, field="image").fields  # noqa: B018
    flipped = rows.map(v2.Compose([v2.ToImage(), v2.RandomHorizontalFlip(p=1.0)]), field="image")
    assert (next(iter(flipped.loader(N)))["image"].numpy() == IMAGES[..., ::-1]).all()
    for ours in (stages.random_flip("image"), stages.center_crop("image", 2), stages.resize("image", 8)):
        with pytest.raises(PipelineError, match=r"shape \[24, 20, 3\], which looks like \[H, W, C\]"):
            rows.map(ours).fields  # noqa: B018


def targets() -> Pipeline:
    masks = (IMAGES[:, 0] > 127).astype(np.uint8)
    boxes = np.tile(np.array([[2.0, 3, 9, 13], [0, 0, 20, 24]], np.float32), (N, 1, 1))
    return Pipeline(sources.arrays(image=IMAGES, mask=masks, boxes=boxes, label=np.arange(N)), shuffle=False)


def move(boxes: Any) -> Any:
    return torch.stack([20 - boxes[..., 2], boxes[..., 1], 20 - boxes[..., 0], boxes[..., 3]], -1)


def nest(sample: dict[str, Any]) -> dict[str, Any]:
    target = {"boxes": sample["boxes"], "labels": np.arange(2), "pair": (sample["mask"], 7)}
    return {"image": sample["image"], "target": target}


def test_boxes_and_masks_are_moved_with_their_image_also_inside_a_field() -> None:
    both = v2.Compose([v2.RandomHorizontalFlip(0.5), v2.ColorJitter(0.5)])
    mapped = targets().map(stages.tv_transform(both, images="image", masks="mask", boxes="boxes"))
    assert mapped.stages[0].random == "torch"
    batch, plain = next(iter(mapped.loader(N))), next(iter(targets().loader(N)))
    flipped = torch.stack([(m != p).any() for m, p in zip(batch["mask"], plain["mask"], strict=True)])[
        :, None, None
    ]
    assert 0 < flipped.sum() < N and torch.equal(batch["label"], plain["label"])
    assert torch.equal(batch["mask"], torch.where(flipped, plain["mask"].flip(-1), plain["mask"]))
    assert torch.equal(batch["boxes"], torch.where(flipped, move(plain["boxes"]), plain["boxes"]))
    assert not torch.equal(batch["image"], plain["image"]), "but the jitter is the image's alone"

    flip = v2.RandomHorizontalFlip(p=1.0)
    inside = stages.tv_transform(flip, images="image", masks="target.pair.0", boxes="target.boxes")
    target = next(iter(targets().map(nest).map(inside).loader(N)))["target"]
    assert torch.equal(target["pair"][0], plain["mask"].flip(-1)) and target["labels"].tolist() == [[0, 1]] * N
    assert torch.equal(target["boxes"], move(plain["boxes"]))


def test_a_whole_sample_of_arrays_is_refused_where_a_transform_would_leave_it_as_it_is() -> None:
    def make(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "image": tv_tensors.Image(torch.from_numpy(sample["image"]))}

    flip = v2.RandomHorizontalFlip(p=1.0)
    alone = targets().map(stages.select("image", "label")).map(make).map(flip)
    assert torch.equal(next(iter(alone.loader(N)))["image"], torch.from_numpy(IMAGES).flip(-1))
    with pytest.raises(PipelineError, match=r'nothing to .* name the image, map\(..., field="image"\).*tv_t'):
        targets().map(flip).fields  # noqa: B018
    with pytest.raises(PipelineError, match="would do nothing to the array 'mask'"):
        targets().map(make).map(flip).fields  # noqa: B018


def mixed(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": sample["x"] + random.random() + np.random.rand() + torch.rand(()).item()}


def numbers(stage: Any, **options: Any) -> Pipeline:
    return Pipeline(sources.arrays(x=np.arange(16.0)), seed=1).map(stage, **options)


def values(pipeline: Pipeline, batch_size: int = 4) -> dict[int, Any]:
    return by_index(pipeline.loader(batch_size, 1), "x")


def check_draws(mapped: Pipeline) -> None:
    """Whatever the batches, shared or not, each of 16 samples has the draws of its index."""
    once = values(mapped)
    assert once == values(mapped, 5) and len({round(float(x) - i, 9) for i, x in once.items()}) == 16
    with Feeder(mapped, workers=1) as feeder:
        loader = attach(feeder.address, mapped, batch_size=4, epochs=1)
        assert by_index(loader, "x") == once and loader.stats()["private_batches"] == 0


def test_global_generators_of_python_and_numpy_are_seeded_for_each_sample() -> None:
    def draw() -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(()).item()]

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    values(numbers(mixed, random="global"))
    assert draw() == expected
    check_draws(numbers(shifted, random="python"))


class Own:
    def __init__(self, generator: Any) -> None:
        self.parts = [{"rng": generator}]

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        rng = self.parts[0]["rng"]
        drawn = torch.rand((), generator=rng).item() if isinstance(rng, torch.Generator) else rng.random()
        return {**sample, "x": sample["x"] + drawn}


def from_a_global(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": sample["x"] + RNG.random()}


def fresh(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": sample["x"] + np.random.default_rng().random()}


RNG, OWN = np.random.default_rng(5), r"the stage Own draws from Own.parts, a .* of its own, which is not seeded"


@pytest.mark.parametrize(
    ("stage", "options", "words"),
    [
        (mixed, {"random": "python"}, r"torch's global generator, .* random=\"global\"\)"),
        (shifted, {}, r"or declare it, map\(..., random=\"python\"\)"),
        *((Own(rng), {}, OWN) for rng in (RNG, np.random.RandomState(), random.Random(), torch.Generator())),
        (from_a_global, {}, r"from_a_global draws from RNG, a numpy.random._generator.Generator"),
        (fresh, {}, r"fresh returns two different samples for .*default_rng\(\)"),
    ],
)
def test_a_draw_from_what_is_not_declared_or_not_seeded_is_refused(stage: Any, options: Any, words: str) -> None:
    before = RNG.bit_generator.state
    with pytest.raises(ForeignRandomness, match=words):
        numbers(stage, **options).fields  # noqa: B018
    assert RNG.bit_generator.state == before


@pytest.mark.parametrize("make", [Seedable, lambda: Compose(Scaled(), Compose(RandShiftd()))])
def test_an_object_that_can_be_seeded_is_seeded_for_each_sample(make: Callable[[], Any]) -> None:
    mapped = numbers(make())
    assert mapped.stages[0].random == "own" and numbers(Compose(Scaled())).stages[0].random is None
    check_draws(mapped)
    for wrong, words in (("own", "is for what has a method set_random_seed"), ("everything", "must be left")):
        with pytest.raises(PipelineError, match=words):
            numbers(shifted, random=wrong)


def test_a_draw_at_a_later_sample_is_said_wherever_it_is_prepared_or_left_out_where_bad_records_are() -> None:
    mapped, words = numbers(late), r"the stage late draws from Python's random, which is not seeded"
    assert list(mapped.fields) == ["x"], "the first sample shows nothing"
    with pytest.raises(ForeignRandomness, match=words):
        values(mapped)
    with Feeder(mapped) as feeder, pytest.raises(PipelineError, match=words):
        list(attach(feeder.address, mapped, batch_size=4, epochs=1))
    skipping = Pipeline(sources.arrays(x=np.arange(16.0)), seed=1, on_error="skip", max_skipped=1.0).map(late)
    with pytest.warns(UserWarning, match=r"left out: sample 9 .*the stage late draws from Python's random"):
        assert sorted(values(skipping)) == [i for i in range(16) if i != 9]


def test_a_stage_that_seeds_what_it_draws_from_is_looked_into_once() -> None:
    calls: list[int] = []

    def seeded(sample: dict[str, Any]) -> dict[str, Any]:
        calls.append(int(sample["x"]))
        random.seed(int(sample["x"]))
        return {**sample, "x": sample["x"] + random.random()}

    mapped = numbers(seeded)
    values(mapped)
    before = len(calls)
    list(mapped.loader(4, range(1, 3)))
    assert len(calls) - before < 2 * 16 + 4 * 8, "each sample once, the first batch's again to see"


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Each test leaves the global generators of this process as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])
