"""An ensemble trained on a class-balanced order, and folds of its records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import ensemble
from ensemble import Ensemble, Folds, Member, Recipe, Resources
from ensemble.spec.sample_weights import make_weight_function
from pipelines import Pipeline, sampling, sources, stages

RECORDS, POSITIONS, EPOCHS, BATCH = 120, 170, 2, 16
RARE = 12
MEMBERS = [Member({"lr": 0.05 + number}, batch_size=BATCH) for number in range(3)]


def source() -> Any:
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (RECORDS, 1, 8, 8)).astype(np.uint8)
    labels = (np.arange(RECORDS) < RARE).astype(np.int64)
    return sources.arrays(image=images, label=labels, patient=np.arange(RECORDS) // 4)


def declare(**options: Any) -> Ensemble:
    train = Pipeline(source(), seed=3, sampling=sampling.balanced("label", samples=POSITIONS))
    scale = stages.scale("image", mean=(0.5,), std=(0.25,))
    valid, select = Pipeline(source().take(40)), stages.select("image", "label")
    usual: dict[str, Any] = {"members": MEMBERS[:2], "epochs": EPOCHS, "gate_timeout_s": 300.0}
    usual |= {"train": train.map(select).map(scale), "valid": valid.map(select).map(scale)}
    usual |= {"weights": Folds(3, stratify="label", group="patient"), "resources": Resources(cpus_per_worker=0.1)}
    recipe = Recipe(model=lambda params: nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), loss="cross_entropy")
    return Ensemble(name="sampled", recipe=recipe, **{**usual, **options})


def test_other_labels_are_other_data_to_a_resume(tmp_path: Path) -> None:
    short = {"epochs": 1, "members": MEMBERS[:1]}
    ensemble.submit(declare(**short), tmp_path / "run", executor="inline").wait()
    plain = Pipeline(source(), seed=3, sampling=sampling.balanced("patient", samples=POSITIONS))
    changed = declare(**short, train=plain.map(stages.select("image", "label")))
    with pytest.raises(Exception, match="its source, seed, shuffle, sampling or stages"):
        ensemble.submit(changed, tmp_path / "run", executor="inline")


def test_folds_by_class_and_group_go_by_record_also_where_records_repeat() -> None:
    members = MEMBERS
    declared = declare(weights=Folds(4, stratify="label", group="patient"), members=members)
    identities = [declared.identify(number) for number in range(3)]
    usual = {"kind": "fold", "k": 4, "seed": 0, "stratify": "label", "group": "patient"}
    assert [each.weights for each in identities] == [{**usual, "held_out": number} for number in range(3)]
    records = source()
    weighed = [make_weight_function(each.weights, records) for each in identities]
    assert all(each is not None for each in weighed)
    left_out = [each(np.arange(RECORDS)) == 0 for each in weighed if each is not None]
    patients = np.arange(RECORDS) // 4
    for out in left_out:
        assert 0 < out.sum() < RECORDS / 2 and not set(patients[out]) & set(patients[~out])
    # Plain folds are of records too, though an epoch has more positions.
    plain = declare(weights=Folds(RECORDS), members=members).identify(2).weights
    weigh = make_weight_function(plain, records)
    assert weigh is not None and np.count_nonzero(weigh(np.arange(RECORDS)) == 0) == 1
