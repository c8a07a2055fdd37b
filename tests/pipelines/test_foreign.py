"""Randomness that is not seeded is refused before the first batch; torchvision's transforms are given pictures."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from kit.tv import import_torchvision

from pipelines import Feeder, Pipeline, PipelineError, sources
from pipelines.errors import ForeignRandomness
from pipelines.prepare.generators import find_changes, find_global, preserve_states, read_marks

import_torchvision()
from torchvision import transforms as v1  # noqa: E402

SOURCE = sources.arrays(x=np.arange(8.0))
PYTHON, NUMPY, TORCH = "Python's random", "numpy's global generator", "torch's global generator"


class Noisy(list[int]):
    """A map-style Dataset that draws in its `__getitem__`."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__(range(8))
        self.draw = draw

    def __getitem__(self, index: Any) -> Any:
        return {"x": np.float64(index + self.draw())}


def flipped(sample: dict[str, Any]) -> dict[str, Any]:
    """Draws, and then mostly does nothing; writes into what it is given."""
    sample["x"] *= -1 if np.random.rand() < 0.001 else 1
    return sample


def dropped(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": sample["x"] * torch.bernoulli(torch.tensor(0.5)).item()}


def both(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": sample["x"] + rng.random() + random.gauss(0, 1) + np.random.normal()}


RNG, DECLARE = r"draw from the generator of f\(sample, rng\)", r'declare it, map\(..., random="torch"\)'


@pytest.mark.parametrize(
    ("stage", "whose", "how"),
    [(flipped, NUMPY, RNG), (dropped, TORCH, DECLARE), (both, f"{PYTHON} and {NUMPY}", RNG)],
)
def test_a_stage_that_draws_from_a_global_generator_is_refused_by_name(stage: Any, whose: str, how: str) -> None:
    pipe = Pipeline(SOURCE).map(lambda sample: {"x": abs(sample["x"])}).map(stage)
    uses: list[Callable[[], Any]] = [lambda: pipe.fields, lambda: pipe.loader(4), lambda: Feeder(pipe)]
    for use in uses:
        with pytest.raises(PipelineError, match=f"the stage {stage.__name__} draws from {whose}, .*; {how}"):
            next(iter(use()))


@pytest.mark.parametrize("draw", [random.random, lambda: random.gauss(0, 1), lambda: random.getrandbits(1)])
def test_every_draw_from_pythons_generator_changes_its_mark(draw: Callable[[], float]) -> None:
    python = find_global({PYTHON})
    with preserve_states(python):
        for _ in range(700):  # more than there are words; of two Gaussian numbers the second draws nothing
            before = read_marks(python)
            assert read_marks(python) == before
            draw()
            assert find_changes(before, read_marks(python)) == {PYTHON}


DRAWS = [(random.random, PYTHON), (np.random.rand, NUMPY), (lambda: torch.rand(()).item(), TORCH)]


@pytest.mark.parametrize(("draw", "whose"), DRAWS)
def test_a_dataset_that_draws_is_refused_too(draw: Callable[[], float], whose: str) -> None:
    pipe = Pipeline(sources.dataset(Noisy(draw)), on_error="skip", max_skipped=1.0).map(dropped, random="torch")
    with pytest.raises(ForeignRandomness, match=rf"reading Noisy\[0\] draws from {whose}, .* map\(\) it as"):
        list(pipe.loader(4))


def test_declared_fields_do_not_hide_it_from_a_feeder() -> None:
    pipe = Pipeline(SOURCE).map(lambda sample: {"x": random.random()}, fields={"x": ((), "float64")}, id="jitter")
    with pytest.raises(ForeignRandomness, match=r"the stage .*lambda"):
        Feeder(pipe)


# Images of a Dataset


def test_a_transform_of_torchvisions_gets_an_image_where_the_dataset_gave_one() -> None:
    arrays = np.random.default_rng(0).integers(0, 256, (6, 5, 3, 3), np.uint8)  # of a width that may be channels
    pairs = [(PIL.Image.fromarray(array), number) for number, array in enumerate(arrays)]
    pipe = Pipeline(sources.dataset(pairs), shuffle=False)
    (batch,) = pipe.map(v1.ToTensor(), field="image").loader(6)
    expected = torch.from_numpy(arrays).permute(0, 3, 1, 2) / 255
    assert torch.equal(batch["image"], expected)
    # One after the other, and by name in what is said of them.
    two = pipe.map(v1.RandomHorizontalFlip(), field="image").map(v1.ToTensor(), field="image")
    (batch,) = two.loader(6)
    alike = [torch.equal(image, given) for image, given in zip(batch["image"], expected, strict=True)]
    assert 0 < sum(alike) < 6 and batch["image"].shape == (6, 3, 5, 3)
    assert "RandomHorizontalFlip('image') -> ToTensor('image')" in repr(two)
    with pytest.raises(ForeignRandomness, match=r"the stage RandomHorizontalFlip\('image'\) draws from torch's"):
        pipe.map(v1.RandomHorizontalFlip(), field="image", random=False).fields  # noqa: B018


def test_an_array_that_is_no_image_is_not_transposed_in_silence() -> None:
    planes, words = np.zeros((4, 3, 8, 9), np.float32), r"ToTensor\('image'\): pic should be PIL Image or ndarray"
    with pytest.raises(PipelineError, match=words):
        Pipeline(sources.arrays(image=planes)).map(v1.ToTensor(), field="image").fields  # noqa: B018
    rows = Pipeline(sources.arrays(image=planes.transpose(0, 2, 3, 1))).map(v1.ToTensor(), field="image")
    assert rows.fields["image"].shape == (3, 8, 9)


def test_threads_that_draw_from_torch_at_once_get_their_own_samples() -> None:
    """Each of them makes a pipeline, whose samples depend on nothing that the others draw."""

    def with_noise(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": sample["x"] + torch.rand(64).sum().item()}

    def prepare() -> list[float]:
        pipeline = Pipeline(SOURCE, seed=3).map(with_noise, random="torch")
        return [float(value) for batch in pipeline.loader(4, range(2)) for value in batch["x"]]

    with ThreadPoolExecutor(8) as threads:
        results = [task.result() for task in [threads.submit(prepare) for _ in range(64)]]
    assert results == [prepare()] * 64
