"""Looks at a member's first training batch: what cannot be combined, or is not what was meant, is remarked then.

The batch is evaluated once more (`ensemble.train.undisturbed`), by rank 0 alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ensemble.spec import Recipe
from ensemble.spec.losses import NamedLoss
from ensemble.spec.positions import TAILS, choose_kept, count_bytes
from ensemble.spec.recipe import list_split_metrics
from ensemble.spec.split_metrics import list_asked
from ensemble.spec.task import LABELS, NUMBERS, Task, find_known
from ensemble.store.member import UNCOMBINED
from ensemble.store.predicted_rows import PAD
from ensemble.train.accumulation import split_batch
from ensemble.train.call import Observation, find_target, take_fields
from ensemble.train.data import as_stored_target
from ensemble.train.job import FieldError
from ensemble.train.output_shapes import (
    PREDICT,
    OutputError,
    describe,
    describe_unmeasured,
    explain_labels,
    explain_layout,
    take_logits,
)
from ensemble.train.outputs import (
    FirstCall,
    compute_outputs,
    compute_values,
    observe,
    to_scaled_values,
    watch_call,
)
from ensemble.train.state import TrainState
from ensemble.train.undisturbed import undisturbed

if TYPE_CHECKING:
    from pipelines import Batch

#: By how much the loss of a sample may change with its neighbours, in parts of the largest: kernels round.
ROUNDING = 0.02
#: Outputs of which a sigmoid is recognised: scores are not so by chance.
LEAST_VALUES, LEAST_MEAN = 16, 0.2
#: How a batch shows in what a model ends, and the loss that applies it.
ENDS = {
    "softmax": ("its rows sum to 1", "a cross-entropy"),
    "sigmoid": ("all are between 0 and 1", "binary_cross_entropy_with_logits"),
}
#: Samples of which the run sees the predictions, and most values of each.
SHOWN, MOST_SHOWN = 4, 2**14
#: Standard deviation above which a network learns numbers badly, and below which its inputs hardly differ.
WIDE, NARROW = 100.0, 0.02
#: By which factor inputs may spread more in one split than in another, and how many values show it, at most.
UNLIKE, MANY, MOST = 8.0, 256, 2**18


def look(state: TrainState, batch: Batch) -> None:
    """Remark what the first batch with samples shows, after its step."""
    if state.comm.rank or state.is_looked_at or not len(batch["index"]):
        return
    state.is_looked_at = True
    try:
        _look(state, batch)
    except (FieldError, OutputError):
        raise
    except Exception as error:  # whatever else it may be, the member trains
        state.reporter.log(f"the first batch could not be looked at: {type(error).__name__}: {error}")


def _look(state: TrainState, batch: Batch) -> None:
    from pipelines.errors import PipelineError

    few: dict[str, Batch] = {}
    for split in state.splits:
        with contextlib.suppress(PipelineError, StopIteration):  # bad records are named elsewhere
            few[split] = state.data.peek(split, SHOWN, state.collate)
    fields = [] if state.is_own_loop else list_asked(state.recipe.split_metrics)
    if "valid" in few:
        take_fields(few["valid"], fields)
    predicted: list[tuple[Task, Tensor]] = []
    with undisturbed(state) as model, state.precision.autocast():
        for text in _list_remarks(state, model, batch, few, predicted):
            state.remark(text)
    for text in _explain_inputs(batch, few.get("valid"), state.observer.find()):
        state.remark(text)
    target = find_target(few.get("valid", batch), state.recipe.target)
    assumed = _explain_assumed(state, target)
    if target is not None and assumed is not None and bool((target[find_known(target)] % 1 != 0).any()):
        state.remark(f"{UNCOMBINED}: {assumed}")
    for task, values in predicted:
        most = values.shape[-1] - 1 if task.kind == "classification" else 1
        is_read = task.kind in LABELS and state.collate is None
        if is_read and (why := state.data.explain_labels(most)):
            state.remark(f"{UNCOMBINED}: {assumed or why}" if task.kind == "classification" else why)
        if values[:1].numel() <= MOST_SHOWN:
            rows = values[torch.arange(SHOWN) % len(values)].tolist()
            state.reporter.event("first_outputs", task=task.as_record(), values=rows)


def try_offered(state: TrainState, batch: Batch) -> None:
    """Let the call by which a framework predicts count before the first step."""
    recipe, observer, call = state.recipe, state.observer, state.observer.offered
    if call is None or recipe.predict is not None or observer.seen is not None:
        return
    with undisturbed(state) as model, state.precision.autocast():
        try:
            outputs = take_logits(call.call(model, batch))
            with contextlib.suppress(Exception):  # it needs the target
                without = replace(call, unused=recipe.target)
                call = without if torch.equal(take_logits(without.call(model, batch)), outputs) else call
            seen, task = observe(recipe, batch, FirstCall(True, call, outputs)), recipe.find_task()
            end = _find_end(task, seen, outputs) if call.method else None
            if end == "sigmoid":
                raise OutputError(f"numbers between 0 and 1 may be probabilities or scores; {PREDICT}")
            to_scaled_values(recipe, task, outputs, seen)
            observer.seen = replace(seen, is_probability=end == "softmax")
        except NotImplementedError as error:
            observer.is_relied_on = False
            state.remark(f"{UNCOMBINED}: {error}; {PREDICT}")
        except Exception as error:
            if call.method:
                state.remark(f"{call.method} does not predict for the member: {error}")


def _list_remarks(
    state: TrainState,
    model: nn.Module,
    batch: Batch,
    few: Mapping[str, Batch],
    predicted: list[tuple[Task, Tensor]],
) -> Iterator[str]:
    """Yield the remarks; what is predicted, and its task, is put into a list."""
    recipe, target, first = state.recipe, find_target(batch, state.recipe.target), FirstCall()
    # Of several workers a loss may need all at once.
    has_loss = recipe.loss is not None and not state.is_own_loop and state.comm.world == 1
    if has_loss and not isinstance(recipe.loss, NamedLoss):
        with contextlib.suppress(Exception), watch_call(model, batch) as first:
            yield from _compare_with_half(recipe, model, batch, target, state.identity.accumulate)
    seen, task, values, named = state.observer.find(), recipe.find_task(), None, "the first batch"
    try:
        if recipe.predict is not None:
            values = recipe.predict(model, batch)
            if why := explain_values(task, values, target):
                yield f"{UNCOMBINED}: Recipe.predict {why}"
        elif seen.reason is not None:
            raise OutputError(seen.reason)
        elif seen.call is not None or has_loss or state.observer.is_relied_on:
            outputs = first.output() if first.is_seen else compute_outputs(recipe, model, batch, seen)
            yield from _explain_scores(task, seen, outputs)
            values = to_scaled_values(recipe, task, outputs, seen)
        if isinstance(values, Tensor) and values.dim():
            predicted.append((task, values.float()))
            state.predictions_bytes = count_bytes(state.ensemble, task, values.shape[1:])
            kept, why = choose_kept(state.ensemble, task, values.shape[1:])
            if why:
                yield why if kept is not None else f"{UNCOMBINED}: {why}"
        for split, samples in few.items() if predicted else ():
            named = f"samples of Ensemble.{split}"  # predicted at the end, when a difference would fail the member
            yield from _explain_lengths(state, model, split, samples, seen)
    except OutputError as error:
        if not state.is_own_loop and task.kind != "free" and few:
            raise  # as the evaluation after this epoch would
        yield f"{UNCOMBINED}: {error}"
    except Exception as error:  # it is raised again where it matters, with a message of its own
        yield f"{UNCOMBINED} unless it passes: predicting {named} raised {type(error).__name__}: {error}"
    if task.kind in NUMBERS and not state.is_own_loop and target is not None:
        yield from _explain_spread(recipe, target)


def _explain_lengths(
    state: TrainState, model: nn.Module, split: str, first: Batch, seen: Observation
) -> Iterator[str]:
    """Predict samples of a split; yield what batches of unlike length keep, and what padding counts."""
    task, objective = state.recipe.find_task(), str(state.ensemble.objective)
    kind, shapes, counts = task.kind, set(), True
    is_measured = split == "valid" and not state.is_own_loop
    wanted = list_split_metrics(state.recipe, objective, task) if is_measured else []
    for samples in (SHOWN, 2, 4 * SHOWN):  # the longest are hardly the same
        few = first if samples == SHOWN else state.data.peek(split, samples, state.collate)
        values, target = compute_values(state.recipe, model, few, seen), find_target(few, state.recipe.target)
        stored = as_stored_target(task, target)
        why = explain_layout(task, values, stored) or (None if stored is None else explain_labels(task, stored))
        if wanted and why is not None:
            raise OutputError(describe_unmeasured(state.recipe, wanted, why))
        is_paddable = kind in TAILS and target is not None
        counts &= target is None or (kind in NUMBERS and target.dim() > 1 and bool(find_known(target).all()))
        if is_paddable and (not counts or state.collate is None):
            return
        shapes.add(tuple(values.shape[1:]))
    if len(shapes) > 1:
        what = f"samples of Ensemble.{split} have predictions of the shapes {', '.join(map(str, sorted(shapes)))}"
        lost = UNCOMBINED if split == "valid" else f"no predictions on {split!r} are saved"
        zeros = "no target is NaN, so that padding counts as a target: pad targets by NaN"
        yield f"{what}, and {zeros}" if is_paddable else f"{lost}: {what}; {PAD}"


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


def is_probability(rows: Tensor) -> bool:
    """Whether rows [..., C] sum to 1 and lie in [0, 1], within the rounding of half precisions."""
    inside = (rows >= -1e-6) & (rows <= 1 + 1e-2)
    return bool(inside.all()) and bool(((rows.sum(dim=-1) - 1).abs() < 1e-2).all())


def _find_end(task: Task, seen: Observation, outputs: Any) -> str | None:
    """Whether a model that predicts classes or labels ends in a "softmax" or a "sigmoid"; None: in neither."""
    if task.kind not in LABELS or not isinstance(outputs, Tensor):
        return None
    scores = outputs.float()
    if task.kind == "classification" and seen.class_axis and scores.shape[seen.class_axis] > 1:
        return "softmax" if is_probability(scores.movedim(seen.class_axis, -1)) else None
    is_inside = bool(((scores > 0) & (scores < 1)).all()) and float(scores.mean()) > LEAST_MEAN
    return "sigmoid" if is_inside and scores.numel() >= LEAST_VALUES else None


def _explain_scores(task: Task, seen: Observation, outputs: Any) -> Iterator[str]:
    """A softmax or a sigmoid at the end of a model, where scores are meant."""
    if not seen.is_probability and (end := _find_end(task, seen, outputs)) is not None:
        shown, loss = ENDS[end]
        yield (
            f"the model ends in a {end} ({shown}), and a second one is applied to its outputs, so that "
            f"predictions are nearly uniform: leave it out, as {loss} takes scores; or declare Recipe.predict, "
            "which returns the model's outputs"
        )


def _compare_with_half(
    recipe: Recipe, model: nn.Module, batch: Batch, target: Tensor | None, accumulate: int
) -> Iterator[str]:
    """A loss of a sample that changes with its neighbours, as where [b] is subtracted from [b, 1]."""
    whole, half = recipe.loss(model, batch).float(), recipe.loss(model, split_batch(batch, 2)[0]).float()
    changes = (whole[: len(half)] - half).abs().max() > ROUNDING * whole.abs().max()
    is_of_samples = whole.shape[:1] == batch["index"].shape and half.shape[1:] == whole.shape[1:]
    if is_of_samples and bool(changes) and torch.equal(whole, recipe.loss(model, batch).float()):  # draws nothing
        shape = "" if target is None else f" (the target is {list(target.shape)})"
        parts = f"; accumulate={accumulate} computes it over each part of a batch alone, which is another gradient"
        yield (
            "the loss of a sample changes with the other samples of its batch: where outputs are [b, 1] and the "
            f"target is [b], their difference is [b, b]{shape}; give both the same shape, as by "
            "outputs.squeeze(-1). A contrastive loss is meant to do so" + (parts if accumulate > 1 else "")
        )


def _explain_inputs(batch: Batch, valid: Batch | None, seen: Observation) -> Iterator[str]:
    """Inputs to which one split has other stages than the other, and images that were scaled twice."""
    splits = {"train": batch} if valid is None else {"train": batch, "valid": valid}
    for name in [] if seen.call is None else seen.call.fields:
        values: dict[str, Any] = {split: samples.get(name) for split, samples in splits.items()}
        if not all(map(_is_plain, values.values())):
            continue
        spreads = [float(value.flatten()[:MOST].double().std()) for value in values.values()]
        kinds = {value.dtype for value in values.values()}
        rows = zip(values.items(), spreads, strict=True)
        shown = " and ".join(f"{value.dtype} ± {spread:.2g} in {split}" for (split, value), spread in rows)
        is_float = all(kind.is_floating_point for kind in kinds)
        if len(kinds) > 1 or (is_float and max(spreads) > UNLIKE * min(spreads) > 0):
            yield f"the field {name!r} is {shown}: give both splits the same stages"
        elif is_float and values["train"].dim() > 3 and 0 < min(spreads) < NARROW:
            yield (
                f"images of the field {name!r} hardly differ ({shown}): they may be scaled twice, or by means "
                "from 0 to 255, though stages.scale takes means from 0 to 1"
            )


def _explain_assumed(state: TrainState, target: Tensor | None) -> str | None:
    """What to declare where a train function's targets are floats, and are taken for classes; None elsewhere."""
    is_assumed = state.is_own_loop and state.recipe.known_task is None
    if not is_assumed or target is None or not target.is_floating_point():
        return None
    return (
        f"the target {state.recipe.target!r} has floats, and classes are assumed where no task is declared: "
        "declare Recipe(train=..., task=...), such as task='regression'"
    )


def _is_plain(value: Any) -> bool:
    """Whether it is a dense tensor of numbers, enough to judge how they spread."""
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    return is_dense and not value.is_complex() and value.numel() >= MANY


def _explain_spread(recipe: Recipe, target: Tensor) -> Iterator[str]:
    values = target[find_known(target)].double()
    if recipe.target_scale is None and len(values) > 1 and (spread := float(values.std())) > WIDE:
        mean = float(values.mean())
        yield (
            f"the target {recipe.target!r} has a standard deviation of {spread:.3g} in the first batch, and "
            f"networks learn numbers of about 1: declare Recipe(target_scale=({mean:.3g}, {spread:.3g}))"
        )
