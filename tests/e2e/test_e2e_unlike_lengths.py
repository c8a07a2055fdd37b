"""Batches that a collate function pads to their longest sample: predictions are kept, or it is said why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from kit.event_dicts import read_events
from kit.finished_runs import of_kind, read_state
from safetensors.numpy import load_file
from torch import nn

import ensemble
from ensemble import Ensemble, Folds, Member, Recipe, Resources, cross_validated
from ensemble.store import RunDir, load_predictions
from pipelines import Pipeline, sources

SAMPLES, LONGEST, MAX = 80, 9, 12
RNG = np.random.default_rng(0)
WORDS = RNG.integers(1, 20, (SAMPLES, MAX))
LENGTHS = RNG.integers(4, LONGEST, SAMPLES)
LENGTHS[[3, 45, 70]] = LONGEST  # one of each split: of one fold, and of one rank
IS_PADDING = np.arange(MAX) >= LENGTHS[:, None]
CLASSES = np.where(IS_PADDING, -100, (WORDS + np.roll(WORDS, 1, axis=1)) // 14)
NUMBERS = np.where(IS_PADDING, np.nan, WORDS / 20).astype(np.float32)


class Tagger(nn.Module):
    def __init__(self, outputs: int, size: int) -> None:
        super().__init__()
        self.words, self.line, self.outputs = nn.Embedding(20, size), nn.Linear(2 * size, outputs), outputs

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        own = self.words(words)
        before = own.cumsum(1) / torch.arange(1, own.shape[1] + 1)[:, None]
        found: torch.Tensor = self.line(torch.cat([own, before], dim=-1))
        return found if self.outputs > 1 else found[..., 0]


def pad_to_longest(batch: Any) -> dict[str, Any]:
    longest = int(batch["length"].max())
    return {"words": batch["words"][:, :longest], "label": batch["label"][:, :longest]}


def tag(params: dict[str, Any]) -> nn.Module:
    return Tagger(3, params["size"])


def estimate(params: dict[str, Any]) -> nn.Module:
    return Tagger(1, params["size"])


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch["words"]) - batch["label"].nan_to_num()).square().mean(dim=1)


def call(model: nn.Module, batch: Any) -> torch.Tensor:
    values: torch.Tensor = model(batch["words"])
    return values


def declare(collate: Any, task: str, **options: Any) -> Ensemble:
    """A task is learnt by name; of "free" and "padded by 0" nothing says where a sample ends."""
    label = CLASSES if task == "classification" else NUMBERS if task == "regression" else np.nan_to_num(NUMBERS)
    named = {"collate": collate, "inputs": ["words"]}
    recipe = {
        "classification": Recipe(model=tag, loss="cross_entropy", split_metrics=["f1_macro"], **named),
        "regression": Recipe(model=estimate, loss="mse", split_metrics=["r2"], **named),
        "padded by 0": Recipe(model=estimate, loss="mse", **named),
        "free": Recipe(model=estimate, loss=squares, predict=call, task="free", collate=collate),
    }[task]
    splits = split_rows(words=WORDS, label=label, length=LENGTHS)
    members = [Member({"size": size, "lr": 0.05}, batch_size=size) for size in (4, 8)]  # other batches
    usual: dict[str, Any] = {**splits, "members": members, "epochs": 4, "batch_size": 6, "allow_overlap": True}
    usual["resources"] = Resources(cpus_per_worker=0.1)
    return Ensemble(name="unlike", recipe=recipe, **{**usual, **options})


def split_rows(**rows: Any) -> dict[str, Pipeline]:
    parts = {"train": slice(40), "valid": slice(40, 60), "test": slice(60, None)}
    return {
        split: Pipeline(sources.arrays(**{name: values[at] for name, values in rows.items()}), seed=0)
        for split, at in parts.items()
    }


def run_both(folder: Path, task: str, executor: str = "inline", **options: Any) -> list[Any]:
    """The results of runs whose batches are as long as their longest sample, and all of one length."""
    collates = {"longest": pad_to_longest, "max": None}
    results = [
        ensemble.submit(declare(collate, task, **options), folder / name, executor).wait()
        for name, collate in collates.items()
    ]
    assert not [text for name in collates for text in remarks(folder / name) if "learnt nothing" not in text]
    return results


def remarks(path: Path) -> list[str]:
    members = read_state(path).members.values()
    assert not [each["error"] for each in of_kind(path, "failed")]
    assert [(each.state, each.attempts) for each in members] == [("finished", 1)] * len(members)
    return [text for each in members for text in each.remarks]


def assert_same(one: Path, other: Path, members: int = 2) -> None:
    mine, theirs = (
        {(event["member"], event["epoch"]): event["metrics"] for event in of_kind(path, "epoch")}
        for path in (one, other)
    )
    assert mine.keys() == theirs.keys()
    assert all(metrics == pytest.approx(theirs[key], rel=1e-4) for key, metrics in mine.items())
    for number in range(members):
        for split in ("valid", "test"):
            kept = [load_predictions(RunDir(path).predictions(f"member-{number}"), split) for path in (one, other)]
            filed = load_file(RunDir(one).predictions(f"member-{number}"))
            filed = {name.partition(".")[2]: part for name, part in filed.items() if name.startswith(f"{split}.")}
            assert len(filed["values"]) == len(filed["target"]) == filed["lengths"].sum() < kept[0].target.size  # type: ignore[union-attr]
            assert kept[0].values.shape[1] == kept[0].target.shape[1] < MAX == kept[1].values.shape[1]  # type: ignore[union-attr]
            targets = [np.nan_to_num(np.asarray(each.target), nan=-100.0) for each in kept]
            takes_part = [target != -100 for target in targets]
            assert takes_part[0].sum() == takes_part[1].sum() > 0
            assert np.array_equal(targets[0][takes_part[0]], targets[1][takes_part[1]])
            values = [each.values[at] for each, at in zip(kept, takes_part, strict=True)]
            np.testing.assert_allclose(values[0], values[1], rtol=1e-4, atol=1e-5)


@pytest.mark.more
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_members_have_the_figures_that_they_have_with_all_batches_of_one_length(tmp_path: Path, task: str) -> None:
    longest, whole = (result.combined for result in run_both(tmp_path, task, combine="greedy"))
    assert_same(tmp_path / "longest", tmp_path / "max")
    for of, metrics in whole.metrics.items():
        assert longest.metrics[of] == pytest.approx(metrics, rel=1e-3, nan_ok=True)
    loaded = ensemble.load(tmp_path / "longest")
    batches = []
    options = {"split": "valid", "batch_size": 4, "uncertainty": True, "out": tmp_path / "of.parquet"}
    assert ensemble.predict(tmp_path / "longest", **options) == 20
    for row in pyarrow.parquet.read_table(tmp_path / "of.parquet").to_pylist():
        found = row["probabilities" if task == "classification" else "prediction"]
        assert len(found) == LENGTHS[40:60].reshape(5, 4).max(axis=1)[row["index"] // 4]
        batches.append(np.array(found)[: LENGTHS[40 + row["index"]]])
    for found, words, length in zip(batches, WORDS[40:60], LENGTHS[40:60], strict=True):
        made = loaded({"words": torch.tensor(words[None, :length])})[0]
        np.testing.assert_allclose(found, made.detach().numpy(), atol=1e-5)
    alone, wide = (loaded({"words": torch.tensor(WORDS[:2, :length])}) for length in (3, 5))
    assert alone.shape[:2] == (2, 3) and torch.allclose(alone, wide[:, :3], atol=1e-5)


@pytest.mark.parametrize(
    ("task", "says"), [("free", 'padding="max_length"'), ("padded by 0", "pad targets by NaN")]
)
def test_what_cannot_be_kept_is_said_before_the_training_and_members_end_once(
    tmp_path: Path, task: str, says: str
) -> None:
    declared = declare(pad_to_longest, task, rehearsal="say")
    ensemble.submit(declared, tmp_path, "inline").wait()
    events = list(read_events(tmp_path / "events.jsonl"))
    (told,) = [at for at, each in enumerate(events) if each["type"] == "rehearsed"]
    assert says in str(events[told]) and told < [each["type"] for each in events].index("epoch")
    is_saved = RunDir(tmp_path).predictions("member-0").exists()
    assert is_saved == (task != "free")


@pytest.mark.more
def test_folds_of_unlike_length_are_combined(tmp_path: Path) -> None:
    members = cross_validated([Member({"size": 4, "lr": 0.05})], Folds(3))
    options = {"valid": None, "test": None, "out_of_fold": True, "members": members}
    longest, whole = (result.combined for result in run_both(tmp_path, "classification", **options))
    assert whole.metrics.keys() == longest.metrics.keys()
    for of, metrics in whole.metrics.items():
        assert longest.metrics[of] == pytest.approx(metrics, rel=1e-3, nan_ok=True)


@pytest.mark.more
def test_ranks_of_unlike_length_have_the_predictions_of_one(tmp_path: Path) -> None:
    run_both(
        tmp_path, "classification", "local", members=[Member({"size": 4, "lr": 0.05}, workers=2, batch_size=6)]
    )
    assert_same(tmp_path / "longest", tmp_path / "max", members=1)


def test_a_batch_as_long_as_there_are_classes_has_the_class_axis_of_those_before(tmp_path: Path) -> None:
    lengths = np.arange(80) % 4 + 2
    label = np.where(np.arange(MAX) >= lengths[:, None], -100, CLASSES.clip(0))
    splits = split_rows(words=WORDS, label=label, length=lengths)
    members = [Member({"size": 4, "lr": 0.05}, batch_size=1)]
    run_both(tmp_path, "classification", members=members, **splits)
    for name, longest in (("longest", 5), ("max", MAX)):
        kept = load_predictions(RunDir(tmp_path / name).predictions("member-0"), "valid")
        assert kept.values.shape[1:] == (longest, 3)
    metrics = [[event["metrics"] for event in of_kind(tmp_path / name, "epoch")] for name in ("longest", "max")]
    assert all(one == pytest.approx(other, rel=1e-4) for one, other in zip(*metrics, strict=True))


def test_later_longer_batches_do_not_exceed_the_bound_without_a_word(tmp_path: Path) -> None:
    words, lengths = WORDS[:40], np.repeat([4, 12], 20)
    rows = {"words": words, "label": np.where(np.arange(MAX) >= lengths[:, None], -100, 1), "length": lengths}
    valid = Pipeline(sources.arrays(**rows))
    size = (lengths.sum() * (3 * 4 + 8)) / 1e9
    for share in (1.05, 0.95):
        options = {"valid": valid, "test": None, "batch_size": 4, "keep_predictions_gb": size * share}
        declared = declare(pad_to_longest, "classification", members=[Member({"size": 4, "lr": 0.05})], **options)
        ensemble.submit(declared, tmp_path / str(share), "inline").wait()
        said = [text for text in remarks(tmp_path / str(share)) if "Ensemble.keep_predictions_gb" in text]
        assert bool(said) == (share < 1)
        assert RunDir(tmp_path / str(share)).predictions("member-0").exists() == (share > 1)
