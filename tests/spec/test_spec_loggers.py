"""Loggers as they are declared: by name or with options, no part of what is trained, refused if not installed."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.event_dicts import fold, read_events

import ensemble
from ensemble import Ensemble, MLflow, Recipe, SpecError, TensorBoard, WandB
from ensemble.spec import check_installed
from ensemble.store import RunDir
from ensemble.user_code.fingerprint import code_of
from pipelines import Pipeline, sources


def model(params: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Linear(2, 2)


def loss(net: Any, batch: Any) -> Any:
    return net(batch["x"]).square().mean(dim=1)


def declared(loggers: Any = (), **options: Any) -> Ensemble:
    train = Pipeline(sources.arrays(x=np.ones((32, 2), np.float32)), seed=0)
    recipe = Recipe(model=model, loss=loss, task="regression", objective="loss", mode="min")
    about = {"name": "logged", "recipe": recipe, "members": [{"lr": 0.1}], "train": train}
    about |= {"valid": Pipeline(sources.arrays(x=np.ones((32, 2), np.float32))), "loggers": loggers}
    return Ensemble(**about, **options)


def test_loggers_are_given_by_name_or_with_options() -> None:
    assert declared(["tensorboard", WandB(project="theses")]).loggers == (TensorBoard(), WandB(project="theses"))
    assert declared().loggers == ()
    assert dataclasses.replace(declared(["mlflow"]), epochs=2).loggers == (MLflow(),)
    assert declared([{"name": "wandb", "project": "theses"}]).loggers == (WandB(project="theses"),)


def hide(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == package else there(name, *of)
    )


def test_a_package_that_is_missing_is_named_with_its_extra_before_anything_starts(
    tmp_path: Path, monkeypatch: Any
) -> None:
    hide("wandb", monkeypatch)
    says = r"has 'wandb', but wandb cannot be imported: pip install 'ray-ensemble\[wandb\]'"
    with pytest.raises(SpecError, match=says):
        ensemble.submit(declared(["tensorboard", "wandb"]), tmp_path / "run", "inline")
    assert not (tmp_path / "run").exists()


def test_a_tracking_server_needs_no_database_here(monkeypatch: pytest.MonkeyPatch) -> None:
    hide("sqlalchemy", monkeypatch)
    check_installed([MLflow(uri="https://tracking.example")])
    with pytest.raises(SpecError, match=r"sqlalchemy cannot be imported: pip install 'ray-ensemble\[mlflow\]'"):
        check_installed(["mlflow"])


def test_loggers_are_no_part_of_what_is_trained(tmp_path: Path) -> None:
    without, others = declared(), declared(["tensorboard"])
    assert code_of(without).fingerprint == code_of(others).fingerprint
    assert without.identify(0) == others.identify(0)
    run_dir = RunDir(tmp_path / "run")
    first = ensemble.submit(without, run_dir, "inline").wait()
    weights = fold(read_events(run_dir.events)).members["member-0"].weights_sha256
    assert not run_dir.loggers.exists()
    again = ensemble.submit(others, run_dir, "inline").wait()  # the run is logged from its first event on
    assert [row["attempts"] for row in (*first.members, *again.members)] == [1, 1]
    assert fold(read_events(run_dir.events)).members["member-0"].weights_sha256 == weights
    assert len(list((run_dir.path / "tensorboard").rglob("events.out.*"))) == 2
    ensemble.submit(without, run_dir, "inline").wait()
    assert RunDir(run_dir.path).load_ensemble().loggers == ()
