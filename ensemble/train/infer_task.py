"""Infers what a Recipe's members predict, from the target of a batch and the outputs of the model.

What may mean several things is not guessed: the message says what to declare. Where that depends on the targets
that a batch happens to hold, another batch may show it, or show that it is something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ensemble.spec.task import CLASSIFICATION, Task, as_task, find_known

if TYPE_CHECKING:
    from torch import Tensor

    from ensemble.spec import Recipe

PREDICT = "declare Recipe.predict(model, batch) -> predictions"


class OutputError(Exception):
    """The outputs of a Recipe's model are not available, or say nothing; the message says what to declare."""


class UnshownError(OutputError):
    """The targets of this batch do not show what the outputs are; those of another may."""


def infer_task(recipe: Recipe, target: Tensor | None, outputs: Any) -> Task:
    """The task that a Recipe declares, or that a batch's target [b, ...] and outputs [b, ...] imply.

    Args:
        outputs: what the model returned; with `recipe.predict`, what that returned.

    Raises:
        OutputError: they imply none, or several; the message says what to declare.
    """
    declared = as_task("Recipe.task", recipe.task)
    if declared is not None:
        return declared
    field = f"the target {recipe.target!r}"
    if target is None:
        raise OutputError(
            f"the data have no field {recipe.target!r}: declare Recipe(target=...), or Recipe(task=...) where "
            "there is none"
        )
    shapes = f"{field} is {str(target.dtype).removeprefix('torch.')} {list(target.shape)} and the outputs are "
    if not hasattr(outputs, "shape"):
        raise OutputError(
            f"{shapes}{describe(outputs)}: declare Recipe(task='gaussian') where they are mean and variance, or "
            "Recipe.predict(model, batch) -> predictions with Recipe(task=...)"
        )
    check_scores(outputs)
    shapes += str(list(outputs.shape))
    if target.is_floating_point():
        return _infer_task_of_numbers(field, shapes, target, outputs)
    return _infer_task_of_integers(field, shapes, target, outputs, predicted=recipe.predict is not None)


def _infer_task_of_numbers(field: str, shapes: str, target: Tensor, outputs: Tensor) -> Task:
    known = target[find_known(target)]
    if not len(known):
        raise UnshownError("")  # nothing is to be said of a batch of which no value takes part
    if bool(((known == 0) | (known == 1)).all()):
        raise UnshownError(
            f"{field} holds only 0.0 and 1.0: declare Recipe(task='multilabel'), 'classification' or 'regression'"
        )
    if fit_points(tuple(outputs.shape), tuple(target.shape)) is None:
        raise OutputError(
            f"{shapes}: declare Recipe(task=...), such as quantiles(0.1, 0.5, 0.9), or a model that returns one "
            "number for each of the target"
        )
    if target.dim() == 2 and target.shape[1] > 1 and _are_distributions(target):
        raise UnshownError(f"{field} holds the probabilities of classes: {PREDICT} and Recipe(task=...)")
    return Task("regression")


def _infer_task_of_integers(field: str, shapes: str, target: Tensor, outputs: Tensor, *, predicted: bool) -> Task:
    if not predicted and outputs.shape == target.shape and target.dim() == 2 and target.shape[1] > 1:
        raise OutputError(
            f"{shapes}: declare Recipe(task='multilabel') for several labels of a sample, 'classification' for a "
            "class at each step"
        )
    if predicted:
        if outputs.shape[:-1] != target.shape or outputs.shape[-1] < 2:
            raise OutputError(f"{shapes}, of Recipe.predict: declare Recipe(task=...)")
        return CLASSIFICATION
    axis = find_class_axis(tuple(outputs.shape), tuple(target.shape))
    classes = 2 if axis == 0 else max(2, outputs.shape[axis])
    known = target[find_known(target)].long()
    if classes == 2 and bool(((known < 0) | (known > 1)).any()):
        raise OutputError(
            f"{shapes}, one number where the target has more than the classes 0 and 1: declare "
            "Recipe(task='regression'), or a model that returns a score for each class"
        )
    return CLASSIFICATION


def is_shown_in_part(recipe: Recipe, target: Tensor | None, task: Task, outputs: Any) -> bool:
    """Whether a batch only seems to show the task: outputs of one number for a target that so far is 0 or 1."""
    if recipe.task is not None or task.kind != "classification" or target is None or recipe.predict is not None:
        return False
    axis = find_class_axis(tuple(outputs.shape), tuple(target.shape))
    return axis == 0 or outputs.shape[axis] == 1


def _are_distributions(target: Tensor) -> bool:
    sums = target.double().sum(dim=-1)
    return bool((target >= 0).all()) and bool(((sums - 1).abs() < 1e-4).all())


def find_class_axis(outputs: tuple[int, ...], target: tuple[int, ...] | None) -> int:
    """The axis of the outputs of this shape that holds the classes: 1, -1, or 0 where there is none.

    torch's losses want the classes of a step or a pixel along axis 1, [b, C, ...]; others put them last,
    [b, ..., C]. Outputs without them are the logit of the second of two classes.

    Args:
        target: the shape [b, ...] of the target; None where there is none: then there are no positions.

    Raises:
        UnshownError: both fit, as where a batch is as long as there are classes.
        OutputError: neither fits.
    """
    target = outputs[:1] if target is None else target
    if outputs == target:
        return 0
    first = len(outputs) == len(target) + 1 and outputs[2:] == target[1:]
    last = outputs[:-1] == target
    if first and last and len(outputs) > 2:
        raise UnshownError(
            f"outputs {list(outputs)} may have their classes along axis 1 or along the last one (the target is "
            f"{list(target)}); declare Recipe.predict(model, batch) -> probabilities, classes last"
        )
    if not first and not last:
        if outputs == target[:1] and all(size == 1 for size in target[1:]):
            return 0
        raise OutputError(
            f"outputs {list(outputs)} are no scores of classes for the target {list(target)}: "
            f"[b, classes, ...] or [b, ..., classes]; {PREDICT}"
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
