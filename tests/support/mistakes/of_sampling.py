"""Mistakes in divisions of records, in weights and in sampling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from kit.mistakes import Mistake

from mistakes.of_sources import bad_record, wrong
from pipelines import Pipeline, sampling, sources, weights


def source(n: int, **columns: Any) -> Any:
    return sources.arrays(x=np.arange(n), **columns)


def split(*arguments: Any, n: int = 10, **options: Any) -> Callable[[], Any]:
    return lambda: source(n, label=np.arange(n) % 2).split(*arguments, **options)


BROKEN: list[Any] = [{"label": 0}, {"label": 1}, "broken", {"label": 1}]
DIVISIONS = [
    wrong(f"a division: {what}", do, *words)
    for what, do, *words in (
        ("0.9", split((0.5, 0.4)), "(0.5, 0.4) sum to 0.9"),
        ("1.1", split((0.5, 0.6)), "sum to 1.1"),
        ("one part", split((1.0,)), "at least two fractions between 0 and 1"),
        ("an empty part", split((0.5, 0.5, 0.0)), "at least two fractions between 0 and 1"),
        ("texts", split(("a", "b")), "at least two fractions between 0 and 1"),
        ("the whole", split(1.0), "a fraction between 0 and 1"),
        ("a text", split("0.5"), "a fraction between 0 and 1, or several, got '0.5'"),
        ("a seed below 0", split(0.5, -1), "split(): seed must be at least 0, got -1"),
        ("a text as seed", split(0.5, "0"), "split(): seed must be an integer, at least 0, got '0'"),
        ("two fractions", split(0.5, 0.5), "several fractions as one argument: split((0.5, 0.5))"),
        ("no such field", split(0.5, stratify="lable"), "has no field 'lable' (it has: x, label)"),
        ("no classes", split(0.5, n=4, stratify=[0, 1, 0.5, 1]), "stratify= must be classes ", " record 2 has"),
        ("few groups", split(0.5, n=4, group=[0, 1]), "group= must have one value for each of the 4 records"),
        ("2 groups", split((0.5, 0.3, 0.2), n=4, group=[0, 0, 1, 1]), "2 groups cannot be divided into 3 parts"),
        ("2 groups in folds", lambda: source(4).folds(3, group=[0, 0, 1, 1]), "2 groups cannot be divided into 3"),
        ("no time", split(0.5, n=3, by=[1.0, np.nan, 2.0]), "record 1 has nan"),
        ("texts as time", split(0.5, n=3, by=["a", "b", "c"]), "times are numbers, numpy datetimes"),
        ("with groups", split(0.5, n=3, by=[1, 2, 3], group=[1, 2, 3]), "leave out stratify= and group="),
        ("0.5 as a key", split(0.5, n=3, key=[0.5, 1, 2]), "needs texts, bytes or integers: record 0 has", "0.5"),
        ("no key", split(0.5, n=3, key=["a", None, "b"]), "record 1 has None"),
        ("booleans as keys", split(0.5, n=3, key=[True, False, True]), "record 0 has", "True"),
        ("few keys", split(0.5, n=3, key=["a", "b"]), "one value for each of the 3 records"),
        ("no field of keys", split(0.5, n=3, key="name"), "has no field 'name'"),
        ("and groups", split(0.5, n=2, key=["a", "b"], group=[0, 1]), "leave out stratify=, group= and by="),
        ("one key", split(0.5, n=3, key=["a", "a", "a"]), "leaves one part empty"),
        (
            "texts as ranks",
            lambda: source(3, day=["a", "b", "c"]).rank("day"),
            "rank(by=) has 'a': times are",
        ),
        ("3 folds", lambda: weights.assigned_fold(np.arange(9) % 3, 3), "fold 3 must have some"),
        ("fractions as folds", lambda: weights.assigned_fold([0.5], 0), "folds must be integers"),
        ("one fold", lambda: weights.assigned_fold(np.zeros(4, int), 0), "and not all"),
        ("no sample", lambda: weights.assigned_fold(np.arange(9) % 3, 0)(np.array([10])), "have no sample"),
        ("2 blocks", lambda: weights.expanding_window(np.arange(9), 2, 2), "held_out must be in 0..1"),
        (
            "a gap",
            lambda: weights.expanding_window(np.arange(9), 2, 0, 9),
            "leave none to learn from before the first",
        ),
    )
] + [
    bad_record(
        "a division: a broken record",
        lambda: sources.dataset(BROKEN, id="items", names=("a", "b")).split(0.5, stratify="label"),
        "sample 2",
    )
]

FOUR = np.array([0, 1, 1, 1])


def sampled(make: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: Pipeline(source(4, label=FOUR), sampling=make(*arguments, **options))


def sample_blocks(folder: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"x": range(4)}), folder / "t.parquet")
    return Pipeline(sources.parquet(folder / "t.parquet"), shuffle="blocks", sampling=sampling.balanced(FOUR))


def batch_by_torch() -> Any:
    from torch.utils.data import BatchSampler

    return BatchSampler(range(4), 2, False)


BALANCED, MIXED, WEIGHTED = sampling.balanced, sampling.mixed, sampling.weighted
CLASSES = {0: "a", 1: "b", 2: "b", 3: "b"}
SAMPLINGS = [
    wrong(f"sampling: {what}", do, *words)
    for what, do, *words in (
        ("3 weights", sampled(WEIGHTED, [1, 2, 3]), "one value for each of the 4 records, got an array [3]"),
        ("below 0", sampled(WEIGHTED, [1, -1, 1, 1]), "the weight of record 1 is -1.0"),
        ("nan", sampled(WEIGHTED, [1, 1, np.nan, 1]), "the weight of record 2 is nan"),
        ("all 0", sampled(WEIGHTED, np.zeros(4)), "all weights are 0"),
        ("too large", sampled(WEIGHTED, np.full(4, 1e308)), "too large"),
        ("texts", sampled(WEIGHTED, ["a"] * 4), "must be numbers"),
        ("a field", sampled(WEIGHTED, "label"), "needs weights [n], or a function or mapping"),
        ("no weight", sampled(WEIGHTED, {0: 1.0}), "no weight for the label 1 of the field 'label'"),
        ("no field", sampled(WEIGHTED, {0: 1.0}, field="lable"), "has no field 'lable' (it has: x, label)"),
        ("no samples", sampled(WEIGHTED, np.ones(4), samples=0), "samples must be at least 1"),
        ("no field of classes", sampled(BALANCED, "lable"), "has no field 'lable'"),
        ("2 classes", sampled(BALANCED, [0, 1]), "one value for each of the 4 records"),
        ("one class", sampled(BALANCED, [0] * 4), "at least two classes; all records have 0"),
        ("fractions", sampled(BALANCED, [0.5, 1, 2, 3]), "but record 0 has"),
        ("nan as class", sampled(BALANCED, [0, np.nan, 1, 1]), "but record 1 has"),
        ("inf as class", sampled(BALANCED, [0, np.inf, 1, 1]), "but record 1 has"),
        ("a mapping", sampled(BALANCED, CLASSES), "must be an array or a sequence, got {0:"),
        ("None as class", sampled(BALANCED, [None, "a", "b", "b"]), "but record 0 has None"),
        ("classes of two types", sampled(BALANCED, ["a", 1, "b", "b"]), "classes of one type"),
        ("1.5 samples", sampled(BALANCED, FOUR, samples=1.5), "samples must be an integer"),
        (
            "a",
            sampled(lambda: "balanced"),
            "sampling.weighted, balanced, mixed, bucketed or consecutive, got 'balanced'",
        ),
        ("a share of no position", sampled(MIXED, {0: 1, 1: 0.1}, 4, field="label"), "the share of 1 is less"),
        ("shares that are no mapping", lambda: sampling.mixed([0.5, 0.5]), "needs a mapping of classes to shares"),
        ("no share", sampled(MIXED, {0: 1}, field="label"), "the class 1 of the field 'label' has no share"),
        ("a share of none", sampled(MIXED, {0: 1, 1: 1, 2: 1}, field="label"), "no record has the class 2"),
        (
            "a share below 0",
            sampled(MIXED, {0: 1, 1: -1}, field="label"),
            "finite shares of at least 0, not all 0",
        ),
        ("shares of 0", sampled(MIXED, {0: 0, 1: 0}, field="label"), "not all 0, got [0, 0]"),
        ("nan as a share", sampled(MIXED, {0: 1, 1: np.nan}, field="label"), "finite shares"),
        ("no source", sampled(MIXED, {0: 1}), "has no field 'source'"),
        ("a bucket of 0", lambda: sampling.bucketed("label", bucket=0), "bucket must be"),
        ("nan as length", sampled(sampling.bucketed, np.full(4, np.nan)), "a finite number"),
        ("a batch sampler", sampled(batch_by_torch), "of torch serves"),
        ("5 in turn", sampled(sampling.consecutive, 5), "consecutive(5): there are 4 records"),
        ("still", lambda: Pipeline(source(4), shuffle=False, sampling=BALANCED(FOUR)), "leave shuffle=False out"),
        ("blocks", sample_blocks, "groups cannot be read one after the other: leave shuffle='blocks' out"),
        ("resident", lambda: sampled(BALANCED, FOUR)().resident(), "each record once", "balanced(4 positions)"),
        ("take", lambda: sampled(BALANCED, FOUR)().take(2), "take() does not go with sampling="),
        (
            "filter",
            lambda: sampled(BALANCED, FOUR)().filter(bool),
            "Pipeline(source.filter(function), sampling=...)",
        ),
    )
]

ROWS: list[Mistake] = [*DIVISIONS, *SAMPLINGS]
