"""Computes what a Recipe's model returns for a batch, and the predictions that follow from it.

A loss by name, or a framework's adapter, says how the model is called. A loss function is called as it is, on a
target of zeros where the batch has none: the outputs are what the model *returned inside it*, kept by a hook. Mode
and gradients are the caller's. Sizes are read off shapes: `len(tensor)` would fix that of an exported program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ensemble.spec.losses import CLASS_AXES, NamedLoss, find_wrong_label
from ensemble.spec.task import IGNORED, LABELS, NUMBERS, Task, find_known
from ensemble.train.call import Call, Observation, find_target

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ensemble.spec import Recipe

PREDICT = "declare Recipe.predict(model, batch) -> predictions"
UNDECLARED = f"nothing says how the train function's model predicts: {PREDICT}"
#: Outputs of which a sigmoid is recognised: scores are not so by chance.
LEAST_VALUES, LEAST_MEAN = 16, 0.2


class OutputError(Exception):
    """The outputs of a Recipe's model are not those of its task; the message says what to declare."""


@contextmanager
def first_output(model: torch.nn.Module) -> Iterator[list[Any]]:
    """Yield a list that gets what the model returns when it is called first inside the block."""
    returned: list[Any] = []

    def keep(module: torch.nn.Module, args: Any, output: Any) -> None:
        if not returned:
            returned.append(output)

    handle = model.register_forward_hook(keep)
    try:
        yield returned
    finally:
        handle.remove()


def take_first(returned: list[Any]) -> Any:
    """Return the output in a list of `first_output`; raise OutputError where there is none."""
    if not returned:
        raise OutputError(
            f"model(...) itself was never called (a method or a part of it does not count); {PREDICT}"
        )
    return returned[0]


def compute_outputs(
    recipe: Recipe, model: torch.nn.Module, batch: Mapping[str, Tensor], seen: Observation | None = None
) -> Any:
    """Return what `model` returns for `batch`, by a known call or inside `recipe.loss`.

    Works for a batch without `recipe.target`: zeros of the target's shape and dtype take its place (int64 [b]
    where they are not known).

    Raises:
        OutputError: the batch lacks a field of the call, or nothing says how the model is called.
    """
    call = None if seen is None else seen.call
    if call is None and recipe.loss is None:
        raise OutputError(UNDECLARED)
    given = batch if call is not None and call.method is None else _with_target(recipe.target, batch, seen)
    if call is not None:
        for name in call.list_needed(recipe.target):
            if name not in batch:
                has = ", ".join(batch)
                raise OutputError(f"the model is called with the field {name!r}, and the batch has {has}")
        try:
            return call.call(model, given)
        except (NotImplementedError, TypeError) as error:  # it has no forward pass, or one of other arguments
            raise OutputError(f"{error}; {PREDICT}") from None
    with first_output(model) as returned:
        try:
            recipe.loss(model, given)
        except Exception:  # after the call it was the target, on which the outputs do not depend
            if not returned:
                raise
    return take_first(returned)


def compute_values(
    recipe: Recipe, model: torch.nn.Module, batch: Mapping[str, Tensor], seen: Observation | None = None
) -> Tensor:
    """Return predictions, float32 [b, ...]: those of `recipe.predict`, or what follows from the outputs.

    Args:
        seen: the call, the target's shape and the axis of the classes; None: they are not known.
    """
    if recipe.predict is not None:
        predicted: Tensor = recipe.predict(model, batch)
        return predicted.float()
    task = recipe.find_task() if seen is None or seen.task is None else seen.task
    return to_scaled_values(recipe, task, compute_outputs(recipe, model, batch, seen), seen)


def observe(
    recipe: Recipe, model: torch.nn.Module, batch: Mapping[str, Tensor], outputs: Any, call: Call | None = None
) -> Observation:
    """Return what a batch and the outputs for it show of a member; raise OutputError where they do not fit.

    Args:
        call: of a framework; None: a loss by name says it, or nothing does.
    """
    target = find_target(batch, recipe.target)
    if call is None and isinstance(recipe.loss, NamedLoss):
        call = Call(tuple(recipe.loss.find_inputs([*batch, recipe.target])))
    axis, end = None, None
    if recipe.predict is None and recipe.find_task().kind in LABELS:
        scores = check_scores(outputs)
        if recipe.find_task().kind == "classification":
            shape = None if target is None else tuple(target.shape)
            axis = CLASS_AXES.get(model) or find_class_axis(tuple(scores.shape), shape)
        if call is not None and call.method is not None:
            end = find_end(recipe.find_task(), axis, scores)
        if end == "sigmoid":
            raise OutputError(f"numbers between 0 and 1 may be probabilities or scores; {PREDICT}")
    known = None if target is None else (str(target.dtype).removeprefix("torch."), tuple(target.shape[1:]))
    return Observation(call, recipe.known_task, known, axis, end == "softmax")


def find_class_axis(outputs: tuple[int, ...], target: tuple[int, ...] | None) -> int:
    """Return the axis of the outputs of this shape that holds the classes: 1, -1, or 0 where there is none.

    torch's losses want the classes of a step or a pixel along axis 1, [b, C, ...]; others put them last,
    [b, ..., C]. Outputs without them are the logit of the second of two classes.

    Args:
        target: the shape [b, ...] of the target; None where there is none: then there are no positions.
    """
    target = outputs[:1] if target is None else target
    if outputs == target:
        return 0
    first = len(outputs) == len(target) + 1 and outputs[2:] == target[1:]
    last = outputs[:-1] == target
    if first and last and len(outputs) > 2:
        raise OutputError(
            f"outputs {list(outputs)} may have their classes along axis 1 or along the last one (the target is "
            f"{list(target)}); declare Recipe.predict(model, batch) -> probabilities, classes last"
        )
    if not first and not last:
        if outputs == target[:1] and all(size == 1 for size in target[1:]):
            return 0
        raise OutputError(
            f"outputs {list(outputs)} are not scores of classes for the target {list(target)}: [b, classes, ...] "
            f"or [b, ..., classes]; {PREDICT}"
        )
    return -1 if last else 1


def find_end(task: Task, class_axis: int | None, outputs: Any) -> str | None:
    """Return "softmax" or "sigmoid" where a model of classes or labels ends in one; None: in neither."""
    if task.kind not in LABELS:
        return None
    scores = outputs.float()
    if task.kind == "classification" and class_axis and scores.shape[class_axis] > 1:
        return "softmax" if is_probability(scores.movedim(class_axis, -1)) else None
    is_inside = bool(((scores > 0) & (scores < 1)).all()) and float(scores.mean()) > LEAST_MEAN
    return "sigmoid" if is_inside and scores.numel() >= LEAST_VALUES else None


def is_probability(rows: Tensor) -> bool:
    """Whether rows [..., C] sum to 1 and lie in [0, 1], within the rounding of half precisions."""
    inside = (rows >= -1e-6) & (rows <= 1 + 1e-2)
    return bool(inside.all()) and bool(((rows.sum(dim=-1) - 1).abs() < 1e-2).all())


def check_scores(outputs: Any) -> Tensor:
    """Return the outputs, or the `logits` that they have as an attribute; raise OutputError for no floats."""
    import torch

    scores = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "logits", outputs)
    if not isinstance(scores, torch.Tensor) or not scores.is_floating_point() or scores.dim() == 0:
        raise OutputError(f"the model returned {describe(scores)}, not numbers [b, ...]; {PREDICT}")
    return scores


def describe(value: Any) -> str:
    """A value's type, with shape and dtype where it has them, for messages."""
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    return f"a {kind}" if shape is None else f"a {kind} of shape {list(shape)} and dtype {value.dtype}"


def to_values(task: Task, outputs: Any, seen: Observation | None = None) -> Tensor:
    """The predictions, float32, laid out by the task (`ensemble.spec.task`), that follow from a model's outputs.

    | task           | outputs                                        | values                                 |
    | classification | scores, classes along `seen.class_axis`        | their softmax, classes last            |
    |                | one score: the logit of the second of two      | the sigmoid and what it leaves         |
    | multilabel     | logits [b, L]                                  | their sigmoid                          |
    | gaussian       | (mean, variance), or a dict with these keys    | both, along a new last axis            |
    | others         | [b, ...]                                       | the outputs                            |

    Args:
        seen: shape of the target, and the axis of the classes; None: no positions, classes last.
    """
    import torch

    if task.kind == "gaussian":
        return _stack_gaussian(outputs, seen)
    scores = check_scores(outputs).float()
    if seen is not None and seen.is_probability:
        scores = scores.log()
    if task.kind == "classification":
        return _to_probabilities(scores, seen)
    if task.kind == "multilabel":
        return torch.sigmoid(scores)
    if task.kind == "quantiles" and (scores.dim() < 2 or scores.shape[-1] != len(task.levels)):
        raise OutputError(
            f"the model returned {describe(outputs)}, not {len(task.levels)} quantiles along the last axis; "
            f"{PREDICT}"
        )
    return _shape_points(scores, seen) if task.kind == "regression" else scores


def to_scaled_values(recipe: Recipe, task: Task, outputs: Any, seen: Observation | None = None) -> Tensor:
    """`to_values` in the target's own unit, where the Recipe says by which scale the model has learned it."""
    values = to_values(task, outputs, seen)
    if recipe.target_scale is None:
        return values
    if task.kind not in NUMBERS:
        raise OutputError(f"Recipe.target_scale is for numbers, and the task is {task.kind}")
    return scale_values(task, values, *recipe.target_scale)


def scale_values(task: Task, values: Tensor, shift: float, factor: float) -> Tensor:
    """Predictions of numbers y as those of y * factor + shift."""
    import torch

    if task.kind == "gaussian":
        return torch.stack([values[..., 0] * factor + shift, values[..., 1] * factor**2], dim=-1)
    return values * factor + shift


def _to_probabilities(scores: Tensor, seen: Observation | None) -> Tensor:
    """Probabilities [b, ..., C], C >= 2, of scores."""
    import torch

    axis = -1 if seen is None or seen.class_axis is None else seen.class_axis
    positions = () if seen is None or seen.target is None else seen.target[1]
    if axis == 0 or (scores.dim() == 1 and not positions):
        second = torch.sigmoid(scores)
        if positions and scores.dim() == 1:
            second = second.reshape(scores.shape[0], *[1] * len(positions))
        return torch.stack([1 - second, second], dim=-1)
    scores = scores.movedim(1, -1) if axis == 1 else scores
    if scores.shape[-1] == 1:
        second = torch.sigmoid(scores)
        return torch.cat([1 - second, second], dim=-1)
    return torch.softmax(scores, dim=-1)


def _stack_gaussian(outputs: Any, seen: Observation | None) -> Tensor:
    import torch

    if isinstance(outputs, Mapping) and {"mean", "variance"} <= set(outputs):
        outputs = outputs["mean"], outputs["variance"]
    if not isinstance(outputs, tuple | list) or len(outputs) != 2:
        raise OutputError(
            f"the model returned {describe(outputs)}, not (mean, variance) or a dict with these keys; {PREDICT}"
        )
    mean, variance = (_shape_points(check_scores(part).float(), seen) for part in outputs)
    if mean.shape != variance.shape:
        raise OutputError(
            f"the mean is {list(mean.shape)} and the variance {list(variance.shape)}: they must be equal"
        )
    if not torch.compiler.is_compiling() and variance.device.type != "meta" and not bool((variance > 0).all()):
        raise OutputError(
            f"the variance of a Gaussian is above 0, the model returned {float(variance.min()):.3g}: end it by a "
            f"softplus or an exponential, or {PREDICT}"
        )
    return torch.stack([mean, variance], dim=-1)


def _shape_points(points: Tensor, seen: Observation | None) -> Tensor:
    """Numbers in the target's shape: an axis of size one more or less at the end makes no difference."""
    if seen is None or seen.target is None:
        return points
    lacking = len(seen.target[1]) + 1 - points.dim()
    if lacking == -1 and points.shape[-1] == 1:
        return points.squeeze(-1)
    return points.unsqueeze(-1) if lacking == 1 else points


def explain_shape_mismatch(task: Task, values: Tensor, target: Tensor | None) -> str | None:
    """Why values [b, ...] and the target, as it is stored (`as_stored_target`), are not those of the task."""
    why = explain_layout(task, values, target)
    if target is None or why is not None:
        return why
    if task.kind == "classification" and not target.is_floating_point():
        wrong = find_known(target) & ((target < 0) | (target >= values.shape[-1]))
        if bool(wrong.any()):
            label = int(target[wrong][0])
            return f"a target is {label}, and the model has {values.shape[-1]} classes: declare Recipe(task=...)"
    return explain_labels(task, target)


def explain_layout(task: Task, values: Tensor, target: Tensor | None) -> str | None:
    """Why values do not have the layout of the task and the target; None where they do."""
    positions = {"classification": 1, "gaussian": 1, "quantiles": 1}.get(task.kind, 0)
    if task.kind != "free" and values.dim() < 1 + max(positions, task.kind == "multilabel"):
        return f"values of shape {list(values.shape)} are not those of {task.kind}"
    if task.kind == "free" or target is None or values.shape[: values.dim() - positions] == target.shape:
        return None
    return (
        f"{task.kind}: values of shape {list(values.shape)} and the target {list(target.shape)} do not have "
        "the same positions"
    )


def explain_labels(task: Task, target: Tensor) -> str | None:
    """Why a target, as it is stored, names no classes or labels; None where it does, or need not."""
    if (wrong := find_wrong_stored_label(task, target)) is not None:
        return f"{task.kind}: sample {wrong[0]} of a batch {wrong[1]}"
    if task.kind in LABELS and target.is_floating_point():
        return f"{task.kind}: the target has fractions, where it should name classes or labels"
    return None


def find_wrong_stored_label(task: Task, target: Tensor) -> tuple[int, str] | None:
    """See `find_wrong_label`, for a target as it is stored."""
    if task.kind != "multilabel":
        return None
    return find_wrong_label(target.where(find_known(target, of_labels=True), 0))


def explain_label_error(
    recipe: Recipe,
    model: torch.nn.Module,
    batch: Mapping[str, Tensor],
    describe_sample: Callable[[int], str],
    outputs: Any = None,
) -> str | None:
    """Name the first label of a batch for which the model has no class; None if there is none.

    Called after the loss has failed, whose own message has neither the sample nor the split. Not on a GPU, which
    is unusable after such an error.
    """
    import torch

    target = find_target(batch, recipe.target)
    if target is None or target.dim() == 0 or target.is_floating_point() or target.device.type != "cpu":
        return None
    try:
        with torch.no_grad():
            scores = check_scores(compute_outputs(recipe, model, batch) if outputs is None else outputs)
        axis = find_class_axis(tuple(scores.shape), tuple(target.shape))
    except Exception:  # a failure before the model returned has nothing to do with labels
        return None
    classes = scores.shape[axis] if axis else 0
    wrong = (find_known(target) & ((target < 0) | (target >= classes))).nonzero()
    if classes < 2 or not len(wrong):
        return None
    at = tuple(wrong[0].tolist())
    label, remedy = int(target[at]), ""
    if label in (-1, 255):  # as public benchmarks mark what has no label
        remedy = f"; if {label} means no class, let a stage replace it by {IGNORED}, torch's ignore_index"
    return (
        f"{describe_sample(int(batch['index'][at[0]]))} has the label {label} in {recipe.target!r}, and the "
        f"model has the classes 0 ... {classes - 1}{remedy}"
    )


def _with_target(target: str, batch: Mapping[str, Tensor], seen: Observation | None) -> Mapping[str, Tensor]:
    """The batch, with zeros for a target that it lacks."""
    import torch

    some = next((value for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()), None)
    if some is None or target in batch or find_target(batch, target) is not None:
        return batch
    dtype, shape = ("int64", ()) if seen is None or seen.target is None else seen.target
    zeros = torch.zeros((some.shape[0], *shape), dtype=getattr(torch, dtype), device=some.device)
    return {**batch, target: zeros}
