"""The signature of a member: a digest of all that determines the time and memory of its steps.

Members with equal signatures run the same kernels on tensors of the same shapes. Where a network has parts that
cannot be compared, hyperparameters count, too: signatures may differ needlessly, but are never equal by mistake.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ensemble.spec import Ensemble, Identity, Recipe, SpecError
from ensemble.spec.identity import cost_options, hash_json, mask_magnitude, select_hyperparameters
from ensemble.spec.recipe import has_own_loop
from ensemble.train.checkpoint import check_fit
from ensemble.train.hyperparameters import Hyperparameters
from ensemble.train.job import ShapeMismatchError
from ensemble.train.optimizers import make_recipe_optimizer
from ensemble.train.own_tensors import call_model

#: Numbers that a module holds, and prints in its repr, that change no tensor's shape: `Dropout(p=0.1)`.
_HARMLESS = ("p", "eps", "momentum", "negative_slope", "dropout")
_PRINTED = re.compile(rf"\b({'|'.join(_HARMLESS)})=([0-9.e+-]+)")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
#: Structures of members that are rehearsed, at most.
MOST_STRUCTURES = 3
_MODULE = {"train", *vars(nn.Module())} - {"training"}  # a base has a train() of its own


def signature_of(ensemble: Ensemble, identity: Identity) -> tuple[str, int]:
    """The digest of a member, and the bytes of its parameters and buffers (0: unknown)."""
    fields = ensemble.pipeline(identity.params).fields
    described: list[Any] = [
        cost_options(identity),
        sorted([name, list(shape), dtype] for name, (shape, dtype) in fields.items()),
    ]
    if not isinstance(ensemble.recipe, Recipe) or has_own_loop(ensemble.recipe):
        return hash_json([*described, select_hyperparameters(identity)]), 0
    model = build_without_memory(ensemble.recipe, ensemble.as_declared(identity.params))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    text = repr(
        [
            _PRINTED.sub(lambda match: f"{match[1]}={'0' if float(match[2]) == 0 else 'some'}", repr(model)),
            [[name, _shape(tensor), str(tensor.dtype), tensor.requires_grad] for name, tensor in tensors],
            [_describe_module(module) for module in model.modules()],
            _describe_optimizer(ensemble.recipe, model, identity),
        ]
    )
    if _ADDRESS.search(text) or "<locals>" in text:  # objects that cannot be compared, classes made in a function
        described.append(select_hyperparameters(identity))
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors if _shape(tensor) is not None)
    return hash_json([*described, _ADDRESS.sub("", text)]), size


def list_structures(ensemble: Ensemble, members: list[Identity]) -> list[str]:
    """Return the first member of each structure but the first."""
    first: dict[str, str] = {}
    for identity in members:
        first.setdefault(json.dumps(_describe_structure(ensemble, identity), default=repr), identity.member)
    return list(first.values())[1:MOST_STRUCTURES]


def _describe_structure(ensemble: Ensemble, identity: Identity) -> list[Any]:
    """Return what of a member is rehearsed: classes of modules, and options with a state."""
    own, recipe = identity, ensemble.recipe
    options: list[Any] = [own.averaging, own.early_stopping, own.mixup > 0, own.keep, own.precision, own.callbacks]
    options += [own.optimizer and own.optimizer["name"], own.schedule and own.schedule["name"]]
    if not isinstance(recipe, Recipe) or has_own_loop(recipe):
        return [options, {name: value for name, value in own.params.items() if isinstance(value, str | bool)}]
    with contextlib.suppress(Exception):  # the member itself shows it
        model = build_without_memory(recipe, ensemble.as_declared(own.params))
        return [options, sorted({type(module).__name__ for module in model.modules()})]
    return [options]


def check_start(ensemble: Ensemble, member: Identity, saved: Mapping[str, Any]) -> None:
    """Check that what `read_weights` returned is of a Recipe's model; raises SpecError."""
    lineage, recipe = member.lineage or {}, ensemble.recipe
    if not isinstance(recipe, Recipe) or has_own_loop(recipe):
        return
    try:
        model = build_without_memory(recipe, member.params)
    except Exception:  # its steps will show it
        return
    try:
        check_fit(model, saved, lineage["from"])
    except ShapeMismatchError as error:
        raise SpecError(f"{member.member}: {error}") from None


def build_without_memory(recipe: Recipe, params: dict[str, Any]) -> nn.Module:
    """The model of a recipe, on the meta device where it can be built there."""
    with contextlib.suppress(Exception):  # a model that fails without memory is built with memory below
        with torch.device("meta"):
            meta: nn.Module = call_model(recipe, Hyperparameters(params))
        return meta
    model: nn.Module = call_model(recipe, Hyperparameters(params))
    return model


def _shape(tensor: torch.Tensor) -> list[int] | None:
    return None if nn.parameter.is_lazy(tensor) else list(tensor.shape)


def _describe_module(module: nn.Module) -> list[Any]:
    """The class, hooks and plain attributes of a module."""
    held = {
        name: mask_magnitude(value) if name in _HARMLESS else value
        for name, value in vars(module).items()
        if not isinstance(value, torch.Tensor | nn.Module) and not name.startswith("_flat_weight")
    }
    own = {
        name: value if _is_plain(value) else f"{value!r} at 0x0"
        for name, value in held.items()
        if name not in _MODULE
    }
    hooks = [list(value.values()) for name, value in held.items() if name.endswith("_hooks") and value]
    return [f"{type(module).__module__}.{type(module).__qualname__}", own, hooks]


def _is_plain(value: Any) -> bool:
    """Whether a text says all of a value; the text of another object may hide what tells it from its like."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, [*value.keys(), *value.values()]))
    if type(value) in (list, tuple, set, frozenset, torch.Size):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str | torch.dtype | torch.device)


def _describe_optimizer(recipe: Recipe, model: nn.Module, identity: Identity) -> Any:
    """The kind of the optimizer, its options as far as they matter, and how many tensors each group has."""
    try:
        optimizer = make_recipe_optimizer(recipe, identity, model, dict(identity.params))
        groups = [
            {name: len(value) if name == "params" else mask_magnitude(value) for name, value in group.items()}
            for group in optimizer.param_groups
        ]
    except Exception:  # it fails without memory, or always, which its steps will show
        return "an optimizer at 0x0"  # hyperparameters count
    return [f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", groups]
