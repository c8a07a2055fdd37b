"""Mistakes in the declaration of a cross-validation."""

from __future__ import annotations

from typing import Any

import numpy as np
from kit.execute_members import an_ensemble
from kit.mistakes import Mistake

import ensemble
from ensemble import Folds, SpecError
from pipelines import Pipeline, PipelineError, sources

K, N = 4, 96


def records(fields: tuple[str, ...] = ("x", "label", "day")) -> Any:
    columns = {"x": np.zeros((N, 4), np.float32), "label": np.arange(N) % 3, "day": np.arange(N)}
    return sources.arrays(**{name: columns[name] for name in fields})


def with_folds(folds: Any) -> Any:
    return sources.with_fields(records(), fold=folds)


def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "x": sample["x"] + rng.normal()}


def declare(**options: Any) -> ensemble.Ensemble:
    usual = {"weights": Folds(K), "train": Pipeline(records()), "valid": None, "out_of_fold": True}
    members = {} if "search" in options else {"members": [{"lr": 0.5}] * K}
    return an_ensemble(**{**usual, **members, **options})


def wrong(what: str, options: dict[str, Any], *words: str) -> Mistake:
    return Mistake(f"folds: {what}", lambda: declare(**options), SpecError, words)


LEFT_OUT = "is left out by no member"
ROWS = [
    wrong("no folds", {"weights": "uniform"}, "members[0]", "Ensemble.out_of_fold", "give weights=Folds"),
    wrong("a member too few", {"members": [{"lr": 0.5}] * 3}, f"fold 3 of 4 {LEFT_OUT}"),
    wrong("one other member", {"members": [{"lr": 0.5}] * 3 + [{"lr": 0.1}]}, LEFT_OUT, "cross_validated"),
    wrong("repeats without members", {"weights": Folds(K, repeats=2)}, "partition 2 of 2"),
    wrong("random training stages", {"train": Pipeline(records()).map(noisy)}, "valid=", "its stage noisy"),
    wrong("a pipeline by member", {"train": lambda params: Pipeline(records())}, "valid=", "not a single"),
    wrong("a shorter valid", {"valid": Pipeline(records().take(30))}, "the records of train= in their order"),
    wrong("valid of another source", {"valid": Pipeline(records(("x", "label")))}, "the same source object"),
    wrong("a search", {"search": ensemble.Search({"lr": ensemble.uniform(0, 1)}, trials=K)}, "needs members="),
    wrong(
        "more folds than records", {"weights": Folds(N + 1)}, "at most the number of training samples, 96, got 97"
    ),
    wrong("a misspelt field", {"weights": Folds(K, stratify="lable")}, "'lable'; did you mean 'label'"),
    wrong("no such field", {"weights": Folds(K, by="hour")}, "no field", "'hour'"),
    wrong("a fold too few", {"weights": Folds(K, assigned="label")}, "must have 4 folds, it has 3: 0, 1, 2"),
    wrong("a fold too many", {"weights": Folds(K, assigned="day")}, "Folds.assigned='day'", "it has 96"),
    wrong("no such file's column", {"weights": Folds(K, assigned="fold")}, "no field", "'fold'"),
    wrong(
        "a record without a fold",
        {"train": Pipeline(with_folds(np.where(np.arange(N) == 7, np.nan, np.arange(N) % K)))}
        | {"weights": Folds(K, assigned="fold")},
        *("Folds.assigned='fold'", "record 7", "nan"),
    ),
    Mistake("with_fields: a shorter file", lambda: with_folds(np.arange(N - 1)), PipelineError, ("96", "got 95")),
    Mistake(
        "with_fields: a field twice",
        lambda: sources.with_fields(records(), label=np.arange(N)),
        PipelineError,
        ("'label' already",),
    ),
    wrong("a gap as long as all", {"weights": Folds(K, by="day", gap=60)}, "before the first of 4 blocks"),
    *(
        Mistake(f"folds: {what}", lambda options=options: Folds(3, **options), SpecError, (word,))
        for what, options, word in (
            ("groups that are no field", {"group": [1, 2]}, "Folds.group must be the name of a field"),
            ("a gap without by", {"gap": 2}, "give by="),
            ("strata in time", {"by": "day", "stratify": "label"}, "by time alone"),
            ("repeats in time", {"by": "day", "repeats": 2}, "by time alone"),
            ("a fold of repeats", {"held_out": 1, "repeats": 2}, "a fold of one partition"),
            ("two partitions", {"assigned": "fold", "group": "label"}, "Folds.assigned= is the partition"),
            ("a seed of a partition", {"assigned": "fold", "seed": 1}, "leave stratify=, group=, by=, seed= and"),
            ("an array of folds", {"assigned": [0, 1]}, "Folds.assigned must be the name of a field"),
            ("no repeats", {"repeats": 0}, "Folds.repeats"),
        )
    ),
    Mistake(
        "folds: members of one fold",
        lambda: ensemble.cross_validated([{}], Folds(3, held_out=1)),
        SpecError,
        ("needs Folds",),
    ),
]
