"""Values that no training can use: what is said names the field and the sample, and nothing is tried again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from loop_cases import of, train  # noqa: E402
from torch import nn  # noqa: E402

from ensemble import Recipe, Task  # noqa: E402
from pipelines import Pipeline, sources  # noqa: E402

X = np.random.default_rng(0).normal(size=(23, 4)).astype(np.float32)
LABELS = (X[:, :3] > 0).astype(np.int64)
NUMBERS = X.sum(axis=1)


def linear(params: Any) -> nn.Module:
    return nn.Linear(4, 3)


def one_number(params: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))


def failure(folder: Path, recipe: Recipe, valid: Pipeline | None = None, **fields: Any) -> dict[str, Any]:
    outcome, events = train(folder, recipe, train=Pipeline(sources.arrays(**fields)), valid=valid, optimizer="sgd")
    assert outcome == "failed"
    (failed,) = of(events, "failed")
    return failed


MULTILABEL = Recipe(model=linear, loss="binary_cross_entropy", target="y", inputs=("x",), task=Task("multilabel"))


def test_a_label_of_several_that_is_neither_0_nor_1_is_refused(tmp_path: Path) -> None:
    wrong = LABELS.copy()
    wrong[7, 1] = 7
    failed = failure(tmp_path / "train", MULTILABEL, x=X, y=wrong)
    assert "has the label 7: labels are 0, 1, or shares between" in failed["error"] and not failed["retry"]
    valid = Pipeline(sources.arrays(x=X, y=wrong))
    failed = failure(tmp_path / "valid", MULTILABEL, valid, x=X, y=LABELS)
    assert "has the label 7" in failed["error"] and not failed["retry"]


def test_a_field_that_the_data_lack_is_named_with_those_that_they_have(tmp_path: Path) -> None:
    recipe = Recipe(model=one_number, loss="mse", target="z")
    failed = failure(tmp_path, recipe, x=X, y=NUMBERS)
    assert "the data have no field 'z' of Recipe.target; they have x, y" in failed["error"]
    assert not failed["retry"]


def test_a_nan_among_the_inputs_is_named_with_its_sample(tmp_path: Path) -> None:
    recipe = Recipe(model=one_number, loss="mse", target="y", inputs=("x",))
    x = X.copy()
    x[11, 2] = np.nan
    failed = failure(tmp_path, recipe, x=x, y=NUMBERS)
    assert failed["reason"] == "nan" and "NaN or infinity is in 'x' of sample 11" in failed["error"]
