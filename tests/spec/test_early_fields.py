"""Mistakes in fields, outputs and the model that are named before a member trains, or with the user's line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from ensemble import Ensemble, Recipe, SpecError, seeds, submit
from ensemble.train.forward_errors import describe_error
from ensemble.train.own_tensors import call_model
from pipelines import Pipeline, sources

X, Y = np.zeros((40, 4), np.float32), np.zeros(40, np.int64)


def make_linear(params: Any) -> torch.nn.Module:
    return torch.nn.Linear(4, 2)


@pytest.mark.parametrize(("fields", "missing"), [({"x": X}, "label"), ({"z": X, "label": Y}, "x")])
def test_a_field_that_valid_lacks_is_named_before_the_start(
    tmp_path: Path, fields: dict[str, Any], missing: str
) -> None:
    train, valid = (Pipeline(sources.arrays(**columns)) for columns in ({"x": X, "label": Y}, fields))
    recipe = Recipe(model=make_linear, loss="cross_entropy", inputs=("x",))
    declared = Ensemble(name="a", recipe=recipe, members=seeds(1), train=train, valid=valid)
    with pytest.raises(SpecError, match=f"Ensemble.valid: .*'{missing}'"):
        submit(declared, tmp_path / "run", executor="inline")


def test_one_output_for_two_classes_is_refused_with_the_loss_to_declare() -> None:
    loss = cast(Any, Recipe(model=make_linear, loss="cross_entropy").loss)
    with pytest.raises(SpecError, match="binary_cross_entropy"):
        loss.compute(torch.zeros(3, 1), torch.tensor([0, 1, 0]))


def test_an_error_in_the_model_names_the_line_and_the_hyperparameters() -> None:
    recipe = SimpleNamespace(base=None, model=lambda params: torch.nn.Linear(4, params["width"] // 0))
    with pytest.raises(ZeroDivisionError) as caught:
        call_model(cast(Any, recipe), {"width": 8})
    shown = describe_error(caught.value)
    assert Path(__file__).name in shown and "'width': 8" in shown
