"""An ensemble trained on a class-balanced order: shared, alone, killed and resumed with the same bits."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.finished_runs import finished_hashes, once

import ensemble
from ensemble import Ensemble, Folds, Member, Recipe, Resources
from ensemble.spec.sample_weights import make_weight_function
from pipelines import Pipeline, sampling, sources, stages

RECORDS, POSITIONS, EPOCHS, BATCH = 120, 170, 2, 16
RARE = 12


def model(params: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(64, params["width"]), nn.ReLU(), nn.Linear(params["width"], 2))


def loss(net: Any, batch: Any) -> Any:
    from torch.nn import functional

    marker = os.environ.get("KILL_ONCE")
    if marker and (batch.epoch, batch.step) == (1, 4) and net[1].out_features == 9:
        with contextlib.suppress(FileExistsError), open(marker, "x"):  # one of two that come at once
            os.kill(os.getpid(), signal.SIGKILL)
    return functional.cross_entropy(net(batch["image"]), batch["label"], reduction="none")


def grain(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "image": sample["image"] + rng.normal(0, 0.1, sample["image"].shape).astype(np.float32)}


def source() -> Any:
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (RECORDS, 1, 8, 8)).astype(np.uint8)
    labels = (np.arange(RECORDS) < RARE).astype(np.int64)
    return sources.arrays(image=images, label=labels, patient=np.arange(RECORDS) // 4)


def member(number: int, workers: int = 1) -> Member:
    return Member({"width": 8 + number, "lr": 0.05}, workers=workers, batch_size=BATCH)


def declare(**options: Any) -> Ensemble:
    train = Pipeline(source(), seed=3, sampling=sampling.balanced("label", samples=POSITIONS))
    scale = stages.scale("image", mean=(0.5,), std=(0.25,))
    valid, select = Pipeline(source().take(40)), stages.select("image", "label")
    usual: dict[str, Any] = {"members": [member(0), member(1)], "epochs": EPOCHS, "gate_timeout_s": 300.0}
    usual |= {"train": train.map(select).map(scale).map(grain), "valid": valid.map(select).map(scale)}
    usual |= {"weights": Folds(3, stratify="label", group="patient"), "resources": Resources(cpus_per_worker=0.1)}
    return Ensemble(name="sampled", recipe=Recipe(model=model, loss=loss), **{**usual, **options})


@pytest.mark.more
@pytest.mark.usefixtures("requests_are_seen_at_once")
def test_a_wide_member_has_the_same_bits_stopped_and_resumed_or_beside_one_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensemble.submit(declare(), tmp_path / "alone", executor="inline").wait()
    members = [member(number, workers) for number, workers in enumerate((1, 1, 2))]
    stop = once("epoch", lambda: run.stop())
    run = ensemble.submit(declare(members=members), tmp_path / "stopped", executor="local", on_event=stop)
    assert run.wait().stopped
    ensemble.resume(tmp_path / "stopped").wait()
    monkeypatch.setenv("KILL_ONCE", str(tmp_path / "killed"))
    ensemble.submit(declare(members=members, sharing="independent"), tmp_path / "killed-run", "local").wait()
    assert (tmp_path / "killed").exists()
    found, alone = finished_hashes(tmp_path / "stopped"), finished_hashes(tmp_path / "alone")
    assert found == finished_hashes(tmp_path / "killed-run") and found.items() > alone.items()


def test_other_labels_are_other_data_to_a_resume(tmp_path: Path) -> None:
    short = {"epochs": 1, "members": [{"width": 8, "lr": 0.05}]}
    ensemble.submit(declare(**short), tmp_path / "run", executor="inline").wait()
    plain = Pipeline(source(), seed=3, sampling=sampling.balanced("patient", samples=POSITIONS))
    changed = declare(**short, train=plain.map(stages.select("image", "label")))
    with pytest.raises(Exception, match="its source, seed, shuffle, sampling or stages"):
        ensemble.submit(changed, tmp_path / "run", executor="inline")


def test_folds_by_class_and_group_go_by_record_also_where_records_repeat() -> None:
    members = [member(number) for number in range(3)]
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
