"""`collate=`: functions that a reader applies to its batches."""

from __future__ import annotations

import random
import re
import threading
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from core_pipes import leaves_nothing  # noqa: F401
from light_stages import lengthen
from torch.utils.data import default_collate

from pipelines import Batch, Feeder, Pipeline, PipelineError, attach, from_samples, sources, stages
from pipelines.errors import ForeignRandomness

N = 30


def texts() -> Pipeline:
    pipeline = Pipeline(sources.arrays(label=np.arange(N)), seed=5).map(lengthen)
    return pipeline.map(stages.ragged("tokens", most=4)).map(stages.text("text", most_bytes=4))


def packed(batch: Batch) -> dict[str, Any]:
    values, offsets = batch["tokens"].packed()
    return {"values": values, "offsets": offsets, "label": batch["label"]}


def noisy(batch: Batch, rng: np.random.Generator | None) -> dict[str, Any]:
    n = len(batch["index"])
    order = torch.arange(n) if rng is None else torch.from_numpy(rng.permutation(n))
    draw = 0.0 if rng is None else rng.random()
    return {"index": batch["index"][order], "label": batch["label"][order], "draw": draw}


def describe(batch: Batch) -> Any:
    values = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    return batch.epoch, batch.step, batch.global_size, values


def test_a_batch_of_other_rows_counts_its_samples_as_before() -> None:
    loader = texts().loader(8, 2, collate=packed)
    batches = list(loader)
    assert [batch.global_size for batch in batches] == [8, 8, 8, 6] * 2 and loader.stats()["samples"] == 2 * N
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
    still = texts().resident()  # outside training there is no generator
    for _ in range(2):
        batches = [describe(batch)[3] for batch in still.loader(8, collate=noisy)]
        assert [batch["draw"] for batch in batches] == [0.0] * 4
        assert [i for batch in batches for i in batch["index"]] == list(range(N))
    read = [i for rank in ranks for batch in rank for i in batch[3]["index"]]
    assert sorted(read) == list(range(N))


def light(index: Any) -> Any:
    return 0.5 + (index % 3) / 2


def test_weights_follow_their_samples_and_are_left_as_they_are() -> None:
    for collate in (packed, noisy, lambda batch: {"weight": batch["weight"]}):
        for batch in texts().loader(8, 1, weights=light, collate=collate):
            assert batch["weight"].tolist() == [0.5 + i % 3 / 2 for i in batch["index"].tolist()]
    for wrong in (
        lambda b: {"weight": b["weight"] / 2},
        lambda b: {"index": b["index"].flip(0), "weight": b["weight"]},
    ):
        with pytest.raises(PipelineError, match=r"changed 'weight', which holds the weights= of the samples"):
            list(texts().loader(8, 1, weights=light, collate=wrong))


def test_a_rank_without_samples_is_not_collated() -> None:
    loader = texts().loader(8, 1, rank=7, world=8, collate=packed)
    assert [len(batch["index"]) for batch in loader] == [1, 1, 1, 1]
    loader = texts().loader(8, 1, rank=0, world=8, collate=packed)
    *_, last = loader
    assert last.global_size == 6 and len(last["index"]) == 0 and "values" not in last


def read_one(collate: Any, pipeline: Any = None) -> Batch:
    batch: Batch = next(iter((pipeline or texts()).loader(8, 1, collate=collate)))
    return batch


@pytest.mark.parametrize(
    ("draw", "whose"),
    [
        (lambda step: torch.rand(2) if step == 2 else torch.zeros(2), "torch's global generator"),
        (lambda step: random.random(), "Python's random"),
        (lambda step: np.random.rand(2), "numpy's global generator"),
    ],
)
def test_draws_from_a_global_generator_are_refused_also_in_a_later_batch(draw: Any, whose: str) -> None:
    def add_noise(batch: Batch) -> Any:
        return {**batch, "noise": draw(batch.step)}

    with pytest.raises(ForeignRandomness, match=rf"collate=.*add_noise draws from {whose}: .*f\(batch, rng\)"):
        list(texts().loader(8, 1, collate=add_noise))


class Drawing:
    """Draws from a generator of its own: kept, or seeded or made anew for each batch."""

    def __init__(self, how: str) -> None:
        self.how, self.calls = how, 0
        makers = {"seeded": torch.Generator, "torch": torch.Generator, "numpy": lambda: np.random.default_rng(0)}
        self.generator: Any = makers[how]() if how in makers else None

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        first = int(batch["index"][0]) if isinstance(batch, Batch) else 0
        if self.how in ("seeded", "global"):
            batch["label"] += 1  # a second call is to have what the first one had
        if self.how == "seeded":
            self.generator.manual_seed(first + int(batch["label"].sum()))
        elif self.how == "global":
            torch.manual_seed(first)
        elif self.how in ("made", "counted", "unseeded"):
            self.generator = np.random.default_rng({"made": first, "counted": self.calls}.get(self.how))
        elif self.generator is None:  # "late"
            self.generator = torch.Generator().manual_seed(3)
        if isinstance(self.generator, np.random.Generator):
            return {"draw": self.generator.random()}
        return {"draw": torch.rand((), generator=self.generator).item()}


@pytest.mark.parametrize("how", ["late", "torch", "numpy", "counted", "unseeded"])
def test_draws_from_a_generator_of_its_own_which_a_resume_would_begin_anew_are_refused(how: str) -> None:
    with pytest.raises(ForeignRandomness, match=r"collate=Drawing draws from Drawing.generator, .* a resume"):
        read_one(from_samples(Drawing(how)) if how == "torch" else Drawing(how))


@pytest.mark.parametrize("how", ["seeded", "made", "global"])
def test_a_function_that_seeds_its_own_generator_by_the_batch_is_a_function_of_it(how: str) -> None:
    with torch.random.fork_rng():
        first, again = (list(texts().loader(8, 2, collate=Drawing(how))) for _ in range(2))
    draws = [batch["draw"] for batch in first]
    assert draws == [batch["draw"] for batch in again] and len(set(draws)) > 2


NUMBERS = Pipeline(sources.arrays(x=np.zeros((6, 2)), y=np.arange(6)))
INDEX = "changed 'index', which must name each sample of the batch once"
ADAPTED = "takes a list of samples, is collate=pipelines.from_samples("


def adapt(collate: Any = default_collate, **options: Any) -> Any:
    return from_samples(collate, **options)


MISFITS: dict[str, list[Any]] = {
    INDEX: [lambda batch: {"index": batch["index"][1:]}, lambda batch: {"index": batch["index"] + 1}],
    "returned tuple, not a dict: name what": [lambda batch: (batch["y"], 1)],
    ADAPTED: [default_collate, lambda samples: [sample["y"] for sample in samples]],
    "a list of 2: name its values": [adapt(fields=("x", "y"))],
    "returned 2 values for names=('x',)": [adapt(fields=("x", "y"), names="x")],
    "KeyError: 'a'. Each sample that it is given has the": [adapt(lambda samples: samples[0]["a"])],
    "random must be 'torch'": [lambda batch: adapt(random="numpy")(batch)],
    "the batch has no field 'z' (it has x, y, index)": [adapt(fields=("z",))],
}


@pytest.mark.parametrize("words", MISFITS)
def test_a_function_that_does_not_fit_is_refused(words: str) -> None:
    for collate in MISFITS[words]:
        with pytest.raises(PipelineError, match=re.escape(words)):
            read_one(collate, NUMBERS)


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


def pad_samples(features: list[dict[str, Any]]) -> Any:
    """As transformers.DataCollatorWithPadding does: pads to the longest, returns a UserDict of tensors."""
    longest = max(len(each["tokens"]) for each in features)
    ids = [torch.nn.functional.pad(each["tokens"], (0, longest - len(each["tokens"]))) for each in features]
    assert all(set(each) == {"tokens", "label", "text"} and isinstance(each["text"], str) for each in features)
    return UserDict(input_ids=torch.stack(ids), labels=torch.stack([each["label"] for each in features]))


def test_a_collate_fn_of_a_data_loader_is_adapted() -> None:
    assert list(read_one(lambda batch: UserDict(label=batch["label"]))) == ["label", "index"]
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


@pytest.mark.parametrize("kind", ["torch", "python"])
def test_an_adapted_function_may_draw_from_global_generators_where_that_is_declared(kind: Any) -> None:
    def mask(features: list[dict[str, Any]]) -> dict[str, Any]:
        draw: Any = torch.rand if kind == "torch" else lambda _: random.random() + np.random.rand()
        return {"mask": torch.tensor([float(draw(())) for _ in features])}

    with pytest.raises(ForeignRandomness, match=r'from_samples\(f, random="torch"\)'):
        read_one(from_samples(mask))
    masking, before = from_samples(mask, random=kind), torch.get_rng_state()
    first = [describe(batch) for batch in texts().loader(8, 2, collate=masking)]
    torch.testing.assert_close(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert [describe(batch) for batch in texts().loader(8, 2, collate=masking)] == first
    assert len({tuple(batch[3]["mask"]) for batch in first}) == 8, "other epochs and steps draw otherwise"
    still = texts().resident()
    evaluated, again = ([describe(batch) for batch in still.loader(8, collate=masking)] for _ in range(2))
    assert evaluated == again
