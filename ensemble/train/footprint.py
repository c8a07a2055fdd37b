"""Measures what a member's network needs where it is used, for a search that optimizes it: latency and size."""

from __future__ import annotations

import time

import torch

from ensemble.spec.limits import FOOTPRINTS
from ensemble.train.evaluator import Evaluator
from ensemble.train.predictions import Predict
from ensemble.train.state import TrainState

#: Forward passes that are timed, of which the fastest counts; fewer where they take longer than `LONGEST_S`.
PASSES, LONGEST_S = 50, 1.0


def measure_footprint(evaluator: Evaluator, state: TrainState, function: Predict) -> dict[str, float]:
    """Return what of `FOOTPRINTS` the search optimizes; all ranks call it.

    - `latency_ms`: milliseconds of the forward pass for one sample, in evaluation mode and the member's
      precision, with its threads, on its device; without what prepares the sample. Left out where it cannot be
      measured, and the log says why.
    - `model_mb`: megabytes of parameters and buffers in the types in which they are kept.

    Args:
        function: what predicts.
    """
    search = state.ensemble.search
    wanted = {objective.name for objective in search.objectives} & set(FOOTPRINTS) if search is not None else set()
    figures = dict[str, float]()
    if not wanted:
        return figures
    with evaluator.evaluating() as model:
        if "model_mb" in wanted:
            figures["model_mb"] = sum(part.nbytes for part in (*model.parameters(), *model.buffers())) / 1e6
        if "latency_ms" in wanted and state.splits:
            try:
                figures["latency_ms"] = 1e3 * _time_forward(state, model, function)
            except Exception as error:  # whatever one sample alone may do to a network that has been trained
                state.reporter.log(f"its latency is not measured: {type(error).__name__}: {error}")
    return figures


def _time_forward(state: TrainState, model: torch.nn.Module, function: Predict) -> float:
    """Return the seconds of the fastest forward pass."""
    sample = state.data.read_first(state.splits[0], 1, state.collate)
    times, until = list[float](), float("inf")
    while len(times) <= PASSES and time.perf_counter() < until:
        start = time.perf_counter()
        with state.precision.autocast():
            function(model, sample)
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)
        times.append(time.perf_counter() - start)
        if len(times) == 1:  # of a shape that is new to it: it may compile, or load kernels
            until = time.perf_counter() + LONGEST_S
    return min(times)
