"""Predicts a split with the weights that count for a member, and checks that the rows are what the task says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ensemble.spec.losses import find_wrong_label
from ensemble.spec.split_metrics import list_asked
from ensemble.spec.task import CLASSIFICATION, LABELS, Task, as_task, find_known
from ensemble.store import PredictedRows, UnlikeRows
from ensemble.store.member import OTHERWISE, UNCOMBINED
from ensemble.train.call import Observation, find_target, take_fields
from ensemble.train.data import as_stored_target
from ensemble.train.evaluator import Evaluator
from ensemble.train.first_look import try_offered
from ensemble.train.gather import find_first
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
    with contextlib.closing(state.effects.make_rows()) as rows:
        asked = [] if state.is_own_loop else list_asked(state.recipe.split_metrics)
        rows.fields = {name: [] for name in asked}
        why, task = _predict_rows(evaluator, state, split, function, rows)
        why = find_first(state.comm, why)
        if why is not None:
            line = f"no predictions on {split!r} are saved: {why}"
            is_known = split != "valid" or any(text.startswith(UNCOMBINED) for text in state.remarked)
            state.reporter.log(line) if is_known else state.remark(f"{UNCOMBINED}: {line}")
            return
        evaluator.save_rows(split, task, rows)


def _predict_rows(
    evaluator: Evaluator, state: TrainState, split: str, function: Predict | None, rows: PredictedRows
) -> tuple[str | None, Task | None]:
    """Add the predictions of this rank; returns why there are none, and their task."""
    why, task, is_foreign = None, None, False  # whether some targets are of another kind than the task's
    other: str | None = None
    try:
        with evaluator.evaluating() as model:
            for batch in evaluator.batches(split):
                with state.precision.autocast():
                    values, task = _predict_batch(state, model, batch, function)
                    if function is not None and not len(rows):
                        other = _explain_otherwise(state, model, batch, function, values)
                target = as_stored_target(task, find_target(batch, state.target))
                why = explain_shape_mismatch(task, values, target)
                if why is not None and split == "shifted" and target is not None:
                    is_foreign, why = True, explain_shape_mismatch(task, values, None)
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
    if (other := find_first(state.comm, other)) is not None:
        state.observer.otherwise, state.saved_at = other, None  # the checkpoint says it to whoever loads it
        state.remark(other)
    if find_first(state.comm, is_foreign or None):
        rows.replace_target(None)
    return why, task


def _predict_batch(
    state: TrainState, model: nn.Module, batch: Batch, function: Predict | None
) -> tuple[Tensor, Task]:
    """The predictions of a batch, [b, ...], and their task.

    Raises:
        OutputError: there is no task, or the outputs are not what it needs.
    """
    recipe, observer = state.recipe, state.observer
    if function is not None:
        declared = as_task("Recipe.task", recipe.task)
        return function(model, batch), declared or observer.find(batch).task or CLASSIFICATION
    if observer.find(batch).task is None:
        try_offered(state, batch)
    if recipe.predict is None and observer.find(batch) == Observation():  # of a checkpoint before there was one
        with observer.watching(model, batch):
            compute_outputs(recipe, model, batch)
    values = compute_values(recipe, model, batch, observer.find(batch))
    seen = observer.find(batch, values if recipe.predict is not None else None)
    if seen.task is None:
        raise OutputError(seen.reason or "nothing says what is predicted: declare Recipe(task=...)")
    return values, seen.task


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


def explain_shape_mismatch(task: Task, values: Tensor, target: Tensor | None) -> str | None:
    """Why values [b, ...] and the target are not those of the task; None where they are.

    Args:
        target: as it is stored (`as_stored_target`).
    """
    why = explain_layout(task, values, target)
    return explain_labels(task, target) if why is None and target is not None else why


def explain_layout(task: Task, values: Tensor, target: Tensor | None) -> str | None:
    """Why values do not have the layout of the task and the target; None where they do."""
    positions = {"classification": 1, "gaussian": 1, "quantiles": 1}.get(task.kind, 0)
    if task.kind != "free" and values.dim() < 1 + max(positions, task.kind == "multilabel"):
        return f"values of shape {list(values.shape)} are not those of {task.kind}"
    if task.kind == "free" or target is None:
        return None
    shape = values.shape[: values.dim() - positions]
    if shape != target.shape:
        return (
            f"{task.kind}: values of shape {list(values.shape)} and the target {list(target.shape)} do not have "
            "the same positions"
        )
    return None


def explain_labels(task: Task, target: Tensor) -> str | None:
    """Why a target, of `explain_shape_mismatch`, names no classes or labels; None where it does, or need not."""
    if (wrong := find_wrong_stored_label(task, target)) is not None:
        return f"{task.kind}: sample {wrong[0]} of a batch {wrong[1]}"
    if task.kind in LABELS and target.is_floating_point():
        return f"{task.kind}: the target has fractions, where it should name classes or labels"
    return None


def find_wrong_stored_label(task: Task, target: Tensor) -> tuple[int, str] | None:
    """See `find_wrong_label`, for a target as it is stored."""
    if task.kind != "multilabel":
        return None
    return find_wrong_label(torch.where(find_known(target, of_labels=True), target, 0))
