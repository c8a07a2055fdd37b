"""An ensemble trained on a class-balanced order: shared, alone, killed and resumed with the same bits."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_dicts import fold, read_events
from finished_runs import finished_hashes, of_kind

import ensemble
from ensemble import Ensemble, Folds, Member, Recipe, Resources, SpecError
from ensemble.cli.parser import main
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


@pytest.mark.more  # one that is killed beside another: test_e2e_samples.py
def test_members_that_share_and_one_that_is_killed_end_with_the_bits_of_members_alone(
    alone: dict[str, str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a balanced order and stratified folds; the second member is killed in the middle of an epoch."""
    monkeypatch.setenv("KILL_ONCE", str(tmp_path / "killed"))
    run_dir = tmp_path / "run"
    ensemble.submit(declare(sharing="node"), run_dir, executor="local").wait()
    assert (tmp_path / "killed").exists() and len(of_kind(run_dir, "failed")) == 1
    assert finished_hashes(run_dir) == alone and len(set(alone.values())) == 2
    ended = of_kind(run_dir, "epoch", "member-0")
    declared = declare()
    weigh = make_weight_function(declared.identify(0).weights, source())
    assert weigh is not None and isinstance(declared.train, Pipeline)
    trained = [0] * EPOCHS  # samples of its fold are not in its batches
    for batch in declared.train.loader(BATCH, EPOCHS):
        trained[batch.epoch] += np.count_nonzero(weigh(batch["index"].numpy()))
    assert [each["samples"] for each in ended] == trained and max(trained) < POSITIONS
    assert all(each["private_batches"] == 0 and each["shared_batches"] == STEPS for each in ended)
    assert of_kind(run_dir, "feeder")[-1]["prepared"] == EPOCHS * POSITIONS
    members = fold(read_events(run_dir / "events.jsonl")).members.values()
    assert {member.steps for member in members} <= {STEPS, None}
    assert main(["status", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert said.count("finished") >= 2 and f"{EPOCHS}/{EPOCHS}" in said
    assert (run_dir / "report.html").exists()


@pytest.mark.more
def test_a_wide_member_has_the_same_bits_stopped_and_resumed_or_beside_one_that_is_killed(
    alone: dict[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ensemble.controller.controller.TICK_S", 0.0)
    members = [member(number, workers) for number, workers in enumerate((1, 1, 2))]
    asked: list[str] = []

    def stop(event: dict[str, Any]) -> None:
        if event["type"] == "epoch" and not asked:
            asked.append(event["member"])
            run.stop()

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


@pytest.mark.parametrize("split", ["valid", "test", "shifted"])
def test_a_sampled_set_to_measure_on_is_refused_in_a_line(split: str) -> None:
    sampled = declare().train
    still = Pipeline(source(), sampling=sampling.balanced("label"))
    assert not callable(sampled)
    with pytest.raises(SpecError, match=rf"Ensemble.{split} draws its records by balanced\(2 classes, 120 posi"):
        declare(**{split: still})


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
    with pytest.raises(SpecError, match="at most the number of training samples, 120, got 121"):
        declare(weights=Folds(RECORDS + 1))
    with pytest.raises(SpecError, match=r"no field of the training records is 'lable'; did you mean 'label'"):
        declare(weights=Folds(4, stratify="lable"))
    with pytest.raises(SpecError, match=r"Folds\.group must be the name of a field"):
        Folds(4, group=[1, 2])  # type: ignore[arg-type]


@pytest.mark.more
def test_a_dry_run_counts_positions_and_names_the_sampling(tmp_path: Path) -> None:
    declared = declare(weights=Folds(4, stratify="label"))
    found = ensemble.dry_run(declared, tmp_path / "run", executor="inline")
    assert found.splits == {"train": POSITIONS, "valid": 40}
    assert all(row["steps"] == STEPS and not row.get("error") for row in found.members)
    assert "balanced(2 classes, 170 positions)" in found.pipeline["source"]
