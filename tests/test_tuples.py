"""Hyperparameters that are tuples arrive as tuples, however they were declared and wherever members run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.execute_members import an_ensemble, loss
from kit.execute_members import model as small_model
from kit.finished_runs import once, read_state

import ensemble
from ensemble import Member, Recipe, Search, choice

SHAPES = ((8, 8), (16,))


def model(params: dict[str, Any]) -> torch.nn.Module:
    shape, nested = params["shape"], params["nested"]
    assert isinstance(shape, tuple) and all(isinstance(size, int) for size in shape), params
    assert isinstance(nested["kernels"][0], tuple) and nested["names"] == ["a"], params
    return small_model(params)


def suggest(trial: Any) -> dict[str, Any]:
    depth = trial.suggest_int("depth", 1, 2)
    return {"lr": 0.1, "shape": (8,) * depth, "nested": {"kernels": ((3, 3),), "names": ["a"]}}


NESTED = {"kernels": ((3, 3),), "names": ["a"]}
DECLARED: dict[str, Callable[[], dict[str, Any]]] = {
    "members": lambda: {"members": [{"lr": 0.1, "shape": shape, "nested": NESTED} for shape in SHAPES]},
    "dict": lambda: {
        "search": Search({"lr": 0.1, "shape": choice(*SHAPES), "nested": NESTED}, trials=2, pruner="none")
    },
    "function": lambda: {"search": Search(suggest, trials=2, pruner="none")},
}


@pytest.mark.parametrize(
    ("executor", "way"),
    [*(("inline", way) for way in DECLARED), pytest.param("local", "dict", marks=pytest.mark.more)],
)
def test_tuples_arrive_as_tuples_from_members_spaces_and_additions(
    way: str, executor: str, tmp_path: Path
) -> None:
    declared = {"members": None} | DECLARED[way]()
    made = an_ensemble(
        **declared, recipe=Recipe(model=model, loss=loss, task="classification"), sharing="independent", epochs=2
    )
    path = tmp_path / "run"
    member = Member({"lr": 0.1, "shape": (4, 4), "nested": {"kernels": ((5, 5),), "names": ["a"]}})
    add = once("started", lambda: ensemble.attach(path).add(member))
    result = ensemble.submit(made, path, executor, on_event=add).wait()
    state = read_state(path)
    assert {str(member.state): member.error for member in state.members.values()} == {"finished": None}
    assert len(result.members) == 3 and [4, 4] in [member.params["shape"] for member in state.members.values()]
    ensemble.load(path)  # which builds the models again
