"""Samples that are dicts of a class of their own do what no copy of their items does, and so none is passed on."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from core_pipes import Job, leaves_nothing, read  # noqa: F401

from pipelines import Feeder, Pipeline, PipelineError, attach, find_shared_stages, sources
from pipelines.cache import codec as records

N = 40


class Halved(dict[str, Any]):
    """Has a weight that is none of its items."""

    def __missing__(self, name: str) -> Any:
        return np.float32(0.5)


def halved(sample: dict[str, Any]) -> dict[str, Any]:
    return Halved(sample)


def late_halved(sample: dict[str, Any]) -> dict[str, Any]:
    """Not the first, by which all others are judged."""
    return Halved(sample) if sample["x"] % 4 == 3 else sample


def copied(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "y": sample["x"] * 2}


def weighed(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": sample["x"] * (sample["weight"] if type(sample) is Halved else np.float32(3))}


def drawn(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": weighed(sample)["x"] + rng.random(dtype=np.float32)}


def numbers() -> Pipeline:
    return Pipeline(sources.arrays(x=np.arange(N, dtype=np.float32)), seed=0)


JOB = Job(spoil=False)


def test_a_sample_of_a_class_of_its_own_is_not_kept_and_the_reason_is_said() -> None:
    assert "Halved, not a plain dict" in str(records.encode(0, Halved(x=1)))
    assert "collections.defaultdict, not a plain dict" in str(records.encode(0, defaultdict(int, x=1)))
    with pytest.raises(
        PipelineError, match=r"nothing to keep .* after halved the sample is .*Halved, not a plain"
    ):
        Feeder(numbers().map(halved).map(drawn), cache="memory")
    pipeline = numbers().map(copied).map(halved).map(drawn)
    with pytest.warns(UserWarning, match="kept are samples up to copied"):
        feeder = Feeder(pipeline, cache="memory")
    with feeder:
        assert read(attach(feeder.address, pipeline, 8, range(2)), JOB) == read(pipeline.loader(8, range(2)), JOB)
        assert feeder.stats()["cache"]["samples"] == N and feeder.stats()["bad"] == {}


def test_where_some_samples_are_of_a_class_of_their_own_the_others_are_kept() -> None:
    pipeline = numbers().map(late_halved).map(drawn)
    with Feeder(pipeline, capacity=16, cache="memory") as feeder:
        assert read(attach(feeder.address, pipeline, 8, range(2)), JOB) == read(pipeline.loader(8, range(2)), JOB)
        assert feeder.stats()["cache"]["samples"] == N * 3 // 4


def test_no_pipeline_is_cut_behind_a_sample_of_a_class_of_its_own() -> None:
    begun = numbers().map(copied).map(halved)
    with pytest.warns(UserWarning, match=r"only what comes up to copied .* the sample is Halved, not a plain"):
        assert len(find_shared_stages([begun.map(weighed), begun.map(drawn)]).stages) == 1
    with Feeder(begun) as feeder:
        with pytest.warns(UserWarning, match=r"working alone: .*not a plain dict"):
            loader = attach(feeder.address, begun.map(weighed), 8, range(1))
        assert len(list(loader)) == N // 8


def test_a_later_sample_of_a_class_of_its_own_is_prepared_in_full_behind_a_cut() -> None:
    begun = numbers().map(late_halved)
    whole = begun.map(weighed)
    with Feeder(begun, capacity=16) as feeder:
        loader = attach(feeder.address, whole, 8, range(2))
        assert read(loader, JOB) == read(whole.loader(8, range(2)), JOB)
        assert loader.stats()["private_batches"] == 0
