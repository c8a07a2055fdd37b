"""What a member cannot be trained with: its model, loss, optimizer, loop or data; named at its first step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from kit import train_child as cases
from kit.mistakes import Mistake
from torch import nn, optim

from ensemble import Recipe
from pipelines import Pipeline, sources

CLASSES = Recipe(model=cases.plain, loss=cases.loss, task="classification")
NAMED = Recipe(model=cases.plain, loss="cross_entropy", inputs="x")
FOREIGN = ("train=", "member.dataloader")
IN_TURN = (*FOREIGN, "nor member.step()")


def fails(what: str, recipe: Any, *words: str, attempts: int = 1, **options: Any) -> Mistake:
    """A member that fails; it is tried again only where the cause may pass."""
    return Mistake(what, lambda: cases.declare(recipe, 1, **options), attempts, words, "train")


# --- model, loss, metrics


def lose(model: nn.Module, batch: Any) -> torch.Tensor:
    """What no CPU kernel does in fp16, and autocast does not widen."""
    with torch.autocast("cpu", enabled=False):
        torch.linalg.inv(torch.eye(2).half())
    return cases.loss(model, batch)


class Backwards(torch.autograd.Function):
    """Does nothing, but in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        torch.linalg.inv(torch.eye(2).half())
        return grad


class Extra(cases.Net):
    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


class Pair(cases.Net):
    def forward(self, x: Any) -> Any:
        return super().forward(x), x


NO_KERNEL = ("in fp16 on the CPU: use precision='bf16' or 'fp32', or a GPU (", "Half")


def with_recipe(what: str, changes: dict[str, Any], *words: str, **options: Any) -> Mistake:
    return fails(what, replace(CLASSES, **changes), *words, **options)


def lose_mean(model: nn.Module, batch: Any) -> Any:
    return cases.loss(model, batch).mean()


def lose_backwards(model: nn.Module, batch: Any) -> Any:
    return Backwards.apply(cases.loss(model, batch))


def lose_of_pair(model: nn.Module, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch["x"])[0], batch["label"], reduction="none")


NO_MODULE = "must return a torch.nn.Module, and returned <class"
FROZEN = ("none of the model's 4 parameters is trained", "requires_grad is False")
LAYERS = "in Linear(in_features=9, out_features=3, bias=True), where the batch has 'x' [5, 6]"
NO_WIDTH = "that the member does not have, 'width'; did you mean 'widht'? (valid: lr, widht)"
MODELS = [
    *(
        with_recipe(what, {field: function}, *words)
        for what, field, function, *words in (
            ("a frozen model", "model", lambda params: cases.Net().requires_grad_(False), *FROZEN),
            ("no parameters", "model", lambda params: nn.Flatten(), "none of the model's 0 parameters is trained"),
            ("a class of models", "model", lambda params: nn.Flatten, NO_MODULE),
            ("a state for no checkpoint", "model", lambda params: Extra(), "'_extra_state', which is not a"),
            ("layers that do not fit each other", "model", lambda params: nn.Linear(9, 3), LAYERS),
            ("a text", "metrics", lambda *_: {"note": "fine"}, "the metric 'note' must be a number, got 'fine'"),
            ("a tensor", "metrics", lambda outputs, _: outputs, "Recipe.metrics must return a dict, got Tensor"),
            ("a mean", "loss", lose_mean, 'reduction="none"'),
            ("no field", "loss", lambda model, batch: model(batch["y"]), "the batch has no field 'y'"),
        )
    ),
    with_recipe("a loss in fp16 without a kernel", {"loss": lose}, *NO_KERNEL, precision="fp16"),
    with_recipe("a gradient in fp16 without a kernel", {"loss": lose_backwards}, *NO_KERNEL, precision="fp16"),
    with_recipe("no width", {"model": lambda p: nn.Linear(6, p["width"])}, NO_WIDTH, params={"widht": 4}),
    fails(
        "outputs that are none of the task",
        Recipe(model=lambda params: Pair(), loss=lose_of_pair),
        *("the model returned a tuple", "declare Recipe.predict"),
    ),
]


# --- optimizers


def take_turns(member: Any) -> None:
    nets = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 1)])
    member.prepare(nets, [optim.SGD(net.parameters(), lr=0.1) for net in nets])


def prepare_twice(member: Any) -> None:
    for net in (nn.Linear(3, 2), nn.Linear(2, 1)):
        member.prepare(net, optim.SGD(net.parameters(), lr=0.1))


def keep_a_parameter(member: Any) -> None:
    model, own = cases.plain(member.params), nn.Parameter(torch.zeros(1))
    member.prepare(model, optim.SGD([*model.parameters(), own], lr=0.1))


OPTIMIZERS = [
    with_recipe(
        "a closure", {"optimizer": lambda net, _: optim.LBFGS(net.parameters())}, "LBFGS computes ", *FOREIGN
    ),
    with_recipe("two optimizers", {"optimizer": lambda net, params: (1, 2)}, "got tuple; ", "of a GAN)", *FOREIGN),
    fails(
        "in turn",
        take_turns,
        *("got list; ", "of a GAN)", "further models and optimizers by member.state(name, ...)"),
    ),
    fails("two calls of prepare", prepare_twice, "is called once, ", "of a GAN)", *IN_TURN),
    fails("a parameter that the model does not have", keep_a_parameter, "not the model's"),
    *(
        Mistake(
            f"no learning rate: {sorted(params)}",
            lambda params=params: replace(cases.declare(CLASSES, 1), members=[params]),
            1,
            words,
            "train",
        )
        for params, words in (
            ({}, ("no learning rate",)),
            ({"leraning_rate": 0.1}, ("no learning rate", "; did you mean 'lr' by 'leraning_rate'?")),
        )
    ),
]


# --- data

X = np.random.default_rng(0).normal(size=(23, 6)).astype(np.float32)
LABEL = np.arange(23) % 3
ROW = "sample 7 (arrays(x, label):row 7)"


def data(label: Any = LABEL, x: Any = X) -> Pipeline:
    return Pipeline(sources.arrays(x=x, label=label))


def spoil(array: Any, place: Any, value: Any) -> Any:
    spoilt = array.copy()
    spoilt[place] = value
    return spoilt


LABELS = (X[:, :3] > 0).astype(np.int64)
MULTILABEL = Recipe(model=cases.plain, loss="binary_cross_entropy", inputs="x", task="multilabel")
NO_CLASS = "; if -1 means no class, let a stage replace it by -100, torch's ignore_index"


def own_multilabel(model: nn.Module, batch: Any) -> Any:
    label = batch["label"].float()
    return nn.functional.binary_cross_entropy_with_logits(model(batch["x"]), label, reduction="none").mean(dim=1)


SHARES = "has the label 7: labels are 0, 1, or shares between"
FLOATS = ("the target is float32, and classes are integers: return int64", "(the target is the field 'label')")
DATA = [
    *(
        fails(
            f"the label {label} in {split}",
            CLASSES,
            f"Ensemble.{split}: {ROW} has the label {label} in 'label', "
            f"and the model has the classes 0 ... 2{more}",
            **dict[str, Any](
                {"train": data(), "valid": data(), split: data(spoil(LABEL, 7, label)), "allow_overlap": True}
            ),
        )
        for split, label, more in (("train", 3, ""), ("train", -1, NO_CLASS), ("valid", 3, ""))
    ),
    fails(
        "such a label in valid, where the loss takes any",
        replace(MULTILABEL, loss=own_multilabel, inputs=()),
        f"Ensemble.valid: {ROW} has the label 7: labels",
        train=data(LABELS),
        valid=data(spoil(LABELS, (7, 1), 7)),
        allow_overlap=True,
    ),
    *(
        fails(what, recipe, *words, train=train, valid=None)
        for what, recipe, train, *words in (
            ("a label", MULTILABEL, data(spoil(LABELS, (7, 1), 7)), SHARES),
            ("NaN in inputs", NAMED, data(x=spoil(X, (11, 2), np.nan)), "NaN or infinity is in 'x' of sample 11"),
            ("a target of another type", NAMED, data(LABEL.astype(np.float32)), *FLOATS),
        )
    ),
]

ROWS = [*MODELS, *OPTIMIZERS, *DATA]
