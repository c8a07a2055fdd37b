"""Mistakes in what a run is made of, and in what is taken for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from kit.mistakes import Mistake

import ensemble
from ensemble import Ensemble, Member, Recipe, Search, SpecError, uniform
from ensemble.artifact import ArtifactError
from ensemble.store import StoreError
from pipelines import Pipeline, PipelineError, sampling, sources, stages

IMAGES = np.zeros((96, 1, 8, 8), np.uint8)
RECORDS = sources.arrays(image=IMAGES, label=np.arange(96) % 2)


class Transform:
    def __call__(self, sample: Any) -> Any:
        return sample


class Sampler:
    def sample_relative(self) -> None: ...

    def prune(self) -> None: ...


def declare(**options: Any) -> Ensemble:
    usual = {
        "train": Pipeline(RECORDS),
        "members": [{"lr": 0.1}],
        "recipe": Recipe(model=len, loss="cross_entropy"),
    }
    return Ensemble(name="mistaken", **{**usual, **options})


def search(**options: Any) -> Callable[[], Any]:
    return lambda: Search({"lr": uniform(0, 1)}, **options)


BALANCED = Pipeline(RECORDS, sampling=sampling.balanced("label"))
CASES: tuple[tuple[str, Callable[..., Any], type[Exception], str], ...] = (
    ("an uncalled stage", lambda: Pipeline(RECORDS).map(stages.scale), PipelineError, "scale(...) returns"),
    ("a class as a stage", lambda: Pipeline(RECORDS).map(Transform), PipelineError, "Transform(...) returns"),
    ("arrays without names", lambda: sources.arrays(IMAGES), PipelineError, "arrays(x=..., label=...)"),
    ("a source as a pipeline", lambda: declare(train=RECORDS), SpecError, "Pipeline(source)"),
    ("sampled", lambda: declare(valid=BALANCED), SpecError, "valid draws its records by balanced(96 positions)"),
    ("also test", lambda: declare(test=BALANCED), SpecError, "test draws its records by balanced(96 positions)"),
    ("a sampler's class", search(sampler=Sampler), SpecError, "Sampler()"),
    ("a pruner's class", search(pruner=Sampler), SpecError, "Sampler()"),
    ("no start", lambda: Member({}, start=""), SpecError, "Member.start must be a file of weights"),
    ("a function as an ensemble", lambda to: ensemble.submit(declare, to), SpecError, "got function: call it"),
    ("a dry run of a function", lambda: ensemble.dry_run(declare), SpecError, "got function: call it"),
    ("a dict as an ensemble", lambda to: ensemble.submit({}, to), SpecError, "takes an Ensemble, got dict"),
    ("a folder without a run", ensemble.attach, StoreError, "no run here"),
    ("an array as a run", lambda: ensemble.load(IMAGES), StoreError, "result.run_dir, got ndarray"),
    ("arrays as data", lambda: ensemble.predict("mine", IMAGES, "out.csv"), ArtifactError, "got ndarray"),
)
ROWS = [Mistake(what, do, error, (words,)) for what, do, error, words in CASES]
