"""Predictions that are larger than a member's memory; what fails after the last epoch is repeated alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.finished_runs import of_kind, read_state
from kit.once import is_first
from torch import nn

import ensemble
from ensemble import Ensemble, Recipe, Resources
from ensemble.store import RunDir, fold, load_predictions, read_events
from pipelines import Pipeline, sources, stages

ROW = 2**18  # numbers that are predicted of a sample: 1 MiB


def data(rows: int) -> Pipeline:
    return Pipeline(sources.arrays(x=np.linspace(0, 1, rows, dtype=np.float32)[:, None]))


class Line(nn.Linear):
    def __init__(self, params: dict[str, Any]) -> None:
        super().__init__(1, 1)
        self.fails = params["fails"]


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return ((model(batch["x"]) - batch["x"]) ** 2).mean(1)


def predict(model: nn.Module, batch: Any) -> torch.Tensor:
    """Large predictions; a member fails once on the way."""
    marker = Path(os.environ["LARGE_PREDICTIONS"], str(model.fails))
    if model.fails and int(batch["index"][0]) >= 8 and is_first(marker):
        if model.fails == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if model.fails == "abort":  # as saving did: Rust aborts, or panics, where it gets no memory
            from safetensors.numpy import save

            save({"values": np.zeros(2**27, np.uint8)[None].view(np.float32)})
        raise RuntimeError("works at the second try")
    return (model(batch["x"]) + batch["x"]).expand(-1, ROW)


def declare(rows: int, ways: list[str], memory_gb: float) -> Ensemble:
    recipe = Recipe(model=Line, loss=loss, predict=predict, task="free")
    usual: dict[str, Any] = {"train": data(32), "valid": data(rows), "epochs": 2, "batch_size": 4}
    usual["resources"] = Resources(cpus_per_worker=0.5, gpus_per_worker=0.0, memory_gb=memory_gb)
    members = [{"lr": 0.1, "fails": way} for way in ways]
    return Ensemble(name="large", recipe=recipe, members=members, combine="average", **usual)


@pytest.mark.parametrize("rows", [96, pytest.param(335, marks=pytest.mark.more)])
def test_predictions_larger_than_a_members_memory_are_saved_and_what_fails_then_is_repeated_without_training(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LARGE_PREDICTIONS", str(tmp_path))
    ways = ["", "kill", "error", "abort"]
    ensemble.submit(declare(rows, ways, 0.08), tmp_path / "run", "local").wait()
    events = read_events(tmp_path / "run" / "events.jsonl")
    members = fold(events).members
    assert {each.id: (each.state, each.attempts) for each in members.values()} == {
        f"member-{number}": ("finished", 2 if way else 1) for number, way in enumerate(ways)
    }
    failed = {event.member: event for event in events if event.type == "failed"}
    assert [failed[f"member-{number}"].reason for number in (1, 2, 3)] == ["lost", "error", "oom"]
    assert "GiB of the machine are free" in failed["member-3"].error
    epochs = [(event.member, event.epoch) for event in events if event.type == "epoch"]
    assert sorted(epochs) == [(member, epoch) for member in sorted(members) for epoch in (0, 1)]
    saved = load_predictions(RunDir(tmp_path / "run").predictions("member-1"), "valid", mapped=True)
    assert saved.values.shape == (rows, ROW) and (saved.index == np.arange(rows)).all()
    assert (saved.values[:, 0] == saved.values[:, -1]).all() and len(np.unique(saved.values[:, 0])) == rows


PIXELS = 4096


def median(values: torch.Tensor) -> torch.Tensor:
    return values.median(dim=0).values


class Image(nn.Linear):
    def __init__(self, params: dict[str, Any]) -> None:
        super().__init__(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[..., None])[..., 0]


def squared(model: nn.Module, batch: Any) -> torch.Tensor:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(1)


def images(**more: Any) -> Ensemble:
    x = np.random.default_rng(0).normal(size=(16, PIXELS)).astype(np.float32)
    y = x + np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    predict, data = (lambda model, batch: model(batch["x"])), Pipeline(sources.arrays(x=x, y=y))
    recipe = Recipe(model=Image, loss=squared, task="regression", predict=predict, target="y")
    usual: dict[str, Any] = {"members": [{"lr": 0.1}, {"lr": 0.2}], "allow_overlap": True, "epochs": 2}
    usual |= {"combine": "greedy", "batch_size": 8, "train": data, "valid": data, "test": data}
    return Ensemble(name="images", recipe=recipe, **{**usual, **more})


def find_remarks(path: Path) -> set[str]:
    return {event["text"] for event in of_kind(path, "remark")}


def test_of_predictions_beyond_the_bound_a_part_of_the_positions_is_kept(tmp_path: Path) -> None:
    size = 2 * 16 * PIXELS * 12  # of a member: two splits of points and their targets
    whole = ensemble.submit(images(), tmp_path / "whole", "inline").wait()
    part = ensemble.submit(images(keep_predictions_gb=size / 4e9), tmp_path / "part", "inline").wait()
    run = RunDir(tmp_path / "part")
    files = [(run.predictions(f"member-{n}"), split) for n in (0, 1) for split in ("valid", "test")]
    kept = [load_predictions(path, split) for path, split in files]
    assert all(np.array_equal(one.positions, kept[0].positions) for one in kept)
    saved = load_predictions(RunDir(tmp_path / "whole").predictions("member-0"), "valid")
    assert saved.positions is None and saved.values.shape == (16, PIXELS)
    assert kept[0].values.shape == (16, PIXELS // 4)
    assert np.array_equal(kept[0].values, saved.values[:, kept[0].positions])
    assert kept[0].target is not None and saved.target is not None
    assert np.array_equal(kept[0].target, saved.target[:, kept[0].positions])
    assert files[0][0].stat().st_size < size / 4 + 20_000
    for of in ("ensemble", "best", "mean"):
        assert part.combined.metrics[of]["rmse"] == pytest.approx(whole.combined.metrics[of]["rmse"], rel=0.03)
    assert "1,024 positions of each sample" in part.combined.note and whole.combined.note.count("positions") == 0
    [remark] = find_remarks(run.path)
    assert "keep_predictions_gb" in remark and "1,024 of the 4,096 positions" in remark
    assert not find_remarks(tmp_path / "whole")
    loaded = ensemble.load(run.path)
    assert loaded({"x": torch.zeros(2, PIXELS)}).shape == (2, PIXELS)
    for member in ("member-1", None):
        loaded = ensemble.load_predictions(run.path, member=member, split="valid")
        assert np.array_equal(loaded.positions, kept[0].positions)
    ensemble.submit(images(), run.path, "inline").wait()  # with the larger bound all predict again
    again = [load_predictions(path, split) for path, split in files]
    assert all(one.positions is None for one in again) and np.array_equal(again[0].values, saved.values)
    assert {event["epoch"] for event in of_kind(run.path, "epoch")} == {0, 1}
    assert ensemble.load_predictions(run.path, split="valid").positions is None

    def leave_out(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["x"][0] == 3:
            raise ValueError("no sample")
        return sample

    x = np.arange(16, dtype=np.float32)[:, None] * np.ones(PIXELS, np.float32)
    valid = Pipeline(sources.arrays(x=x, y=x), on_error="skip", max_skipped=0.5).map(leave_out)
    declared = images(valid=valid, batch_size=1, keep_predictions_gb=1e-4)
    result = ensemble.submit(declared, tmp_path / "skips", "inline").wait()
    assert {row["state"] for row in result.members} == {"finished"}
    saved = load_predictions(RunDir(tmp_path / "skips").predictions("member-0"), "valid")
    assert len(saved.values) == 15 and saved.positions is not None, "rows that are left out, as well"


def test_predictions_beyond_the_bound_that_a_function_combines_are_not_kept_and_that_is_said_before_the_training(
    tmp_path: Path,
) -> None:
    declared = images(keep_predictions_gb=1e-4, combine=median, rehearsal="say")
    planned = ensemble.dry_run(declared)
    assert planned.members[0]["predictions_bytes"] == 2 * 16 * PIXELS * 12
    assert any("take 0.00157 GB, more than Ensemble.keep_predictions_gb=0.0001" in note for note in planned.notes)
    result = ensemble.submit(declared, tmp_path / "run", "inline").wait()
    assert [member.state for member in read_state(tmp_path / "run").members.values()] == ["finished"] * 2
    assert result.combined.metrics is None
    remarks = find_remarks(tmp_path / "run")
    assert any("none are saved" in text and "keep_predictions_gb=0.0001" in text for text in remarks)
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    (told,) = [at for at, event in enumerate(events) if event.type == "rehearsed"]
    assert "none are saved" in str(events[told]) and told < [event.type for event in events].index("epoch")
    assert not RunDir(tmp_path / "run").predictions("member-0").exists()
    assert ensemble.load(tmp_path / "run", combine="average")({"x": torch.zeros(2, PIXELS)}).shape == (2, PIXELS)


def agree(values: Any, target: Any, same: Any, name: Any) -> float:
    return float(((target == same) & (np.char.str_len(name) == target % 7)).mean())


@pytest.mark.parametrize(("rows", "has_test"), [(30_000, False), (300, True)])
def test_fields_for_metrics_stay_beside_their_samples_whatever_the_number_of_workers(
    tmp_path: Path, rows: int, has_test: bool
) -> None:
    """Predictions of 12 MB, which two workers gather in several pieces; a test split lacks the fields."""
    label = np.random.default_rng(0).integers(0, 100, rows)
    names = np.array(["x" * (number % 7) for number in label])
    data = sources.arrays(x=np.ones((len(label), 4), np.float32), label=label, same=label, name=names)
    valid = Pipeline(data).map(stages.text("name", most_bytes=8))
    model = lambda params: nn.Linear(4, 100)  # noqa: E731
    recipe = Recipe(model=model, loss="cross_entropy", inputs=["x"], split_metrics=[agree])
    usual: dict[str, Any] = {"epochs": 1, "batch_size": 1000, "train": valid.take(rows // 15), "valid": valid}
    if has_test:
        usual["test"] = Pipeline(sources.arrays(x=np.ones((60, 4), np.float32), label=label[:60]))
    usual["resources"] = Resources(workers=1 if has_test else 2, cpus_per_worker=0.5)
    declared = Ensemble(name="fields", recipe=recipe, members=[{"lr": 0.1}], **usual)
    result = ensemble.submit(declared, tmp_path / "run", "inline" if has_test else "local").wait()
    assert [row["metrics"]["agree"] for row in result.members] == [1.0]
    combined = fold(read_events(tmp_path / "run/events.jsonl")).combined
    assert combined is not None and combined.metrics is not None
    assert combined.metrics["ensemble"].get("agree") == (None if has_test else 1.0)
