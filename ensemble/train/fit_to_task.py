"""Explains whether what a member predicts for a few samples is what its task needs, before it is trained."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ensemble.spec.losses import NamedLoss
from ensemble.spec.positions import TAILS, choose_kept, count_bytes
from ensemble.spec.task import LABELS, NUMBERS, Task, find_known
from ensemble.store.member import UNCOMBINED
from ensemble.store.predicted_rows import PAD
from ensemble.train.accumulation import split_batch
from ensemble.train.call import find_target
from ensemble.train.data import as_stored_target
from ensemble.train.evaluator import evaluation_mode
from ensemble.train.outputs import (
    OutputError,
    compute_outputs,
    describe,
    explain_shape_mismatch,
    find_end,
    is_probability,
)
from ensemble.train.predictions import predict_batch
from ensemble.train.seeding import seeded
from ensemble.train.state import TrainState
from pipelines import Batch

SAMPLES = 32
#: Samples of which the run sees the predictions, and most values of each.
SHOWN, MOST_SHOWN = 4, 2**14
#: By how much the loss of a sample may change with its neighbours, in parts of the largest: kernels round.
ROUNDING = 0.02
#: How a batch shows in what a model ends, and the loss that applies it.
ENDS = {
    "softmax": ("its rows sum to 1", "a cross-entropy"),
    "sigmoid": ("all are between 0 and 1", "binary_cross_entropy_with_logits"),
}


def explain_predictions(state: TrainState) -> Iterator[str]:
    """Predict a few samples of the first split; yield what does not fit the task.

    The first rank of a member that is thrown away calls it, once: the model may change by its calls.
    """
    recipe, model = state.recipe, state.optimization.model
    if not state.can_predict or not state.splits:
        return
    split = state.splits[0]
    batch = state.data.read_first(split, SAMPLES, state.collate)
    has_loss = recipe.loss is not None and not isinstance(recipe.loss, NamedLoss) and state.comm.world == 1
    seeds = seeded(state.identity.seed, state.device)
    with seeds, torch.no_grad(), evaluation_mode(model), state.precision.autocast():
        try:
            yield from _explain_values(state, model, copy.deepcopy(batch))
        except OutputError as error:
            yield f"{UNCOMBINED}: {error}"
        except Exception as error:
            what = f"samples of Ensemble.{split} raised {type(error).__name__}: {error}"
            yield f"{UNCOMBINED} unless it passes: predicting {what}"
            return
        if state.collate is not None:
            yield from _explain_lengths(state, model, split)
        if has_loss:
            yield from _compare_with_few(state, model, batch)


def predict_few(state: TrainState) -> dict[str, Any] | None:
    """Return the task, and what is predicted for a few samples; None where nothing is, or much for a sample."""
    if not state.can_predict or not state.splits:
        return None
    model, batch = state.optimization.model, state.data.read_first(state.splits[0], SHOWN, state.collate)
    with seeded(state.identity.seed, state.device), torch.no_grad(), evaluation_mode(model):
        values = predict_batch(state, model, batch).float()
    is_small = values[:1].numel() <= MOST_SHOWN
    return {"task": state.recipe.find_task().as_record(), "values": values.tolist()} if is_small else None


def _explain_values(state: TrainState, model: nn.Module, batch: Batch) -> Iterator[str]:
    recipe, task = state.recipe, state.recipe.find_task()
    target = find_target(batch, recipe.target)
    if recipe.predict is not None:
        values: Any = recipe.predict(model, batch)
        if why := explain_values(task, values, target):
            yield f"{UNCOMBINED}: Recipe.predict {why}"
        if not isinstance(values, Tensor):
            return
    else:
        values = predict_batch(state, model, batch)
        seen = state.seen
        if seen is not None and not seen.is_probability and task.kind in LABELS:
            outputs = compute_outputs(recipe, model, batch, seen)
            if (end := find_end(task, seen.class_axis, getattr(outputs, "logits", outputs))) is not None:
                shown, loss = ENDS[end]
                yield (
                    f"the model ends in a {end} ({shown}), and a second one is applied to its outputs, so that "
                    f"predictions are nearly uniform: leave it out, as {loss} takes scores; or declare "
                    "Recipe.predict, which returns the model's outputs"
                )
    if why := explain_shape_mismatch(task, values, as_stored_target(task, target)):
        yield f"{UNCOMBINED}: {why}"
    state.predictions_bytes = count_bytes(state.ensemble, task, values.shape[1:])
    kept, why = choose_kept(state.ensemble, task, values.shape[1:])
    if why:
        yield why if kept is not None else f"{UNCOMBINED}: {why}"
    most = values.shape[-1] - 1 if task.kind == "classification" else 1
    if task.kind in LABELS and state.collate is None and (why := state.data.explain_labels(most)):
        yield f"{UNCOMBINED}: {why}" if task.kind == "classification" else why


def _explain_lengths(state: TrainState, model: nn.Module, split: str) -> Iterator[str]:
    """What batches padded to unlike lengths keep, and what padding counts."""
    task, shapes = state.recipe.find_task(), set()
    for samples in (SHOWN, 2, 4 * SHOWN):  # the longest are hardly the same
        few = state.data.read_first(split, samples, state.collate)
        shapes.add(predict_batch(state, model, few).shape[1:])
        target = find_target(few, state.recipe.target)
        is_paddable = task.kind in TAILS and target is not None
        if is_paddable and not (task.kind in NUMBERS and target.dim() > 1 and find_known(target).all()):
            return
    if len(shapes) > 1:
        what = f"samples of Ensemble.{split} have predictions of {len(shapes)} shapes"
        zeros = "no target is NaN, so that padding counts as a target: pad targets by NaN"
        yield f"{what}, and {zeros}" if is_paddable else f"{UNCOMBINED}: {what}; {PAD}"


def explain_values(task: Task, values: Any, target: Tensor | None) -> str | None:
    """Why what `Recipe.predict` returned is not what the task needs, and the line to write; None where it is."""
    if not isinstance(values, Tensor):
        return f"returned {describe(values)}, not a tensor [b, ...]"
    kind = task.kind
    if not values.is_floating_point() and kind in LABELS:
        return f"returned {describe(values)}, like argmax: return the probabilities, scores.softmax(-1)"
    if kind == "classification" and values.dim() > 1 and values.shape[-1] > 1:
        rows = values.float()
        if is_probability(rows):
            return None
        if target is not None and values.dim() > 2 and values.shape[:1] + values.shape[2:] == target.shape:
            end = "movedim(1, -1)" if is_probability(rows.movedim(1, -1)) else "softmax(1).movedim(1, -1)"
            return f"returned values with the classes on axis 1, and the task has them on the last: append .{end}"
        what, end = ("log-probabilities", "exp()") if is_probability(rows.exp()) else ("scores", "softmax(-1)")
        return f"returned {what}, and the task needs probabilities: append .{end}"
    if kind == "multilabel" and bool(((values < 0) | (values > 1)).any()):
        return "returned scores, and the task needs probabilities: append .sigmoid()"
    return None


def _compare_with_few(state: TrainState, model: nn.Module, batch: Batch) -> Iterator[str]:
    """A loss of a sample that changes with its neighbours, as where [b] is subtracted from [b, 1]."""
    loss, accumulate = state.recipe.loss, state.identity.accumulate
    few = split_batch(batch, max(2, len(batch["index"]) // 2))[0]

    def compute(samples: Batch) -> Tensor:  # a loss may write into them
        losses: Tensor = loss(model, copy.deepcopy(samples)).float()
        return losses

    whole, part = compute(batch), compute(few)
    is_of_samples = whole.shape[:1] == batch["index"].shape and part.shape[1:] == whole.shape[1:]
    changes = is_of_samples and bool((whole[: len(part)] - part).abs().max() > ROUNDING * whole.abs().max())
    if changes and torch.equal(whole, compute(batch)):  # draws nothing
        target = find_target(batch, state.recipe.target)
        shape = "" if target is None else f" (the target is {list(target.shape)})"
        parts = f"; accumulate={accumulate} computes it over each part of a batch alone, which is another gradient"
        yield (
            "the loss of a sample changes with the other samples of its batch: where outputs are [b, 1] and the "
            f"target is [b], their difference is [b, b]{shape}; give both the same shape, as by "
            "outputs.squeeze(-1). A contrastive loss is meant to do so" + (parts if accumulate > 1 else "")
        )
