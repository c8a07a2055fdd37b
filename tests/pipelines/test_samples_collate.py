"""`collate=`: functions that a reader applies to its batches."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from core_pipes import leaves_nothing  # noqa: F401
from kit.tv import import_torchvision
from light_stages import lengthen
from torch.utils.data import default_collate

from pipelines import Batch, Feeder, Pipeline, PipelineError, attach, from_samples, sources, stages
from pipelines.errors import ForeignRandomness

N = 30


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """Imported first: torchvision does it, and it makes a folder where TMPDIR then points."""
    import torch._dynamo  # noqa: F401


def texts() -> Pipeline:
    pipeline = Pipeline(sources.arrays(label=np.arange(N)), seed=5).map(lengthen)
    return pipeline.map(stages.ragged("tokens", most=4)).map(stages.text("text", most_bytes=4))


def packed(batch: Batch) -> dict[str, Any]:
    values, offsets = batch["tokens"].packed()
    return {"values": values, "offsets": offsets, "label": batch["label"]}


def noisy(batch: Batch, rng: np.random.Generator | None) -> dict[str, Any]:
    """Permutes the samples, and draws for each."""
    order = (
        torch.arange(len(batch["index"]))
        if rng is None
        else torch.from_numpy(rng.permutation(len(batch["index"])))
    )
    draw = 0.0 if rng is None else rng.random()
    return {"index": batch["index"][order], "label": batch["label"][order], "draw": draw}


def describe(batch: Batch) -> Any:
    values = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    return batch.epoch, batch.step, batch.global_size, values


def test_a_batch_of_other_rows_counts_its_samples_as_before() -> None:
    loader = texts().loader(8, 2, collate=packed)
    batches = list(loader)
    assert [batch.global_size for batch in batches] == [8, 8, 8, 6] * 2
    assert loader.stats()["samples"] == 2 * N and all(type(batch) is Batch for batch in batches)
    for batch in batches:
        assert len(batch["values"]) == sum(i % 5 for i in batch["index"].tolist())
        assert batch["index"].tolist() == batch["label"].tolist()


@pytest.mark.parametrize("collate", [packed, noisy])
def test_it_is_the_same_shared_alone_after_a_resume_and_for_each_rank(collate: Any) -> None:
    pipeline = texts()
    whole = [describe(batch) for batch in pipeline.loader(8, range(2), collate=collate)]
    with Feeder(pipeline, capacity=16) as feeder:
        shared = attach(feeder.address, pipeline, 8, range(2), collate=collate)
        assert [describe(batch) for batch in shared] == whole
        assert shared.stats()["private_batches"] == 0
    resumed = pipeline.loader(8, range(1, 2), start_step=2, collate=collate)
    assert [describe(batch) for batch in resumed] == whole[6:]
    ranks = [[describe(b) for b in pipeline.loader(8, range(1), r, 2, collate=noisy)] for r in range(2)]
    assert all(one[3]["draw"] != two[3]["draw"] for one, two in zip(*ranks, strict=True))
    read = [i for rank in ranks for batch in rank for i in batch[3]["index"]]
    assert sorted(read) == list(range(N))


def cut_mix(batch: Batch, rng: np.random.Generator | None) -> dict[str, Any]:
    """CutMix (Yun et al. 2019): a rectangle of each image is that of another; written into the batch."""
    if rng is not None:
        other, (top, left) = torch.from_numpy(rng.permutation(len(batch["label"]))), rng.integers(0, 5, 2)
        batch["image"][:, :, top : top + 4, left : left + 4] = batch["image"][other][
            :, :, top : top + 4, left : left + 4
        ]
        batch["other"] = batch["label"][other]
    return batch


def mix_by_torchvision(pairs: list[Any]) -> Any:
    v2 = import_torchvision()
    return v2.RandomChoice([v2.MixUp(num_classes=5), v2.CutMix(num_classes=5)])(*default_collate(pairs))


@pytest.mark.parametrize("which", ["cutmix", "torchvision"])
def test_mixing_is_seeded_by_batch_and_resumed_bitwise(which: str) -> None:
    by_torchvision = from_samples(
        mix_by_torchvision, fields=("image", "label"), names=("image", "target"), random="torch"
    )
    collate, workers = (cut_mix, 1) if which == "cutmix" else (by_torchvision, 0)
    values = np.random.default_rng(1).random((N, 3, 8, 8), np.float32)
    images = Pipeline(sources.arrays(image=values, label=np.arange(N) % 5), seed=4)
    whole = [describe(batch) for batch in images.loader(8, range(2), collate=collate)]
    assert len({str(batch[3]["image"]) for batch in whole}) == 8
    with contextlib.closing(images.loader(8, range(2), collate=collate, workers=workers)) as stopped:
        batches = iter(stopped)
        begun = [describe(next(batches)) for _ in range(3)]
        state = stopped.state_dict()
    torch.manual_seed(8)
    with contextlib.closing(images.loader(8, range(2), collate=collate, workers=workers)) as resumed:
        resumed.load_state_dict(state)
        remaining = [describe(batch) for epoch in resumed.epochs() for batch in epoch]
    assert begun + remaining == whole


def test_another_seed_epoch_or_step_draws_otherwise() -> None:
    draws = [batch["draw"] for batch in texts().loader(8, 3, collate=noisy)]
    other = Pipeline(texts().source, seed=6).map(lengthen).map(stages.drop("tokens", "text"))
    draws += [batch["draw"] for batch in other.loader(8, 3, collate=noisy)]
    assert len(set(draws)) == len(draws)


def light(index: Any) -> Any:
    return 0.5 + (index % 3) / 2


def test_weights_follow_their_samples() -> None:
    for collate in (packed, noisy):
        for batch in texts().loader(8, 1, weights=light, collate=collate):
            assert batch["weight"].tolist() == [0.5 + i % 3 / 2 for i in batch["index"].tolist()]


@pytest.mark.parametrize(
    "collate",
    [
        lambda batch: {"label": batch["label"], "weight": batch["weight"] / 2},
        lambda batch: {"index": batch["index"].flip(0), "weight": batch["weight"]},
    ],
)
def test_weights_that_are_not_those_of_the_samples_are_refused(collate: Any) -> None:
    with pytest.raises(PipelineError, match=r"changed 'weight', which holds the weights= of the samples: leave"):
        list(texts().loader(8, 1, weights=light, collate=collate))
    kept = texts().loader(8, 1, weights=light, collate=lambda batch: {"weight": batch["weight"]})
    assert all(len(batch["weight"]) == len(batch["index"]) for batch in kept)


def test_outside_training_there_is_no_generator() -> None:
    still = texts().resident()
    for _ in range(2):
        batches = list(still.loader(8, collate=noisy))
        assert [batch["draw"] for batch in batches] == [0.0] * 4
        assert [i for batch in batches for i in batch["index"].tolist()] == list(range(N))


def test_a_rank_without_samples_is_not_collated() -> None:
    loader = texts().loader(8, 1, rank=7, world=8, collate=packed)
    assert [len(batch["index"]) for batch in loader] == [1, 1, 1, 1]
    loader = texts().loader(8, 1, rank=0, world=8, collate=packed)
    *_, last = loader
    assert last.global_size == 6 and len(last["index"]) == 0 and "values" not in last


@pytest.mark.parametrize(
    ("draw", "whose"),
    [
        (lambda step: torch.rand(2), "torch's global generator"),
        (lambda step: torch.rand(2) if step == 2 else torch.zeros(2), "torch's global generator"),
        (lambda step: np.random.rand(2), "numpy's global generator"),
        (lambda step: random.random(), "Python's random"),
    ],
)
def test_draws_from_a_global_generator_are_refused_also_in_a_later_batch(draw: Any, whose: str) -> None:
    def add_noise(batch: Batch) -> Any:
        return {**batch, "noise": draw(batch.step)}

    with pytest.raises(ForeignRandomness, match=rf"collate=.*add_noise draws from {whose}: .*f\(batch, rng\)"):
        list(texts().loader(8, 1, collate=add_noise))


class Mixer:
    """Draws from a generator of its own, which it makes when it is called first, or has."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, batch: Any) -> Any:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(3)
        draw = getattr(self.generator, "random", lambda: torch.rand((), generator=self.generator).item())()
        return {"draw": draw}


@pytest.mark.parametrize(
    ("make", "adapt"),
    [
        (lambda: None, lambda mixer: mixer),
        (torch.Generator, from_samples),
        (lambda: np.random.default_rng(0), lambda mixer: mixer),
    ],
)
def test_draws_from_a_generator_of_its_own_are_refused(make: Any, adapt: Any) -> None:
    """Which a resume would begin anew."""
    with pytest.raises(ForeignRandomness, match=r"collate=Mixer draws from Mixer.generator, .* after a resume"):
        next(iter(texts().loader(8, 1, collate=adapt(Mixer(make())))))


class Reseeding:
    """Seeds its generator for each batch, or makes another one: by the batch, by what is no part of it, or not."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.calls = 0
        if how == "seeded":
            self.generator: Any = torch.Generator()

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        first = int(batch["index"][0])
        batch["label"] += 1  # a second call is to have what the first one had
        if self.how == "seeded":
            self.generator.manual_seed(first + int(batch["label"].sum()))
            return {"draw": torch.rand((), generator=self.generator).item()}
        if self.how == "global":
            torch.manual_seed(first)
            return {"draw": torch.rand(()).item()}
        seeds: dict[str, Any] = {"made": first, "counted": self.calls, "unseeded": None}
        self.generator = np.random.default_rng(seeds[self.how])
        return {"draw": self.generator.random()}


@pytest.mark.parametrize("how", ["seeded", "made", "global"])
def test_a_function_that_seeds_its_own_generator_by_the_batch_is_a_function_of_it(how: str) -> None:
    with torch.random.fork_rng():
        first, again = (list(texts().loader(8, 2, collate=Reseeding(how))) for _ in range(2))
    draws = [batch["draw"] for batch in first]
    assert draws == [batch["draw"] for batch in again] and len(set(draws)) > 2


@pytest.mark.parametrize("how", ["counted", "unseeded"])
def test_a_new_generator_that_is_no_function_of_the_batch_is_refused(how: str) -> None:
    with pytest.raises(ForeignRandomness, match=r"collate=Reseeding draws from Reseeding\.generator"):
        next(iter(texts().loader(8, 1, collate=Reseeding(how))))


def test_a_main_thread_may_draw_while_another_thread_reads() -> None:
    begun, drawn = threading.Event(), threading.Event()

    def wait_for_draw(batch: Batch) -> Any:
        begun.set()
        assert drawn.wait(300)
        return {"label": batch["label"]}

    read: list[list[int]] = []
    loader = texts().loader(8, 1, collate=wait_for_draw)
    reader = threading.Thread(target=lambda: read.extend(batch["label"].tolist() for batch in loader))
    reader.start()
    assert begun.wait(300)
    torch.rand(1)  # as dropout does
    drawn.set()
    reader.join()
    assert sorted(label for labels in read for label in labels) == list(range(N))


@pytest.mark.parametrize("change", [lambda index: index[1:], lambda index: index + 1])
def test_the_samples_of_a_batch_stay_its_samples(change: Any) -> None:
    with pytest.raises(PipelineError, match=r"changed 'index': it has to name each sample of the batch once"):
        next(iter(texts().loader(8, 1, collate=lambda batch: {"index": change(batch["index"])})))


def test_what_a_function_returns_is_a_mapping() -> None:
    with pytest.raises(PipelineError, match=r"collate=.*<lambda> returned tuple, not a dict: name what"):
        next(iter(texts().loader(8, 1, collate=lambda batch: (batch["label"], 1))))
    made = next(iter(texts().loader(8, 1, collate=lambda batch: UserDict(label=batch["label"]))))
    assert list(made) == ["label", "index"]


@pytest.mark.parametrize("collate", [default_collate, lambda samples: [each["label"] for each in samples]])
def test_a_collate_fn_for_a_list_of_samples_is_told_of_the_adapter(collate: Any) -> None:
    with pytest.raises(PipelineError, match=r"takes a list of samples, is collate=pipelines\.from_samples\("):
        next(iter(texts().loader(8, 1, collate=collate)))


def pad_samples(features: list[dict[str, Any]]) -> Any:
    """As transformers.DataCollatorWithPadding does: pads to the longest, returns a UserDict of tensors."""
    longest = max(len(each["tokens"]) for each in features)
    ids = [torch.nn.functional.pad(each["tokens"], (0, longest - len(each["tokens"]))) for each in features]
    assert all(set(each) == {"tokens", "label", "text"} and isinstance(each["text"], str) for each in features)
    return UserDict(input_ids=torch.stack(ids), labels=torch.stack([each["label"] for each in features]))


def test_a_collate_fn_of_a_data_loader_is_adapted() -> None:
    for batch in texts().loader(8, 1, weights=light, collate=from_samples(pad_samples)):
        assert batch["labels"].tolist() == batch["index"].tolist() and "weight" in batch
        assert batch["input_ids"].shape == (len(batch["labels"]), max(i % 5 for i in batch["index"].tolist()))
    numbers = Pipeline(sources.arrays(x=np.arange(12.0).reshape(6, 2), y=np.arange(6)), shuffle=False)
    plain = [dict(batch) for batch in numbers.loader(4, 1)]
    adapted = [dict(batch) for batch in numbers.loader(4, 1, collate=from_samples(default_collate))]
    pair = from_samples(default_collate, fields=("x", "y"), names=("x", "y"))
    named = [dict(batch) for batch in numbers.loader(4, 1, collate=pair)]
    for one, two, three in zip(plain, adapted, named, strict=True):
        assert one.keys() == two.keys() == three.keys()
        assert all(torch.equal(one[name], two[name]) and torch.equal(one[name], three[name]) for name in one)


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (default_collate, {"fields": ("x", "y")}, r'a list of 2: name its values, .*names=\("image", "label"\)'),
        (default_collate, {"fields": ("x", "y"), "names": "x"}, r"returned 2 values for names=\('x',\)"),
        (lambda samples: samples[0]["a"], {}, r"KeyError: 'a'. Each sample that it is given has the fields x, y$"),
        (default_collate, {"random": "numpy"}, "random must be 'torch', .* or left out, got 'numpy'"),
        (default_collate, {"fields": ("z",)}, r"the batch has no field 'z' \(it has x, y, index\)"),
    ],
)
def test_an_adapted_function_that_does_not_fit_is_refused(function: Any, options: Any, words: str) -> None:
    numbers = Pipeline(sources.arrays(x=np.zeros((6, 2)), y=np.arange(6)))
    with pytest.raises(PipelineError, match=words):
        next(iter(numbers.loader(4, 1, collate=from_samples(function, **options))))


def draw_by_torch() -> float:
    return float(torch.rand(()))


def draw_by_python_and_numpy() -> float:
    return random.random() + np.random.rand()


@pytest.mark.parametrize(("draw", "kind"), [(draw_by_torch, "torch"), (draw_by_python_and_numpy, "python")])
def test_an_adapted_function_may_draw_from_global_generators_where_that_is_declared(draw: Any, kind: Any) -> None:
    def mask(features: list[dict[str, Any]]) -> dict[str, Any]:
        return {"mask": torch.tensor([draw() for _ in features])}

    with pytest.raises(ForeignRandomness, match=r'from_samples\(f, random="torch"\)'):
        next(iter(texts().loader(8, 1, collate=from_samples(mask))))
    masking, before = from_samples(mask, random=kind), torch.get_rng_state()
    first = [describe(batch) for batch in texts().loader(8, 2, collate=masking)]
    torch.testing.assert_close(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert [describe(batch) for batch in texts().loader(8, 2, collate=masking)] == first
    assert len({tuple(batch[3]["mask"]) for batch in first}) == 8
    still = texts().resident()
    evaluated = [describe(batch) for batch in still.loader(8, collate=masking)]
    assert [describe(batch) for batch in still.loader(8, collate=masking)] == evaluated
