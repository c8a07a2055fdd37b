"""Mistakes in dry runs, lists, comparisons, sums, and in what is read of a run that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from kit import run_events
from kit.kept_predictions import save_predictions
from kit.mistakes import Mistake

import ensemble
from ensemble import Ensemble, Recipe, SpecError
from ensemble.combine import CombineError
from ensemble.combine.per_class import compute_per_class
from ensemble.spec.task import Task
from ensemble.store import RunDir, StoreError
from pipelines import Pipeline, sources


def a_run(folder: Path) -> Path:
    """A run that has ended, whose predictions of the test split are missing."""
    run_dir = RunDir(run_events.write_run(folder / "run", run_events.list_run()))
    run_dir.predictions("member-0").parent.mkdir(parents=True)
    save_predictions(run_dir.predictions("member-0"), "valid", *run_events.predictions(0))
    return run_dir.path


def uncombined(folder: Path) -> Path:
    refused = {"metrics": None, "reason": "there is no validation split", "members": [], "weights": {}}
    events = [event | refused if event["type"] == "combined" else event for event in run_events.list_run()]
    return run_events.write_run(folder / "run", events)


def declare() -> Ensemble:
    data = Pipeline(sources.arrays(x=np.zeros((8, 2), np.float32), label=np.arange(8) % 2), seed=0)
    recipe = Recipe(model=lambda params: None, loss="cross_entropy")
    return Ensemble(name="tried", recipe=recipe, members=[{"lr": 0.1}], train=data, optimizer="sgd")


def dry_run_in_a_file(folder: Path) -> None:
    (folder / "file").write_text("")
    ensemble.dry_run(declare(), folder / "file" / "run", executor="inline")


def predict_of(**where: str) -> object:
    return lambda folder: ensemble.load_predictions(a_run(folder), **where)


def wrong(what: str, do: Any, *words: str) -> Mistake:
    return Mistake(what, do, SpecError, words)


ROWS = [
    wrong("no seeds", lambda: ensemble.seeds(0, {}), "seeds(n=) must be"),
    wrong("a negative seed", lambda: ensemble.seeds(2, {}, start=-1), "seeds(start=) must be"),
    wrong("a seed for seeds", lambda: ensemble.seeds(2, {}, seed=3), "start="),
    wrong("an unknown option of seeds", lambda: ensemble.seeds(2, {}, worker=3), "did you mean 'workers'"),
    wrong("predictions of train", predict_of(split="train"), "valid, test"),
    wrong("predictions of nobody", predict_of(member="member-9"), "did you mean 'member-7'"),
    Mistake(
        "predictions that were not saved",
        predict_of(split="test", member="member-0"),
        StoreError,
        ("saved no test predictions (it saved those of valid)",),
    ),
    Mistake(
        "predictions of no combined model",
        lambda folder: ensemble.load_predictions(uncombined(folder)),
        CombineError,
        ("has no combined model: there is no validation split",),
    ),
    Mistake(
        "figures of each class of numbers",
        lambda: compute_per_class(Task("regression"), np.ones(3), np.ones(3)),
        CombineError,
        ("the task regression have no classes",),
    ),
    wrong("one run compared", lambda folder: ensemble.compare(a_run(folder)), "two run directories or more"),
    wrong(
        "compared twice", lambda folder: ensemble.compare(a_run(folder), folder / "run" / ".." / "run"), "twice"
    ),
    Mistake(
        "a run compared with none",
        lambda folder: ensemble.compare(a_run(folder), folder / "nowhere"),
        StoreError,
        ("nowhere/events.jsonl does not exist",),
    ),
    Mistake("compare 1", lambda folder: ["compare", str(a_run(folder))], 2, ("two run directories",), "command"),
    wrong("usage by group", lambda folder: ensemble.sum_usage(folder, "group"), "user, month, run"),
    Mistake(
        "runs of no folder", lambda folder: ["list", str(folder / "none")], 2, ("there is no folder",), "command"
    ),
    Mistake(
        "no nodes",
        lambda folder: ["nodes", str(folder / "none")],
        2,
        ("none/events.jsonl does not exist",),
        "command",
    ),
    Mistake(
        "described nodes of no run",
        lambda folder: ensemble.describe_nodes(folder / "none"),
        StoreError,
        ("none/events.jsonl does not exist",),
    ),
    Mistake("a dry run in a file", dry_run_in_a_file, StoreError, ("cannot write",)),
    wrong(
        "a dry run by an unknown executor",
        lambda folder: ensemble.dry_run(declare(), folder / "run", executor="locale"),
        "there is no executor 'locale'; did you mean 'local'",
    ),
]
