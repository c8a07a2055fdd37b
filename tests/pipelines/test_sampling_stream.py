"""Sampled pipelines through real feeders: shared, resumed, late, on several nodes, with bad records, in parts."""

from __future__ import annotations

import os
import signal
import warnings
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
from core_pipes import leaves_nothing, noise, record, together, wait_until  # noqa: F401

from pipelines import Feeder, Pipeline, PipelineError, attach, find_shared_stages, sampling, sources
from pipelines import weights as sample_weights

N, POSITIONS = 40, 61
LABELS = np.where(np.arange(N) < 4, 1, 0)
SAMPLINGS = {
    "balanced": sampling.balanced("kind", samples=POSITIONS),
    "weighted": sampling.weighted(1.0 + 20 * LABELS, samples=POSITIONS),
}


def dropped(image: Any) -> Any:
    import torch

    return torch.from_numpy(image) * torch.rand(image.shape)


def begun(kind: str, **options: Any) -> Pipeline:
    rng = np.random.default_rng(0)
    source = sources.arrays(image=rng.random((N, 3, 7), dtype=np.float32), kind=LABELS, label=np.arange(N))
    return Pipeline(source, seed=3, sampling=SAMPLINGS[kind], **options)


def pipe(kind: str) -> Pipeline:
    return begun(kind).map(noise)


def batches(loader: Any) -> list[Any]:
    return [record(batch) for batch in loader]


def alone(pipeline: Pipeline, batch_size: int = 8, epochs: Any = 3, **options: Any) -> list[Any]:
    return batches(pipeline.loader(batch_size, epochs, **options))


def test_members_that_share_get_the_batches_of_members_alone() -> None:
    pipeline = pipe("balanced")
    wanted = alone(pipeline)
    for epoch in range(3):
        read = [index for row in wanted if row[0] == epoch for index in row[3]]
        assert read == pipeline.order()(epoch, 0, len(pipeline)).tolist(), "each position exactly once"
    with Feeder(pipe("balanced"), workers=2, capacity=24, block=5, expect=2) as feeder:
        first = attach(feeder.address, pipeline, 8, range(3), name="a")
        ranks = [attach(feeder.address, pipeline, 6, range(3), name="b", rank=r, world=2) for r in range(2)]
        got = together([partial(batches, each) for each in (first, *ranks)])
        prepared = feeder.stats()["prepared"]
    assert got == [wanted, *(alone(pipeline, 6, rank=r, world=2) for r in range(2))]
    assert all(each.stats()["private_batches"] == 0 for each in (first, *ranks))
    assert prepared == 3 * len(pipeline) and len(first) == len(wanted)
    with Feeder(pipe("balanced"), capacity=24) as feeder:
        resumed = attach(feeder.address, pipeline, 8, range(1, 3), start_step=3)
        assert batches(resumed) == [row for row in wanted if row[:2] >= wanted[len(wanted) // 3 + 3][:2]]
        assert resumed.stats()["private_batches"] == 0


def test_a_record_drawn_again_gets_other_random_numbers() -> None:
    pipeline = pipe("balanced").map(dropped, field="image", random="torch")
    draws: dict[int, list[Any]] = {}
    for batch in pipeline.loader(8, 1):
        for index, draw, image in zip(batch["index"].tolist(), batch["draw"], batch["image"], strict=True):
            draws.setdefault(index, []).append((draw.item(), image.sum().item()))
    repeated = [each for each in draws.values() if len(each) > 1]
    assert repeated and all(len(set(drawn)) == len(each) for each in repeated for drawn in zip(*each, strict=True))


def test_without_sampling_a_sample_is_keyed_by_its_index_alone() -> None:
    def draw(batch_size: int, **options: Any) -> dict[int, float]:
        loader = Pipeline(begun("balanced").source, seed=3, **options).map(noise).loader(batch_size, 1)
        return {i: d for b in loader for i, d in zip(b["index"].tolist(), b["draw"].tolist(), strict=True)}

    assert draw(8) == draw(5, shuffle=False)


def test_members_with_ends_of_their_own_key_a_repeated_record_by_its_position_too() -> None:
    ends = [made.map(dropped, field="image", random="torch") for made in (pipe("balanced"), begun("balanced"))]
    with Feeder(find_shared_stages(ends), capacity=24, expect=2) as feeder:
        loaders = [attach(feeder.address, each, 8, range(2), name=f"{n}") for n, each in enumerate(ends)]
        got = together([partial(batches, each) for each in loaders])
        assert all(each.stats()["private_batches"] == 0 for each in loaders)
    assert got == [alone(each, 8, 2) for each in ends]


def test_members_with_other_weights_do_not_share_and_are_told_why() -> None:
    with pytest.raises(PipelineError, match=r"have nothing in common: the pipelines differ: sampling at"):
        find_shared_stages([pipe("balanced"), pipe("weighted")])
    with Feeder(pipe("balanced"), capacity=16) as feeder, pytest.raises(PipelineError, match="another sampling"):
        attach(feeder.address, pipe("weighted"), 8, 1)


def test_a_cache_keeps_records_not_positions() -> None:
    pipeline = begun("weighted").map(lambda image: image * np.float32(0.5), field="image").map(noise)
    with Feeder(pipeline, capacity=16, cache="memory", cache_bytes=10**7) as feeder:
        assert batches(attach(feeder.address, pipeline, 8, range(3))) == alone(pipeline)
        stats = feeder.stats()["cache"]
    drawn = {i for epoch in range(3) for i in pipeline.order()(epoch, 0, len(pipeline)).tolist()}
    assert stats["samples"] == len(drawn) and stats["hits"] >= 3 * len(pipeline) - len(drawn)


def refuse_some(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["label"] in (1, 3):
        raise ValueError("a bad record")
    return sample


@pytest.mark.filterwarnings("ignore:left out")
def test_a_record_that_is_left_out_is_left_out_at_each_of_its_positions() -> None:
    pipeline = begun("balanced", on_error="skip", max_skipped=1.0).map(refuse_some).map(noise)
    order = pipeline.order()(0, 0, POSITIONS).tolist()
    missing = sum(index in (1, 3) for index in order)
    assert missing > 2
    wanted = alone(pipeline, 8, 2)
    assert sum(row[2] for row in wanted if row[0] == 0) == POSITIONS - missing
    assert [i for row in wanted if row[0] == 0 for i in row[3]] == [i for i in order if i not in (1, 3)]
    with Feeder(pipeline, workers=2, capacity=24) as feeder:
        loader = attach(feeder.address, pipeline, 8, range(2))
        assert batches(loader) == wanted and loader.stats()["private_batches"] == 0
        stats = feeder.stats()
        assert set(stats["bad"]) == {1, 3}
        missing += sum(index in (1, 3) for index in pipeline.order()(1, 0, POSITIONS).tolist())
        assert stats["skipped"] == missing, "counted at each position"


def kill_on_a_draw(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if sample["label"] == 2 and rng.random() < 0.3:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def test_a_record_that_kills_at_one_of_its_positions_is_found() -> None:
    pipeline = begun("weighted", on_error="skip", max_skipped=1.0).map(kill_on_a_draw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Feeder(pipeline, workers=1, capacity=80) as feeder:
            got = batches(attach(feeder.address, pipeline, 8, range(1), verify=False))
            poison = feeder.stats()["poison"]
    assert [each["index"] for each in poison] == [2]
    read = [i for row in got for i in row[3]]
    order = pipeline.order()(0, 0, POSITIONS).tolist()
    # Positions that were prepared before it was found may be there.
    assert Counter(i for i in read if i != 2) == Counter(i for i in order if i != 2)


@pytest.mark.parametrize("weights", [sample_weights.bootstrap(1), sample_weights.fold(N, 4, 1)])
def test_weights_of_samples_go_by_record_at_every_position(weights: Any) -> None:
    for batch in pipe("balanced").loader(8, range(2), weights=weights):
        assert batch["weight"].tolist() == weights(batch["index"].numpy()).tolist()


def test_a_loader_with_workers_of_its_own_reads_the_same_positions_and_its_state_is_resumed() -> None:
    pipeline = pipe("weighted")
    wanted = alone(pipeline)
    loader = pipeline.loader(8, 3, workers=2)
    iterator = iter(loader)
    got = [record(next(iterator)) for _ in range(len(wanted) // 2)]
    state = loader.state_dict()
    iterator.close()
    resumed = pipeline.loader(8, 3)
    resumed.load_state_dict(state)
    assert got + batches(resumed) == wanted
