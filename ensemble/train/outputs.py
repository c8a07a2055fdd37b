"""Computes a Recipe's model outputs for a batch, and the predictions that follow from them.

The outputs are what the model *returned inside the loss*, seen by a forward hook: the loss calls it in its own way
(which fields, which order, which preprocessing). Where that call is known (`ensemble.train.call`), it is repeated
without the loss. Else the loss runs to its end, on a target of zeros where the batch has none.

Sizes are read off shapes: `len(tensor)` would fix the batch size of an exported program.

The functions leave the model's mode and the gradient mode to the caller, who usually wants `model.eval()` and
`torch.no_grad()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ensemble.spec.task import IGNORED, NUMBERS, Task, find_known
from ensemble.train.call import Call, Observation, find_call, find_target
from ensemble.train.output_shapes import PREDICT, check_scores, describe, find_class_axis, fit_points
from ensemble.train.output_shapes import OutputError as OutputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ensemble.spec import Recipe


@dataclass
class FirstCall:
    """The first call of a model: its arguments, by field of the batch (see `find_call`), and what it returned."""

    is_seen: bool = False
    call: Call | None = None
    returned: Any = None

    def output(self) -> Any:
        """What it returned."""
        if not self.is_seen:
            raise OutputError(
                f"model(...) itself was never called (a method or a part of it does not count); {PREDICT}"
            )
        return self.returned


@contextmanager
def watch_call(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> Iterator[FirstCall]:
    """Yield the `FirstCall` of the model inside the block, in which a loss gets this batch."""
    first = FirstCall()

    def keep(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not first.is_seen:
            first.is_seen, first.call, first.returned = True, find_call(args, kwargs, batch), output

    handle = model.register_forward_hook(keep, with_kwargs=True)
    try:
        yield first
    finally:
        handle.remove()


def compute_outputs(
    recipe: Recipe, model: torch.nn.Module, batch: Mapping[str, Tensor], seen: Observation | None = None
) -> Any:
    """What `model` returns for `batch` inside `recipe.loss`.

    Works for a batch that has no `recipe.target`: a loss that looks it up finds zeros of the target's shape and
    dtype (int64 [b] where they are not known).

    Args:
        seen: how the loss calls the model; None where that is not known.
    """
    if seen is not None and seen.call is not None:
        lacking = [name for name in seen.call.fields if name not in batch]
        if lacking:
            has = ", ".join(batch)
            raise OutputError(f"the model is called with the field {lacking[0]!r}, and the batch has {has}")
        return seen.call.call(model, _with_target(recipe.target, batch, seen))
    if recipe.loss is None:
        raise OutputError(
            f"it is not known how the train function calls the model; {PREDICT}, "
            "or give member.predict_all(function)"
        )
    batch = _with_target(recipe.target, batch, seen)
    with watch_call(model, batch) as first:
        try:
            recipe.loss(model, batch)
        except Exception:  # after the call it was the target, of which the outputs do not depend
            if not first.is_seen:
                raise
    return first.output()


def compute_values(
    recipe: Recipe, model: torch.nn.Module, batch: Mapping[str, Tensor], seen: Observation | None = None
) -> Tensor:
    """Predictions, float32 [b, ...], laid out by the task: `recipe.predict`, or what follows from the outputs.

    Args:
        seen: how the loss calls the model, and the target's shape; None: that is not known.
    """
    if recipe.predict is not None:
        predicted: Tensor = recipe.predict(model, batch)
        return predicted.float()
    seen = seen or Observation()
    outputs = compute_outputs(recipe, model, batch, seen)
    if seen.reason is not None:
        raise OutputError(seen.reason)
    return to_scaled_values(recipe, seen.task or recipe.find_task(), outputs, seen)


def observe(recipe: Recipe, batch: Mapping[str, Tensor], first: FirstCall) -> Observation:
    """What the first call of the model inside the loss of a batch shows of a Recipe's member."""
    target, task = find_target(batch, recipe.target), recipe.known_task
    shape = None if target is None else (str(target.dtype).removeprefix("torch."), tuple(target.shape[1:]))
    axis = None
    try:
        if recipe.predict is None and recipe.find_task().kind == "classification":
            outputs = tuple(check_scores(first.output()).shape)
            axis = find_class_axis(outputs, None if target is None else tuple(target.shape))
    except OutputError as error:
        # A train function that declares no task may say another one with its predictions.
        reason = None if task is None else str(error)
        return Observation(first.call, task, reason, shape)
    return Observation(first.call, task, None, shape, axis)


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
    axes = fit_points(tuple(points.shape), (points.shape[0], *seen.target[1]))
    if axes is None:
        axes = len(seen.target[1]) + 1 - points.dim()  # other positions than in training
    if axes == -1 and points.shape[-1] == 1:
        return points.squeeze(-1)
    return points.unsqueeze(-1) if axes == 1 else points


def explain_label_error(
    recipe: Recipe,
    model: torch.nn.Module,
    batch: Mapping[str, Tensor],
    describe_sample: Callable[[int], str],
    outputs: Any = None,
) -> str | None:
    """The first label of this batch for which the model has no class, as an error message; None if there is none.

    Called after the loss has failed, whose own message has neither the sample nor the split. Not on a GPU, which
    is unusable after such an error.
    """
    import torch

    target = find_target(batch, recipe.target)
    if target is None or target.dim() == 0 or target.is_floating_point() or target.device.type != "cpu":
        return None
    try:
        with torch.no_grad():
            outputs = check_scores(compute_outputs(recipe, model, batch) if outputs is None else outputs)
            axis = find_class_axis(tuple(outputs.shape), tuple(target.shape))
    except Exception:  # a failure before the model returned has nothing to do with labels
        return None
    classes = 0 if axis == 0 else int(outputs.shape[axis])
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

    if find_target(batch, target) is not None or target in batch or not batch:
        return batch
    dtype, shape = ("int64", ()) if seen is None or seen.target is None else seen.target
    some = next((value for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()), None)
    if some is None:
        return batch
    zeros = torch.zeros((some.shape[0], *shape), dtype=getattr(torch, dtype), device=some.device)
    return {**batch, target: zeros}
