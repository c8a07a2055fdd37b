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

RECORDS, POSITIONS, EPOCHS, BATCH = 120, 170, 3, 16
STEPS = -(-POSITIONS // BATCH)
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
    usual: dict[str, Any] = {
        "name": "sampled",
        "recipe": Recipe(model=model, loss=loss),
        "members": [member(0), member(1)],
        "weights": Folds(3, stratify="label", group="patient"),
        "train": train.map(stages.select("image", "label")).map(scale).map(grain),
        "valid": Pipeline(source().take(40)).map(stages.select("image", "label")).map(scale),
        "epochs": EPOCHS,
        "gate_timeout_s": 300.0,
        "resources": Resources(cpus_per_worker=0.1),
    }
    return Ensemble(**{**usual, **options})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The weights of members of one worker, each of which worked alone."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    ensemble.submit(declare(), run_dir, executor="inline").wait()
    return finished_hashes(run_dir)


@pytest.mark.more
@pytest.mark.usefixtures("requests_are_seen_at_once")
def test_a_wide_member_has_the_same_bits_stopped_and_resumed_or_beside_one_that_is_killed(
    alone: dict[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [member(number, workers) for number, workers in enumerate((1, 1, 2))]
    stop = once("epoch", lambda: run.stop())
    run = ensemble.submit(declare(members=members), tmp_path / "stopped", executor="local", on_event=stop)
    assert run.wait().stopped
    ensemble.resume(tmp_path / "stopped").wait()
    monkeypatch.setenv("KILL_ONCE", str(tmp_path / "killed"))
    ensemble.submit(declare(members=members, sharing="independent"), tmp_path / "killed-run", "local").wait()
    assert (tmp_path / "killed").exists()
    found = finished_hashes(tmp_path / "stopped")
    assert found == finished_hashes(tmp_path / "killed-run") and found.items() > alone.items()


def test_other_labels_are_other_data_to_a_resume(tmp_path: Path) -> None:
    short = {"epochs": 1, "members": [{"width": 8, "lr": 0.05}]}
    ensemble.submit(declare(**short), tmp_path / "run", executor="inline").wait()
    plain = Pipeline(source(), seed=3, sampling=sampling.balanced("patient", samples=POSITIONS))
    changed = declare(**short, train=plain.map(stages.select("image", "label")))
    with pytest.raises(Exception, match="its source, seed, shuffle, sampling or stages"):
        ensemble.submit(changed, tmp_path / "run", executor="inline")


# --- folds ------------------------------------------------------------------------------------------------------


def test_folds_by_class_and_group_go_by_record_also_where_records_repeat() -> None:
    members = [member(number) for number in range(3)]
    declared = declare(weights=Folds(4, stratify="label", group="patient"), members=members)
    identities = [declared.identify(number) for number in range(3)]
    assert [each.weights for each in identities] == [
        {"kind": "fold", "k": 4, "held_out": number, "seed": 0, "stratify": "label", "group": "patient"}
        for number in range(3)
    ]
    records = source()
    weighed = [make_weight_function(each.weights, records) for each in identities]
    assert all(each is not None for each in weighed)
    left_out = [each(np.arange(RECORDS)) == 0 for each in weighed if each is not None]
    patients = np.arange(RECORDS) // 4
    for out in left_out:
        assert 0 < out.sum() < RECORDS / 2
        assert not set(patients[out]) & set(patients[~out])
    # Plain folds are of records too, though an epoch has more positions.
    plain = declare(weights=Folds(RECORDS), members=members).identify(2).weights
    weigh = make_weight_function(plain, records)
    assert weigh is not None and np.count_nonzero(weigh(np.arange(RECORDS)) == 0) == 1


@pytest.mark.more
def test_a_dry_run_counts_positions_and_names_the_sampling(tmp_path: Path) -> None:
    declared = declare(weights=Folds(4, stratify="label"))
    found = ensemble.dry_run(declared, tmp_path / "run", executor="inline")
    assert found.splits == {"train": POSITIONS, "valid": 40}
    assert all(row["steps"] == STEPS and not row.get("error") for row in found.members)
    assert "balanced(170 positions)" in found.pipeline["source"]
