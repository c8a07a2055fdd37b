"""Evaluates a model in the middle of its training, which notices nothing of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from ensemble.train.loose_tensors import find_loose
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

    Afterwards the mode of each module, buffers, loose tensors and generators are as before: a forward pass may
    change them, also in evaluation mode.
    """
    model = state.optimization.model
    compiled = vars(model).pop("forward", None) if state.identity.compile is not None else None
    with torch.no_grad(), seeded(state.identity.seed, state.device), evaluation_mode(model):
        tensors = [each for each in (*model.buffers(), *find_loose(model).values()) if each.nbytes <= MOST_BYTES]
        before = [tensor.detach().clone() for tensor in tensors]
        try:
            yield model
        finally:
            for tensor, copy in zip(tensors, before, strict=True):
                if not torch.equal(tensor, copy):
                    tensor.copy_(copy)
            if compiled is not None:
                model.forward = compiled
