"""Tries that predictions are a function of the sample: alike in any batch, at any time, with any draws."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ensemble.spec import Recipe
from ensemble.train.accumulation import split_batch
from ensemble.train.outputs import compute_values
from ensemble.train.same_model import find_rounding
from ensemble.train.seeding import seeded
from ensemble.train.state import TrainState
from ensemble.train.undisturbed import evaluation_mode

if TYPE_CHECKING:
    from pipelines import Batch

#: Samples that are predicted at once; into how many parts they are divided, and how many that takes.
SAMPLES, PARTS, LEAST = 16, 3, 6


def explain_varying(state: TrainState) -> Iterator[str]:
    """Yield why predictions of one sample vary, with the weights that count; nothing where none are known."""
    recipe, split = state.ensemble.recipe, next(iter(state.splits), None)
    if split is None or not isinstance(recipe, Recipe) or not (state.observer.seen or recipe.predict):
        return
    batches = list(_read_batches(state, split))
    if not batches:
        return
    batch, model = batches[0], state.optimization.model

    def predict(samples: Any, draw: int = 0) -> Tensor:
        with seeded(state.identity.seed + draw, state.device):
            return compute_values(recipe, model, samples, state.observer.seen).detach().float().cpu()

    with state.optimization.kept.counting(), torch.no_grad(), evaluation_mode(model):
        first = predict(batch)
        allowed = find_rounding(model, state.device) * float(first.nan_to_num(0, 0, 0).abs().max())

        def is_same(one: Tensor, other: Tensor) -> bool:
            return one.shape == other.shape and _spread(one, other) <= allowed

        again = predict(batch)
        if not is_same(again, predict(batch, draw=1)) or not is_same(again, predict(batch)):
            yield (
                "predictions draw random numbers, so that each call gives others: F.dropout(..., "
                "training=self.training) draws in training alone"
            )
            return
        for other in batches[1:]:
            predict(other)
        if not is_same(first, again) or not is_same(again, predict(batch)):
            yield (
                "predictions depend on what the model has predicted before: it keeps something between two calls, "
                "such as a hidden state or statistics; reset it in forward(), or where self.training is False"
            )
            return
        rows = len(batch["index"])
        if state.collate is None and rows >= LEAST and len(first) == rows:  # padding is of the batch
            part = split_batch(batch, PARTS)[0]
            few, many = predict(part), len(part["index"])
            if few.shape[1:] == first.shape[1:] and not is_same(first[:many], few):
                yield (
                    f"predictions depend on which samples are in the batch: those of {many} samples alone differ "
                    f"by up to {_spread(first[:many], few):.2g} from those of {rows} (a softmax over dimension 0, "
                    "or statistics of the batch?)"
                )


def _read_batches(state: TrainState, split: str) -> Iterator[Batch]:
    """Yield the first samples of a split, and some others, as batches."""
    rows = len(state.data.pipeline(split))
    for first in dict.fromkeys((0, max(0, rows - SAMPLES))):
        with contextlib.suppress(StopIteration):
            yield state.data.read_rows(split, range(first, min(rows, first + SAMPLES)), state.collate)


def _spread(one: Tensor, other: Tensor) -> float:
    return float(torch.where(one.isnan() & other.isnan(), 0, (one - other).abs()).nan_to_num(torch.inf).max())
