"""Evaluates a model in the middle of its training, which notices nothing of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ensemble.train.loose_tensors import MOST_ITEMS, find_loose
from ensemble.train.seeding import seeded
from ensemble.train.state import TrainState

MOST_BYTES = 2**24  # of a tensor that is restored: larger ones are data, of which a member has no room for a copy


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluate in the block; afterwards each module has the mode that it had: a loop may have frozen a layer."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def undisturbed(state: TrainState) -> Iterator[nn.Module]:
    """Yield the model in evaluation mode, not compiled, without gradients.

    Afterwards modes, attributes, buffers, loose tensors and generators are as before: a forward pass may change
    them, also in evaluation mode. What objects of other classes hold is not restored.
    """
    model = state.optimization.model
    with torch.no_grad(), seeded(state.identity.seed, state.device), evaluation_mode(model), _restored(model):
        if state.identity.compile is not None:
            vars(model).pop("forward", None)
        yield model


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    containers: list[Any] = [vars(module) for module in model.modules()]
    values = [value for attributes in containers for value in attributes.values()]
    containers += [v for v in values if type(v) in (dict, list, set) and len(v) <= MOST_ITEMS]
    tensors = [part for part in (*model.buffers(), *find_loose(model).values()) if part.nbytes <= MOST_BYTES]
    before = [container.copy() for container in containers], [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for container, content in zip(containers, before[0], strict=True):
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)
        for tensor, copy in zip(tensors, before[1], strict=True):
            if not torch.equal(tensor, copy):
                tensor.copy_(copy)
