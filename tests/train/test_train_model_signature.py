"""Which members are of one shape: those whose steps cost the same for certain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ensemble import Ensemble, Member, Recipe
from ensemble.train.model_signature import signature_of
from pipelines import Pipeline, sources


class Gate(nn.Module):
    def __init__(self, params: dict[str, Any]) -> None:
        super().__init__()
        self.dropout, self.steps = params.get("dropout", 0.1), params.get("steps", 3)
        self.weight = nn.Parameter(torch.ones(4))


def loss(model: nn.Module, batch: Any) -> Any:
    raise AssertionError("no step is needed")


def plain(params: dict[str, Any]) -> nn.Module:
    width = params.get("width", 8)
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(params.get("drop", 0.1)), nn.LSTM(width, 3), Gate(params))


def not_on_meta(params: dict[str, Any]) -> nn.Module:
    model = plain(params)
    float(model[0].weight.detach().sum())  # there is no number on the meta device
    return model


def with_a_closure(params: dict[str, Any]) -> nn.Module:
    model = plain(params)
    model.f = lambda x: x * params.get("scale", 1)  # type: ignore[assignment]
    return model


def of_a_local_class(params: dict[str, Any]) -> nn.Module:
    class Local(nn.Linear):
        pass

    return Local(4, 8)


def momentum(model: nn.Module, params: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=params.get("m", 0.0))


def data(params: dict[str, Any]) -> Pipeline:
    return Pipeline(sources.arrays(x=np.zeros((64, params.get("features", 4)), np.float32)))


def shape(member: dict[str, Any] | Member, model: Any = plain, recipe: Any = None, **options: Any) -> str:
    declared = Ensemble(
        name="shapes",
        recipe=recipe or Recipe(model=model, loss=loss, task="classification", optimizer=momentum),
        members=[member],
        train=data,
        **options,
    )
    return signature_of(declared, declared.identify(0))[0]


def test_what_changes_no_kernel_changes_no_shape() -> None:
    same = [{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.1, "drop": 0.5}, {"lr": 0.1, "dropout": 0.7}, {"lr": 0.1, "x": 1}]
    assert len({shape(one) for one in same}) == 1
    assert shape({"lr": 0.1}) == shape(Member({"lr": 0.1}, seed=9, epochs=7))
    assert shape({"lr": 0.1, "m": 0.5}) == shape({"lr": 0.1, "m": 0.9})


@pytest.mark.parametrize("other", [{"width": 16}, {"drop": 0.0}, {"steps": 4}, {"m": 0.9}, {"features": 5}])
def test_what_may_cost_more_is_another_shape(other: dict[str, Any]) -> None:
    assert shape({"lr": 0.1}) != shape({"lr": 0.1, **other})


def test_words_that_may_cost_more_are_another_shape() -> None:
    words: dict[str, Any] = {"batch_size": 16, "precision": "bf16", "accumulate": 2, "workers": "auto"}
    shapes = {shape(Member({"lr": 0.1}, **{name: value})) for name, value in words.items()}
    assert len(shapes | {shape({"lr": 0.1})}) == 1 + len(words)
    recipe = Recipe(model=plain, loss=loss, task="classification")
    assert shape({"lr": 0.1}, recipe=recipe, optimizer="sgd") != shape(
        {"lr": 0.1}, recipe=recipe, optimizer="adam"
    )


def test_where_it_cannot_be_told_hyperparameters_count_but_for_those_of_an_optimizer() -> None:
    for model in (with_a_closure, of_a_local_class):
        assert shape({"lr": 0.1, "scale": 1}, model) != shape({"lr": 0.1, "scale": 2}, model)
        assert shape({"lr": 0.1, "scale": 1}, model) == shape({"lr": 0.2, "scale": 1}, model)


class Config:
    def __init__(self, depth: int) -> None:
        self.depth = depth

    def __repr__(self) -> str:
        return "Config"


def with_a_config(params: dict[str, Any]) -> nn.Module:
    model = plain(params)
    model.config = Config(params["depth"])  # type: ignore[assignment]
    return model


def test_an_object_whose_text_hides_what_it_holds_cannot_be_compared() -> None:
    one, other = (shape({"lr": 0.1, "depth": depth}, with_a_config) for depth in (1, 1000))
    assert one != other


def test_a_train_function_is_told_by_its_hyperparameters() -> None:
    def train(member: Any) -> None:
        raise AssertionError("it is not called")

    assert shape({"lr": 0.1, "width": 8}, recipe=train) == shape({"lr": 0.3, "width": 8}, recipe=train)
    assert shape({"lr": 0.1, "width": 8}, recipe=train) != shape({"lr": 0.1, "width": 9}, recipe=train)


def test_a_network_that_needs_its_numbers_is_really_built() -> None:
    assert shape({"lr": 0.1}, not_on_meta) == shape({"lr": 0.1}, plain)
