"""The signature of a member: a digest of all that determines the time and memory of its steps.

Two members with equal signatures run the same kernels on tensors of the same shapes: the same network (except for
numbers such as a dropout's probability), batch, precision, threads and kind of optimizer. Where a network holds an
object that cannot be compared (a lambda, an object of the user's), its hyperparameters count as well, except those
of an optimizer or a schedule: signatures may then differ needlessly, but are never equal by mistake. The same
holds for a train function, whose network is unknown.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import torch
from torch import nn

from ensemble.spec import Ensemble, Identity, Recipe
from ensemble.spec.identity import cost_options, hash_json, mask_magnitude, select_hyperparameters
from ensemble.spec.recipe import has_own_loop
from ensemble.train.hyperparameters import Hyperparameters
from ensemble.train.optimizers import make_recipe_optimizer
from pipelines.fingerprint import describe, describe_ours, is_ours

#: Numbers that a module holds, and prints in its repr, that change no tensor's shape: `Dropout(p=0.1)`.
_HARMLESS = ("p", "eps", "momentum", "negative_slope", "dropout")
_PRINTED = re.compile(rf"\b({'|'.join(_HARMLESS)})=([0-9.e+-]+)")
_MODULE = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in _MODULE if name.endswith("_hooks"))


def signature_of(ensemble: Ensemble, identity: Identity) -> tuple[str, int]:
    """The digest of a member, and the bytes of its parameters and buffers (0: unknown).

    A Recipe's network is built without memory, on torch's meta device, where that works.
    """
    fields = [
        [name, list(shape), dtype] for name, (shape, dtype) in ensemble.pipeline(identity.params).fields.items()
    ]
    seen: list[Any] = [cost_options(identity), sorted(fields)]
    if not isinstance(ensemble.recipe, Recipe) or has_own_loop(ensemble.recipe):
        return hash_json([*seen, select_hyperparameters(identity)]), 0
    model = build_without_memory(ensemble.recipe, ensemble.as_declared(identity.params))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    text = _PRINTED.sub(lambda found: f"{found[1]}={'0' if float(found[2]) == 0 else 'some'}", repr(model))
    seen.append([text, [_describe_tensor(*each) for each in tensors]])
    try:
        seen += [
            [_describe_module(module) for module in model.modules()],
            _describe_optimizer(ensemble.recipe, model, identity),
        ]
    except _Incomparable:
        seen.append(select_hyperparameters(identity))
    return hash_json(seen), sum(_size(tensor) for _, tensor in tensors)


def build_without_memory(recipe: Recipe, params: dict[str, Any]) -> nn.Module:
    """The model of a recipe, on the meta device where it can be built there."""
    with contextlib.suppress(Exception):  # a model that fails without memory is built with memory below
        with torch.device("meta"):
            meta: nn.Module = recipe.model(Hyperparameters(params))
        return meta
    model: nn.Module = recipe.model(Hyperparameters(params))
    return model


class _Incomparable(Exception):
    """Raised inside this module where a part of a member cannot be compared."""


def _describe_surely(value: Any) -> Any:
    if getattr(value, "__closure__", None):  # over all hyperparameters, often, most of which cost nothing
        raise _Incomparable(value.__qualname__)
    described = describe(value)
    if described.gaps:
        raise _Incomparable(described.gaps[0])
    return described.value


def _describe_tensor(name: str, tensor: torch.Tensor) -> list[Any]:
    shape = None if nn.parameter.is_lazy(tensor) else list(tensor.shape)
    return [name, shape, str(tensor.dtype), tensor.requires_grad]


def _size(tensor: torch.Tensor) -> int:
    return 0 if nn.parameter.is_lazy(tensor) else tensor.numel() * tensor.element_size()


def _describe_module(module: nn.Module) -> Any:
    """The class and plain attributes of a module; `_Incomparable` where they are not comparable."""
    cls = type(module)
    if "<locals>" in cls.__qualname__ or any(vars(module)[name] for name in _HOOKS):
        raise _Incomparable(cls.__qualname__)
    held = {}
    for name, value in vars(module).items():
        if name in _MODULE or name.startswith("_flat_weight") or isinstance(value, torch.Tensor | nn.Module):
            continue
        name_only = isinstance(value, torch.dtype | torch.device)
        held[name] = (
            str(value) if name_only else _describe_surely(mask_magnitude(value) if name in _HARMLESS else value)
        )
    return [*_describe_class(cls), held]


def _describe_class(cls: type) -> list[Any]:
    return describe_ours(cls) if is_ours(cls) else [cls.__module__, cls.__qualname__]


def _describe_optimizer(recipe: Recipe, model: nn.Module, identity: Identity) -> Any:
    """The kind of the optimizer, its options as far as they matter, and how many tensors each group has."""
    try:
        made = make_recipe_optimizer(recipe, identity, model, dict(identity.params))
        parameter_groups = made.param_groups
    except Exception as error:  # it fails without memory, or always, which its steps will show
        raise _Incomparable(str(error)) from None
    groups = [
        {
            name: len(value) if name == "params" else _describe_surely(mask_magnitude(value))
            for name, value in group.items()
        }
        for group in parameter_groups
    ]
    return [*_describe_class(type(made)), groups]
