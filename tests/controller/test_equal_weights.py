"""Members that are declared to differ and train to equal weights are told from those that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ensemble
from ensemble import Ensemble, Member, Recipe
from ensemble.store import fold, read_events
from pipelines import Pipeline, sources

SEEDS = [Member({"lr": 0.1}, seed=n) for n in range(3)]


def list_remarks(tmp_path: Path, members: list[Member], own_seed: int | None, read: str) -> dict[str, list[str]]:
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(64, 4)).astype("float32"), rng.integers(0, 2, 64)

    def model(params: Any) -> torch.nn.Module:
        if own_seed is not None:
            torch.manual_seed(own_seed)
        return torch.nn.Linear(4, 2)

    def optimizer(model: torch.nn.Module, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=params.get(read, 0.1))

    recipe = Recipe(model=model, optimizer=optimizer, loss="cross_entropy", inputs=("x",), target="y")
    train, valid = (Pipeline(sources.arrays(x=X[part], y=Y[part])) for part in (slice(48), slice(48, None)))
    declared = Ensemble(
        name="equal", train=train, valid=valid, recipe=recipe, members=members, epochs=2, batch_size=16
    )
    ensemble.submit(declared, tmp_path / "run", "inline").wait()
    state = fold(read_events(tmp_path / "run" / "events.jsonl"))
    return {name: [one for one in member.remarks if "weights" in one] for name, member in state.members.items()}


def test_members_of_different_seeds_with_equal_weights_are_told_which_line_to_remove(tmp_path: Path) -> None:
    remarks = list_remarks(tmp_path, SEEDS, 42, "lr")
    assert remarks["member-0"] == []
    for name in ("member-1", "member-2"):
        (one,) = remarks[name]
        assert "member-0" in one and "seed" in one and "torch.manual_seed" in one


def test_an_option_without_effect_is_named(tmp_path: Path) -> None:
    remarks = list_remarks(tmp_path, [Member({"rate": rate}, seed=1) for rate in (0.1, 0.2)], None, "lr")
    (one,) = remarks["member-1"]
    assert "member-0" in one and "rate" in one and "manual_seed" not in one


@pytest.mark.parametrize(
    "members",
    [SEEDS, [Member({"lr": 0.1}, seed=1), Member({"lr": 0.2}, seed=1)], [Member({"lr": 0.1}, seed=1)] * 2],
)
def test_members_that_differ_and_those_declared_equal_are_told_nothing(
    tmp_path: Path, members: list[Member]
) -> None:
    assert not any(list_remarks(tmp_path, members, None, "lr").values())
