"""Looks at a member's first training batch: what cannot be combined, or is not what was meant, is remarked then.

The batch is evaluated once more (`ensemble.train.undisturbed`), by a member of one worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ensemble.spec import Recipe
from ensemble.spec.task import NUMBERS, Task, find_known
from ensemble.store.member import UNCOMBINED
from ensemble.train.accumulation import split_batch
from ensemble.train.call import Observation, find_target
from ensemble.train.infer_task import OutputError, describe, find_class_axis, fit_points
from ensemble.train.outputs import compute_outputs
from ensemble.train.state import TrainState
from ensemble.train.undisturbed import undisturbed

if TYPE_CHECKING:
    from pipelines import Batch

#: By how much the loss of a sample may change with its neighbours, in parts of the largest: kernels round.
ROUNDING = 0.02
#: Values between 0 and 1 of which scores are not so by chance.
ENOUGH = 16
#: Standard deviation above which a network learns numbers badly, and below which its inputs hardly differ.
WIDE, NARROW = 100.0, 0.02
#: By which factor inputs may spread more in one split than in another, and how many values show it.
UNLIKE, MANY = 3.0, 256


def look(state: TrainState, batch: Batch) -> None:
    """Remark what the first batch of a member shows; of several workers a model or a loss may need all at once."""
    if state.effects.is_measured or state.comm.world != 1 or len(batch["index"]) == 0:
        return
    with undisturbed(state) as model, state.precision.autocast():
        for text in _list_remarks(state, model, batch):
            state.remark(text)


def _list_remarks(state: TrainState, model: nn.Module, batch: Batch) -> Iterator[str]:
    recipe, seen = state.recipe, state.observer.find(batch)
    target = find_target(batch, recipe.target)
    if recipe.loss is not None and not state.is_own_loop:
        yield from _compare_with_halves(recipe, model, batch, target)
    task = seen.task
    try:
        if recipe.predict is not None:
            values = recipe.predict(model, batch)
            if isinstance(values, Tensor) and values.is_floating_point():
                task = state.observer.find(batch, values).task or Task("classification")
            if why := explain_values(task, values, target):
                yield f"{UNCOMBINED}: Recipe.predict {why}"
        elif task is None:
            yield from _explain_outputs(recipe, model, batch, seen, target)
        elif seen.call is not None or not state.is_own_loop:
            yield from _explain_scores(task, compute_outputs(recipe, model, batch, seen), seen)
    except OutputError as error:
        yield f"{UNCOMBINED}: {error}"
    except Exception as error:  # it is raised again where it matters, with a message of its own
        yield f"{UNCOMBINED} unless it passes: predicting the first batch raised {type(error).__name__}: {error}"
    if task is not None and task.kind in NUMBERS and not state.is_own_loop and target is not None:
        yield from _explain_spread(recipe, target)
    if seen.call is not None:
        yield from _explain_inputs(state, batch, seen.call.fields)


def explain_values(task: Task | None, values: Any, target: Tensor | None) -> str | None:
    """Why what `Recipe.predict` returned is not what the task needs, and the line to write; None where it is."""
    if not isinstance(values, Tensor):
        return f"returned {describe(values)}, not a tensor [b, ...]"
    kind = None if task is None else task.kind
    if not values.is_floating_point() and kind in (None, "classification", "multilabel"):
        return f"returned {describe(values)}, as argmax does: return the probabilities, scores.softmax(-1)"
    if kind == "classification" and values.dim() > 1 and values.shape[-1] > 1:
        rows = values.float()
        if is_probability(rows):
            return None
        remedy = ".exp()" if is_probability(rows.exp()) else ".softmax(-1)"
        what = "log-probabilities" if remedy == ".exp()" else "scores"
        return f"returned {what}, and the task needs probabilities: end it by {remedy}"
    if kind == "multilabel" and bool(((values < 0) | (values > 1)).any()):
        return "returned scores, and the task needs probabilities: end it by .sigmoid()"
    return None


def is_probability(rows: Tensor) -> bool:
    """Whether rows [..., C] sum to 1 and lie in [0, 1], within the rounding of half precisions."""
    inside = (rows >= -1e-6) & (rows <= 1 + 1e-2)
    return bool(inside.all()) and bool(((rows.sum(dim=-1) - 1).abs() < 1e-2).all())


def _explain_outputs(
    recipe: Recipe, model: nn.Module, batch: Batch, seen: Observation, target: Tensor | None
) -> Iterator[str]:
    """Why outputs say no task, with the line that would say it where one of their parts may be the scores."""
    if seen.is_open or seen.reason is None:
        return
    line = ""
    if seen.call is not None and target is not None:
        path = _find_scores(seen.call.call(model, batch), target)
        names = ["batch" if name is None else f'batch["{name}"]' for name in seen.call.args]
        names += [f"{key}={'batch' if n is None else f'batch[{n!r}]'}" for key, n in seen.call.kwargs.items()]
        end = "" if target.is_floating_point() else ".softmax(-1)"
        if path is not None:
            task = "regression" if target.is_floating_point() else "classification"
            call = f"model({', '.join(names)})"
            line = f'; write Recipe(predict=lambda model, batch: {call}{path}{end}, task="{task}")'
    why = "the model returned several parts" if line else seen.reason
    yield f"{UNCOMBINED}: {why}{line}"


def _find_scores(outputs: Any, target: Tensor) -> str | None:
    """The part of a tuple or a dict that may be what predicts the target, as it is written behind the outputs; of
    several the narrowest, as features are wider than scores.
    """
    parts: list[tuple[Any, Any]]
    found: dict[str, int] = {}
    if isinstance(outputs, Mapping):
        parts = list(outputs.items())
    else:
        parts = list(enumerate(outputs)) if isinstance(outputs, tuple | list) else []
    for name, part in parts:
        if not isinstance(part, Tensor) or not part.is_floating_point():
            continue
        try:
            if target.is_floating_point():
                fits = fit_points(tuple(part.shape), tuple(target.shape)) is not None
            else:
                fits = find_class_axis(tuple(part.shape), tuple(target.shape)) == -1
                fits = fits and part.shape[-1] > int(target.max())
        except OutputError:
            continue
        if fits:
            found[f'["{name}"]' if isinstance(name, str) else f"[{name}]"] = part[:1].numel()
    return min(found, key=found.__getitem__, default=None)


def _explain_scores(task: Task, outputs: Any, seen: Observation) -> Iterator[str]:
    """A softmax or a sigmoid at the end of a model, where scores are meant."""
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        return
    scores = outputs.float()
    if task.kind == "classification" and seen.class_axis in (1, -1) and scores.shape[seen.class_axis] > 1:
        if is_probability(scores.movedim(seen.class_axis, -1)):
            yield (
                "the model ends in a softmax (its rows sum to 1), and one is applied to its outputs again, which "
                "makes predictions nearly uniform: leave it out, as a cross-entropy takes scores; or declare "
                "Recipe.predict, which returns the model's outputs"
            )
        return
    is_scored = task.kind in ("classification", "multilabel") and scores.numel() >= ENOUGH
    if is_scored and bool(((scores > 0) & (scores < 1)).all()):
        yield (
            "the model's outputs are all between 0 and 1, as those of a sigmoid, and one is applied to them "
            "again: leave it out, as binary_cross_entropy_with_logits takes scores; or declare Recipe.predict"
        )


def _compare_with_halves(recipe: Recipe, model: nn.Module, batch: Batch, target: Tensor | None) -> Iterator[str]:
    """A loss of a sample that changes with its neighbours, as where [b] is subtracted from [b, 1]."""
    try:
        whole, *halves = (recipe.loss(model, part) for part in (batch, *split_batch(batch, 2)))
        apart = torch.cat([each.float() for each in halves])
    except Exception:  # a loss that needs the whole batch
        return
    if len(halves) < 2 or whole.shape != apart.shape:
        return
    if bool((whole.float() - apart).abs().max() > ROUNDING * whole.abs().max()):
        shape = "" if target is None else f" (the target is {list(target.shape)})"
        yield (
            "the loss of a sample changes with the other samples of its batch: where outputs are [b, 1] and the "
            f"target is [b], their difference is [b, b]{shape}; give both the same shape, as by "
            "outputs.squeeze(-1). A contrastive loss is meant to do so"
        )


def _explain_inputs(state: TrainState, batch: Batch, fields: list[str]) -> Iterator[str]:
    """Inputs to which one split has other stages than the other, and images that were scaled twice."""
    splits = {"train": batch}
    if "valid" in state.effects.splits:
        splits["valid"] = state.data.read_first("valid", len(batch["index"]), state.collate)
    for name in fields:
        values = {split: value for split, each in splits.items() if isinstance(value := each.get(name), Tensor)}
        if any(value.numel() < MANY or value.is_complex() for value in values.values()):
            continue
        spreads = [float(value.double().std()) for value in values.values()]
        kinds = {value.dtype for value in values.values()}
        rows = zip(values.items(), spreads, strict=True)
        shown = " and ".join(f"{value.dtype} ± {spread:.2g} in {split}" for (split, value), spread in rows)
        is_float = all(kind.is_floating_point for kind in kinds)
        if len(kinds) > 1 or (is_float and max(spreads) > UNLIKE * min(spreads) > 0):
            yield f"the field {name!r} is {shown}: both need the same stages"
        elif is_float and values["train"].dim() > 3 and 0 < min(spreads) < NARROW:
            yield (
                f"images of the field {name!r} hardly differ ({shown}): they may be scaled twice, or by means "
                "of 0 to 255, where stages.scale takes those of 0 to 1"
            )


def _explain_spread(recipe: Recipe, target: Tensor) -> Iterator[str]:
    known = target[find_known(target)].double()
    if recipe.target_scale is None and len(known) > 1 and (spread := float(known.std())) > WIDE:
        yield (
            f"the target {recipe.target!r} has a standard deviation of {spread:.3g} in the first batch, and "
            f"networks learn numbers of about 1: declare "
            f"Recipe(target_scale=({float(known.mean()):.3g}, {spread:.3g}))"
        )
