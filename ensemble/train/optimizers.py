"""Makes a member's optimizer: its recipe's, or the one that its option `optimizer=` declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ensemble.comm.sparse_gradients import find_sparse_parameters
from ensemble.spec import Identity, Recipe
from ensemble.spec.functions import find_meant
from ensemble.spec.options import OPTIMIZERS, NamedOptions, resolve_with_hyperparameters
from ensemble.train.batchnorm import bias_and_norm
from ensemble.train.job import TrainingError
from ensemble.train.own_tensors import select_own
from pipelines.environment.torch_threads import limit_torch_threads
from pipelines.providers import import_object

#: Loaded where they are declared.
_CLASSES = {
    "sgd": "torch.optim:SGD",
    "adam": "torch.optim:Adam",
    "adamw": "torch.optim:AdamW",
    "lars": "ensemble.train.lars:LARS",
}


def warm_up() -> None:
    """Do what torch does once a process: what it imports for its first optimizer, and sets up in its first step.

    For a process from which others are forked, which then share some hundred modules, and the memory that a first
    forward and backward pass writes (10 MB of each member). No random number is drawn and no thread started. A
    backward pass asks for devices: where torch is built for any, nothing is computed, because to ask begins CUDA.
    """
    kernel, matrix = (nn.Parameter(torch.zeros(shape)) for shape in ((4, 3, 3, 3), (2, 4)))
    optimizer = torch.optim.SGD([kernel, matrix], lr=0.1)
    is_for_cuda = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    if is_for_cuda or torch.accelerator.current_accelerator() is not None:
        return
    with limit_torch_threads():
        images = functional.relu(functional.conv2d(torch.zeros(2, 3, 16, 16), kernel))
        scores = functional.linear(images.mean((2, 3)), matrix)
        functional.cross_entropy(scores, torch.zeros(2, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def make_recipe_optimizer(
    recipe: Recipe, identity: Identity, model: nn.Module, params: dict[str, Any]
) -> torch.optim.Optimizer:
    """The recipe's optimizer, or the declared one, or SGD."""
    if recipe.optimizer is not None:
        return recipe.optimizer(model, params)  # type: ignore[no-any-return]
    return make_optimizer(identity.optimizer or "sgd", model, params)


def make_optimizer(options: NamedOptions, model: nn.Module, params: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The optimizer of all of a model's parameters, checked to suit it.

    Args:
        options: a name of `ensemble.spec.options.OPTIMIZERS`, or a dict of the name and options. `decay_norm` says
            whether weight decay, and LARS's adaptation, also apply to biases and normalizations.
        params: hyperparameters; one of an option's name takes the option's place.
    """
    arguments = resolve_with_hyperparameters("optimizer", options, OPTIMIZERS, params)
    name, decay_norm = arguments.pop("name"), arguments.pop("decay_norm")
    if arguments["lr"] is None:
        misspelt = next((key for key in list(params) if find_meant(key, ("lr",))), None)
        hint = f"; did you mean 'lr' by {misspelt!r}?" if misspelt is not None else ""
        raise TrainingError(
            f"the optimizer {name!r} has no learning rate{hint}: give the member the hyperparameter 'lr', or "
            f"optimizer={{'name': {name!r}, 'lr': ...}}"
        )
    if find_sparse_parameters(model) and (name != "sgd" or arguments["weight_decay"]):
        decay = " with weight decay" if name == "sgd" else ""
        raise TrainingError(
            f"the optimizer {name!r}{decay} takes no sparse gradients: make the model's embeddings with "
            "sparse=False, take 'sgd' without weight decay, or a Recipe.optimizer that takes them "
            "(torch.optim.SparseAdam, Adagrad)"
        )
    return import_object(_CLASSES[name])(_group_parameters(name, model, decay_norm), **arguments)  # type: ignore[no-any-return]


def _group_parameters(name: str, model: nn.Module, decay_norm: bool) -> list[Any]:
    """All parameters of its own, or those with weight decay before those without."""
    own = select_own(model)
    if decay_norm:
        everything = list(filter(own, model.parameters()))
        return [{"params": everything, "adapt": True}] if name == "lars" else everything
    free = {id(p) for p in bias_and_norm(model)}
    split: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in filter(own, model.parameters()):
        split[id(parameter) not in free].append(parameter)
    groups: list[dict[str, Any]] = [{"params": split[True]}, {"params": split[False], "weight_decay": 0.0}]
    if name == "lars":
        groups[0]["adapt"], groups[1]["adapt"] = True, False
    return [group for group in groups if group["params"]]
