"""Reads off the shapes of a model's outputs and of the target where the classes are, and whether numbers fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ensemble.spec.losses import find_wrong_label
from ensemble.spec.split_metrics import SplitMetricLike, name_of
from ensemble.spec.task import LABELS, Task, find_known

if TYPE_CHECKING:
    from torch import Tensor

    from ensemble.spec import Recipe

PREDICT = "declare Recipe.predict(model, batch) -> predictions"


class OutputError(Exception):
    """The outputs of a Recipe's model are not those of its task; the message says what to declare."""


def find_class_axis(outputs: tuple[int, ...], target: tuple[int, ...] | None) -> int:
    """The axis of the outputs of this shape that holds the classes: 1, -1, or 0 where there is none.

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


def fit_points(outputs: tuple[int, ...], target: tuple[int, ...]) -> int | None:
    """How many axes of size one the outputs lack at their end (-1: have too many); None where they do not fit."""
    if outputs == target:
        return 0
    if outputs == (*target, 1):
        return -1
    return 1 if (*outputs, 1) == target else None


def check_scores(outputs: Any) -> Tensor:
    """The outputs, which must be a tensor [b, ...] of floats, or have one as `logits`; raises OutputError."""
    import torch

    outputs = take_logits(outputs)
    if not isinstance(outputs, torch.Tensor) or not outputs.is_floating_point() or outputs.dim() == 0:
        raise OutputError(f"the model returned {describe(outputs)}, not numbers [b, ...]; {PREDICT}")
    return outputs


def take_logits(outputs: Any) -> Any:
    """The `logits` of outputs that have them as an attribute, as Transformers' models do; else the outputs."""
    import torch

    logits = None if isinstance(outputs, torch.Tensor) else getattr(outputs, "logits", None)
    return logits if isinstance(logits, torch.Tensor) else outputs


def describe(value: Any) -> str:
    """A value's type, with shape and dtype where it has them, for messages."""
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    return f"a {kind}" if shape is None else f"a {kind} of shape {list(shape)} and dtype {value.dtype}"


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


def describe_unmeasured(recipe: Recipe, metrics: Iterable[SplitMetricLike], why: str) -> str:
    """A line about metrics of the whole split that these predictions and targets do not have.

    Args:
        metrics: those that are wanted (`list_split_metrics`).
        why: what the predictions or targets are instead.
    """
    names = list(map(name_of, metrics))
    asked = [name for name in names if name not in map(name_of, recipe.split_metrics)]  # by the objective alone
    hint = ""
    if asked and recipe.metrics is not None:
        hint = f"; name the figure of Recipe.metrics differently from {asked[0]!r}, and rank by it, with mode="
    return f"{', '.join(names)}: {why}{hint}"
