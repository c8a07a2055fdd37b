"""Measures what a member's network needs where it is used, for a search that optimizes it: latency and size."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

import torch

from ensemble.spec.limits import FOOTPRINTS
from ensemble.train.evaluator import Evaluator
from ensemble.train.job import TrainingError
from ensemble.train.outputs import compute_outputs
from ensemble.train.predictions import Predict
from ensemble.train.state import TrainState

if TYPE_CHECKING:
    from pipelines import Batch

#: Forward passes that are timed after a first one, of which the fastest counts: what runs beside them makes the
#: others slower. There are fewer where they take longer than `LONGEST_S` together.
PASSES, LONGEST_S = 50, 1.0


def measure_footprint(evaluator: Evaluator, state: TrainState, function: Predict | None) -> dict[str, float]:
    """What of `FOOTPRINTS` the search optimizes; all ranks call it.

    - `latency_ms`: milliseconds of the forward pass for one sample, in evaluation mode and the member's
      precision, with its threads, on its device; without what prepares the sample. Left out where it cannot be
      measured, and the log says why.
    - `model_mb`: megabytes of parameters and buffers in the types in which they are kept.

    Args:
        function: what predicts; None: as `predict` does.
    """
    search = state.ensemble.search
    wanted = {objective.name for objective in search.objectives} & set(FOOTPRINTS) if search is not None else set()
    figures = dict[str, float]()
    if not wanted:
        return figures
    with evaluator.evaluating() as model:
        if "model_mb" in wanted:
            tensors = [*model.parameters(), *model.buffers()]
            figures["model_mb"] = sum(objective.numel() * objective.element_size() for objective in tensors) / 1e6
        if "latency_ms" in wanted:
            try:
                figures["latency_ms"] = 1e3 * _time_forward(state, model, function)
            except Exception as error:  # whatever one sample alone may do to a network that has been trained
                state.reporter.log(f"its latency is not measured: {type(error).__name__}: {error}")
    return figures


def _time_forward(state: TrainState, model: torch.nn.Module, function: Predict | None) -> float:
    """Seconds of the fastest forward pass."""
    if not state.splits:
        raise TrainingError("there is no split to take a sample from: give valid=")
    sample = state.data.read_first(state.splits[0], 1, state.collate)
    forward = functools.partial(function or _make_forward(state, sample), model, sample)

    def time_once() -> float:
        start = time.perf_counter()
        with state.precision.autocast():
            forward()
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)
        return time.perf_counter() - start

    time_once()  # of a shape that is new to it: it may compile, or load kernels
    until = time.perf_counter() + LONGEST_S
    times = [time_once()]
    while len(times) < PASSES and time.perf_counter() < until:
        times.append(time_once())
    return min(times)


def _make_forward(state: TrainState, sample: Batch) -> Predict:
    """`f(model, batch)` of a Recipe: its predict, or else what its loss calls the model with."""
    recipe, seen = state.recipe, state.observer.find()
    return recipe.predict or (lambda model, batch: compute_outputs(recipe, model, batch, seen))
