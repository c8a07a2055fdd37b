"""Measures what a member's network needs where it is used, for a search that optimizes it: latency and size."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

import torch

from ensemble.spec import Recipe
from ensemble.spec.search import FOOTPRINTS
from ensemble.train.accumulation import split_batch
from ensemble.train.evaluator import Evaluator
from ensemble.train.outputs import OutputError, compute_values
from ensemble.train.predictions import Predict
from ensemble.train.state import TrainState

if TYPE_CHECKING:
    from ensemble.train.call import Observation
    from pipelines import Batch

#: Forward passes that are timed, of which the fastest counts: what runs beside them makes the others slower. There
#: are fewer where they take longer than `LONGEST_S` together.
PASSES, LONGEST_S = 50, 1.0


def measure_footprint(evaluator: Evaluator, state: TrainState, function: Predict | None) -> dict[str, float]:
    """What of `FOOTPRINTS` the search optimizes; all ranks call it.

    - `latency_ms`: milliseconds of the forward pass for one sample, in evaluation mode and the member's
      precision, with its threads, on its device; without what prepares the sample. Left out where the member
      predicts nothing.
    - `model_mb`: megabytes of parameters and buffers in the types in which they are kept.

    Args:
        function: what predicts; None: as `predict` does.
    """
    search = state.ensemble.search
    wanted = {each.name for each in search.objectives} & set(FOOTPRINTS) if search is not None else set()
    found = dict[str, float]()
    if not wanted:
        return found
    with evaluator.evaluating() as model:
        if "model_mb" in wanted:
            tensors = [*model.parameters(), *model.buffers()]
            found["model_mb"] = sum(each.numel() * each.element_size() for each in tensors) / 1e6
        if "latency_ms" in wanted and (sample := _find_sample(state)) is not None:
            try:
                found["latency_ms"] = 1e3 * _time_forward(state, model, sample, function)
            except OutputError as error:
                state.reporter.log(f"its latency is not measured: {error}")
    return found


def _find_sample(state: TrainState) -> Batch | None:
    """A batch of one sample of a split that is predicted; None where there is none."""
    for split in state.effects.splits:
        for batch in state.data.split(split, state.collate):
            if many := len(batch["index"]):
                return split_batch(batch, many)[0]
    return None


def _time_forward(state: TrainState, model: torch.nn.Module, sample: Batch, function: Predict | None) -> float:
    """Seconds of the fastest forward pass."""
    seen, recipe = state.observer.find(sample), state.ensemble.recipe
    if function is None:
        assert isinstance(recipe, Recipe)
        function = functools.partial(_predict, recipe, seen)
    fastest, began = float("inf"), time.perf_counter()
    for _ in range(PASSES):
        start = time.perf_counter()
        with state.precision.autocast():
            function(model, sample)
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)
        fastest = min(fastest, time.perf_counter() - start)
        if time.perf_counter() - began > LONGEST_S:
            break
    return fastest


def _predict(recipe: Recipe, seen: Observation, model: torch.nn.Module, sample: Batch) -> torch.Tensor:
    return compute_values(recipe, model, sample, seen)
