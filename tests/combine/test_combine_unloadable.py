"""What the end of a run says of loading the combined model is what loading it then does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ensemble
from ensemble import Ensemble, Recipe
from ensemble.combine import CombineError
from ensemble.train.outputs import OutputError
from pipelines import Pipeline, sources


def build(params: Any) -> torch.nn.Module:
    return torch.nn.Linear(4, 3)


def loop(member: Any) -> None:
    """Calls its model with something that is no field of the batch."""
    model = build(member.params)
    model, _ = member.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in member.epochs():
        for batch in member.batches():
            scores = model(batch["x"] * 2)
            member.backward(torch.nn.functional.cross_entropy(scores, batch["label"], reduction="none"))
            member.step()
        member.report(accuracy=0.5)
    member.predict_all(predict)


def predict(model: Any, batch: Any) -> Any:
    return model(batch["x"] * 2).softmax(dim=1)


def predict_otherwise(model: Any, batch: Any) -> Any:
    return model(batch["x"]).softmax(dim=1)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (loop, "its recipe is a train function alone: declare Recipe(model=..., train=..., predict=...)"),
        (Recipe(model=build, train=loop), "function calls the model of member-0: declare Recipe.predict"),
        (Recipe(model=build, train=loop, predict=predict), None),
        (
            Recipe(model=build, train=loop, predict=predict_otherwise),
            "member-0: predict_all(function) predicts otherwise than a loaded model would",
        ),
    ],
    ids=["a function", "without predict", "with predict", "with another predict"],
)
def test_the_summary_promises_a_loaded_model_where_loading_works(recipe: Any, said: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = Pipeline(sources.arrays(x=rng.random((16, 4), np.float32), label=rng.integers(0, 3, 16)))
    declared = Ensemble(
        name="m", recipe=recipe, members=[{"lr": 0.1}], train=data, valid=data, batch_size=8, epochs=1
    )
    result = ensemble.submit(declared, tmp_path, "inline").wait()
    shown = " ".join(result.summary(width=500).split())
    assert ("gives the combined model" in shown) is (said is None)
    batch = {"x": torch.zeros(2, 4)}
    if said is None:
        assert ensemble.load(tmp_path)(batch).shape == (2, 3)
        return
    assert "it cannot be loaded as one model" in shown and said in shown
    with pytest.raises((CombineError, OutputError), match=r"declare (the function as )?Recipe"):
        ensemble.load(tmp_path)(batch)
