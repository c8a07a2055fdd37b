"""Predicts a split with the weights that count for a member, and checks that the rows are what the task says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ensemble.spec.split_metrics import list_asked
from ensemble.spec.task import Task
from ensemble.store import PredictedRows, UnlikeRows
from ensemble.store.member import OTHERWISE, UNCOMBINED
from ensemble.train.call import find_target, take_fields
from ensemble.train.data import as_stored_target
from ensemble.train.evaluator import Evaluator
from ensemble.train.first_look import try_offered
from ensemble.train.gather import find_first
from ensemble.train.output_shapes import explain_shape_mismatch
from ensemble.train.outputs import OutputError, compute_outputs, compute_values
from ensemble.train.seeding import seeded
from ensemble.train.state import TrainState

if TYPE_CHECKING:
    from pipelines import Batch

#: `predict(model, batch) -> values`, laid out by the task (`ensemble.spec.task`).
Predict = Callable[[nn.Module, "Batch"], Tensor]


def predict(evaluator: Evaluator, state: TrainState, split: str, function: Predict | None = None) -> None:
    """Save the member's predictions for a split; where there are none, log why.

    Args:
        function: what predicts; None: `Recipe.predict`, or what the outputs of the model say.
    """
    with contextlib.closing(evaluator.make_rows()) as rows:
        fields = [] if state.is_own_loop else list_asked(state.recipe.split_metrics)
        rows.fields = {name: [] for name in fields}
        why = find_first(state.comm, _predict_rows(evaluator, state, split, function, rows))
        if why is None:
            evaluator.save_rows(split, None, rows)
            return
        line = f"no predictions on {split!r} are saved: {why}"
        is_known = split != "valid" or any(text.startswith(UNCOMBINED) for text in state.remarked)
        state.reporter.log(line) if is_known else state.remark(f"{UNCOMBINED}: {line}")


def _predict_rows(
    evaluator: Evaluator, state: TrainState, split: str, function: Predict | None, rows: PredictedRows
) -> str | None:
    """Add the predictions of this rank; returns why there are none."""
    task, why, otherwise = state.recipe.find_task(), None, None
    try:
        with evaluator.evaluating() as model:
            for batch in evaluator.batches(split):
                with state.precision.autocast():
                    values = _predict_batch(state, model, batch, task, function)
                    if function is not None and not len(rows):
                        otherwise = _explain_otherwise(state, model, batch, function, values)
                target = as_stored_target(task, find_target(batch, state.target))
                why = explain_shape_mismatch(task, values, target)
                if why is None and not len(rows):
                    why = evaluator.bound(rows, task, values) or None
                if why is not None:
                    break
                rows.add_fields(take_fields(batch, [name for name in rows.fields if name in batch]))
                rows.add(values.float().cpu(), batch["index"].cpu(), None if target is None else target.cpu())
                if (why := evaluator.explain_excess(rows)) is not None:
                    break
    except (OutputError, UnlikeRows) as error:
        why = str(error)
    if (otherwise := find_first(state.comm, otherwise)) is not None:
        state.observer.otherwise, state.saved_at = otherwise, None  # the checkpoint says it to whoever loads it
        state.remark(otherwise)
    return why


def _predict_batch(
    state: TrainState, model: nn.Module, batch: Batch, task: Task, function: Predict | None
) -> Tensor:
    """The predictions of a batch, [b, ...]; raises OutputError where the outputs are not what the task needs."""
    recipe, observer = state.recipe, state.observer
    if function is not None:
        return function(model, batch)
    if observer.seen is None:
        try_offered(state, batch)
    if recipe.predict is None and observer.find().call is None and observer.seen is None:
        with observer.watching(model, batch):
            compute_outputs(recipe, model, batch)
    return compute_values(recipe, model, batch, observer.find())


def _explain_otherwise(
    state: TrainState, model: nn.Module, batch: Batch, function: Predict, values: Tensor
) -> str | None:
    """Why predictions by a function are not what a loaded model would give; None where they are, or none loads."""
    seed, rounding = state.identity.seed, 2.0**-12 if state.identity.precision == "fp32" else 2.0**-5
    for _ in range(2):  # what draws is called again, each with the same draws
        try:
            with seeded(seed, state.device):
                loaded = compute_values(state.recipe, model, batch, state.observer.seen)
        except Exception:  # as whoever loads it is told
            return None
        mean = float(loaded.nan_to_num(0, 0, 0).abs().sum()) / max(1, loaded.numel())
        if loaded.shape == values.shape and torch.allclose(
            values.float().cpu(), loaded.cpu(), rtol=rounding, atol=rounding * mean, equal_nan=True
        ):
            return None
        with seeded(seed, state.device):
            values = function(model, batch)
    return f"{OTHERWISE}, so that none can be loaded: declare the function as Recipe.predict"
