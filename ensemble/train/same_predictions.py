"""Tries that predictions are a function of the sample: alike in any batch, at any time, with any draws."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ensemble.train.accumulation import split_batch
from ensemble.train.evaluator import evaluation_mode
from ensemble.train.predictions import predict_batch
from ensemble.train.same_model import find_difference, find_rounding
from ensemble.train.seeding import seeded
from ensemble.train.state import TrainState

if TYPE_CHECKING:
    from pipelines import Batch

#: Samples that are predicted at once; into how many parts they are divided, of two at least.
SAMPLES, PARTS, LEAST = 16, 3, 6


def explain_varying(state: TrainState) -> Iterator[str]:
    """Yield why predictions of one sample vary, with the weights that count; nothing where none are declared."""
    batches = _read_batches(state)
    if not batches:
        return
    batch, model = batches[0], state.optimization.model

    def predict(samples: Batch, draw: int = 0) -> Tensor:
        with seeded(state.identity.seed + draw, state.device):
            values = predict_batch(state, model, copy.deepcopy(samples))  # which it may write into
            return values.detach().float().cpu()

    with state.optimization.kept.counting(), torch.no_grad(), evaluation_mode(model):
        first = predict(batch)
        allowed = find_rounding(model, state.device) * float(first.nan_to_num(0, 0, 0).abs().max())

        def is_same(one: Tensor, other: Tensor) -> bool:
            return one.shape == other.shape and find_difference(one, other) <= allowed

        again = predict(batch)
        is_settled = is_same(again, predict(batch))
        if is_settled and not is_same(again, predict(batch, draw=1)):
            yield (
                "predictions draw random numbers, so that each call gives others: F.dropout(..., "
                "training=self.training) draws in training alone"
            )
            return
        for other in batches[1:]:
            predict(other)
        if not is_settled or not is_same(first, again) or not is_same(again, predict(batch)):
            yield (
                "predictions depend on what the model has predicted before: it keeps something between two calls, "
                "such as a hidden state, statistics, a generator; reset it in forward() unless it trains"
            )
            return
        rows = len(batch["index"])
        if state.collate is None and rows >= LEAST and len(first) == rows:  # padding is of the batch
            parts = torch.cat([predict(part) for part in split_batch(batch, PARTS)])
            if parts.shape == first.shape and not is_same(first, parts):
                yield (
                    f"predictions depend on which samples are in the batch: those of {rows} samples differ by up "
                    f"to {find_difference(first, parts):.2g} where they are predicted in {PARTS} parts (a softmax "
                    "over dimension 0, or statistics of the batch?)"
                )


def _read_batches(state: TrainState) -> list[Batch]:
    """Return the first samples of the first split, and some others, as batches."""
    if not (state.can_predict and state.splits):
        return []
    data, split, collate = state.data, state.splits[0], state.collate
    is_short = len(data.pipeline(split)) <= SAMPLES
    return [read(split, SAMPLES, collate) for read in (data.read_first, data.read_last)[: 1 if is_short else 2]]
