"""What training may change of a model and its optimizer beside tensors: the part `structure` of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ensemble.train.job import TrainingError
from ensemble.train.loose_tensors import STANDARD
from ensemble.train.own_tensors import select_own

_NUMBERS = (bool, int, float, type(None))
Numbers = Mapping[str, Mapping[str, Any]]


def describe(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return which parameters are trained, the optimizer's groups by names, and the modules' plain numbers."""
    own, names = select_own(model), {id(weight): name for name, weight in model.named_parameters()}
    groups = [[names.get(id(weight)) for weight in group["params"]] for group in optimizer.param_groups]
    if None in chain(*groups):
        raise TrainingError(
            "the optimizer holds a parameter that is not the model's: it would be neither exchanged between "
            "workers nor saved; make it part of the model"
        )
    numbers = {
        path: {
            name: value for name, value in vars(part).items() if type(value) in _NUMBERS and name not in STANDARD
        }
        for path, part in model.named_modules()
    }
    flags = {name: weight.requires_grad for name, weight in model.named_parameters() if own(weight)}
    return {"requires_grad": flags, "groups": groups, "numbers": numbers}


def describe_outline(structure: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Any:
    """Return what a fresh model must have as well to take a checkpoint: names, shapes, what is trained, groups."""
    shapes = {name: None if is_lazy(tensor) else tuple(tensor.shape) for name, tensor in weights.items()}
    return structure["requires_grad"], structure["groups"], shapes


def select_changed(numbers: Numbers, built: Numbers) -> dict[str, dict[str, Any]]:
    """Return the numbers that differ from those of the model as it was built."""
    changed = {
        path: {
            name: value
            for name, value in of_module.items()
            if name not in built.get(path, {}) or repr(built[path][name]) != repr(value)
        }
        for path, of_module in numbers.items()
    }
    return {path: of_module for path, of_module in changed.items() if of_module}


def restore(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], options: Sequence[Any] = ()
) -> None:
    """Give a model that was built again, and its optimizer, the structure that a checkpoint has.

    Args:
        options: of each group of the optimizer, for those that it has not got yet.

    Raises:
        TrainingError: the model lacks a parameter, or has another one.
    """
    named, flags = dict(model.named_parameters()), saved["requires_grad"]
    own = select_own(model)
    for name in chain(flags, *saved["groups"], (name for name, weight in named.items() if own(weight))):
        if name not in named or (name not in flags and own(named[name])):
            has, lacks = ("the checkpoint", "the model") if name not in named else ("the model", "the checkpoint")
            raise TrainingError(
                f"{has} has a parameter {name!r}, which {lacks} has not: what training adds to a model, or takes "
                "from it, is not there when it is built again; let Recipe.model, or the train function, build it"
            )
    for name, flag in flags.items():
        if named[name].requires_grad != flag:
            named[name].requires_grad_(flag)
    groups = [[named[name] for name in names] for names in saved["groups"]]
    before = optimizer.param_groups
    if [[id(w) for w in group["params"]] for group in before] != [[id(w) for w in group] for group in groups]:
        for group, weights in zip(before, groups, strict=False):
            group["params"] = weights
        del before[len(groups) :]
        for number, weights in enumerate(groups[len(before) :], len(before)):
            optimizer.add_param_group({**(options[number] if options else {}), "params": weights})
    set_numbers(model, saved["numbers"])
    set_modes(model, saved.get("modes"))


def set_numbers(model: nn.Module, numbers: Numbers) -> None:
    """Set the plain numbers of modules, by path and name."""
    for path, part in model.named_modules():
        vars(part).update(numbers.get(path, {}))


def find_modes(model: nn.Module) -> list[str]:
    """Return the paths of the modules in evaluation mode."""
    return [path for path, part in model.named_modules() if not part.training]


def set_modes(model: nn.Module, modes: Sequence[str] | None) -> None:
    """Put the modules of these paths into evaluation mode, all others into training mode; None: leave them."""
    if modes is not None:
        for path, part in model.named_modules():
            part.training = path not in modes
