"""Losses that are chosen by name, `Recipe(loss="cross_entropy")`: one value for each sample.

A loss is averaged over everything but the samples: labels, steps, pixels, quantiles. Positions whose target is
`IGNORED` or NaN take no part; the loss of a sample that has no other is 0. Losses are computed in float32 (float64
for a model in float64), whatever the member's precision.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import types
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ensemble.spec.task import IGNORED, Kind, Task, find_known
from ensemble.spec.validation import SpecError, check_choice

if TYPE_CHECKING:
    from torch import Tensor

#: The losses, with the kind of task that each is for; None: it follows from the target.
LOSSES: Mapping[str, Kind | None] = {
    "cross_entropy": "classification",
    "binary_cross_entropy": None,
    "mse": "regression",
    "huber": "regression",
    "gaussian_nll": "gaussian",
    "pinball": "quantiles",
}
#: Along which axis a model has its classes, 1 or -1, as batches have shown of which the shapes say it.
CLASS_AXES: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
#: The fields that each batch has beside those of its samples; `weight` where samples have weights.
NO_INPUTS = ("index", "weight")
_OF_LABELS = ("cross_entropy", "binary_cross_entropy")


@dataclass(frozen=True)
class NamedLoss:
    """A loss function `loss(model, batch) -> [b]`.

    Attributes:
        name: one of `LOSSES`.
        target: the field of the target.
        inputs: the fields that the model is called with, in this order; empty: the only other one.
        label_smoothing: share of the target that goes to all classes alike, in training.
        levels: of the quantiles.
        scale: mean and standard deviation of the target, which the model learns in parts of them; None: as it is.
    """

    name: str
    target: str
    inputs: tuple[str, ...] = ()
    label_smoothing: float = 0.0
    levels: tuple[float, ...] = ()
    scale: tuple[float, float] | None = None

    def __call__(self, model: Any, batch: Mapping[str, Any]) -> Tensor:
        """The loss of each sample, [b].

        Raises:
            SpecError: the batch lacks a field that is named.
        """
        return self.compute_for(model, model(*(batch[name] for name in self.find_inputs(batch))), batch)

    def compute_for(self, model: Any, outputs: Any, batch: Mapping[str, Any]) -> Tensor:
        """The loss of each sample, [b], where the model has returned these outputs for the batch."""
        is_training = getattr(model, "training", False)
        try:
            return self.compute(outputs, batch[self.target], training=is_training, model=model)
        except SpecError as error:
            raise SpecError(f"{error} (the target is the field {self.target!r})") from None

    @property
    def is_of_classes(self) -> bool:
        """Whether the target is the number of a class."""
        return self.name == "cross_entropy"

    def find_inputs(self, batch: Collection[str]) -> Sequence[str]:
        """The fields that the model is called with, in this order, of a batch with these fields.

        Raises:
            SpecError: a field that is named is not there; none are named, and there are several.
        """
        for option, name in (("target", self.target), *(("inputs", name) for name in self.inputs)):
            if name not in batch:
                present = ", ".join(field for field in batch if field not in NO_INPUTS)
                raise SpecError(f"the data have no field {name!r} of Recipe.{option}; they have {present}")
        if self.inputs:
            return self.inputs
        fields = [name for name in batch if name != self.target and name not in NO_INPUTS]
        if len(fields) != 1:
            raise SpecError(
                f"it is not clear which fields are the model's inputs ({', '.join(fields) or 'there is none'}): "
                "name them, in their order, with Recipe(inputs=...)"
            )
        return fields

    def find_samples(self, target: Tensor) -> Tensor:
        """Which samples take part, bool [b]: those of a target [b, ...] of which some position does."""
        takes_part = find_known(target, of_labels=self.name in _OF_LABELS)
        return takes_part.reshape(len(takes_part), -1).any(dim=1)

    def compute(self, outputs: Any, target: Tensor, *, training: bool = False, model: Any = None) -> Tensor:
        """The loss of each sample, [b].

        Args:
            outputs: of the model; for "gaussian_nll" a tuple (mean, variance), or a dict of both.
            target: [b, ...].
            training: whether labels are smoothed.
            model: whose earlier batches say along which axis the classes are, where this one does not.
        """
        if self.scale is not None:
            target = _standardize(target, *self.scale)
        if self.is_of_classes:
            return _cross_entropy(outputs, target, self.label_smoothing if training else 0.0, model)
        if self.name == "gaussian_nll":
            return _gaussian_nll(outputs, target)
        outputs = _widen(outputs)
        if self.name == "pinball":
            return _pinball(outputs, target, self.levels)
        return _elementwise(self.name, outputs, target)


def as_loss(
    declared: Any,
    target: str,
    inputs: tuple[str, ...],
    label_smoothing: float,
    task: Task | None,
    scale: tuple[float, float] | None = None,
) -> Any:
    """The function that a Recipe's loss stands for: itself, or that of a name.

    Raises:
        SpecError: there is no such loss, or an option does not fit it.
    """
    name = declared.name if isinstance(declared, NamedLoss) else declared  # of a Recipe made of another one
    if not isinstance(name, str):
        for option, value in (("inputs", inputs), ("label_smoothing", label_smoothing)):
            if value:
                raise SpecError(
                    f"Recipe.{option} is for a loss that is given by its name ({', '.join(LOSSES)}); do that in "
                    "your function"
                )
        return declared
    check_choice("Recipe.loss", name, list(LOSSES))
    if label_smoothing and name != "cross_entropy":
        raise SpecError(f"Recipe.label_smoothing is for loss='cross_entropy', not for {name!r}")
    kind = LOSSES[name]
    if name == "pinball" and (task is None or task.kind != "quantiles"):
        raise SpecError("Recipe.loss='pinball' needs the quantiles: task=quantiles(0.1, 0.5, 0.9)")
    if kind is not None and task is not None and task.kind not in (kind, "free"):
        raise SpecError(f"Recipe.loss={name!r} is for the task {kind!r}, not for {task.kind!r}")
    if scale is not None and name in _OF_LABELS:
        raise SpecError(f"Recipe.target_scale is for numbers; loss={name!r} is of classes or labels")
    levels = task.levels if task is not None else ()
    return NamedLoss(name, target, inputs, label_smoothing, levels, scale)


#: Losses of torch, functions and classes, that say what is predicted.
_TASKS_OF_TORCH: Mapping[str, Kind] = {
    **dict.fromkeys(("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss"), "classification"),
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"), "regression"),
    **dict.fromkeys(("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss"), "regression"),
    **dict.fromkeys(("gaussian_nll_loss", "GaussianNLLLoss"), "gaussian"),
}
#: Names that torch's other losses have: beside one of them nothing says which is only a regularizer.
_LIKE_LOSSES = re.compile(r"\w*(_loss|Loss|_with_logits)|binary_cross_entropy|kl_div")


def implied_task(loss: Any) -> Task | None:
    """The task that a loss is for: that of its name, or of torch's losses that a function names, all of one kind.

    None where the loss leaves that open.
    """
    if isinstance(loss, NamedLoss):
        kind = LOSSES[loss.name]
        return None if kind is None or kind == "quantiles" else Task(kind)
    names = set(_list_names(loss))
    kinds = {_TASKS_OF_TORCH[name] for name in names if name in _TASKS_OF_TORCH}
    others = [name for name in names - _TASKS_OF_TORCH.keys() if _LIKE_LOSSES.fullmatch(name)]
    if len(kinds) != 1:
        return None
    if others:
        from torch import nn

        if any(hasattr(module, name) for name in others for module in (nn, nn.functional)):
            return None
    return Task(kinds.pop())


def _list_names(loss: Any) -> Iterator[str]:
    """Names that a function's code uses, of the functions in it, and of the objects that these names stand for."""
    function = getattr(loss, "func", loss)  # of a functools.partial
    function = function if inspect.isroutine(function) else getattr(type(function), "__call__", None)  # noqa: B004
    function = inspect.unwrap(getattr(function, "__func__", function))  # type: ignore[arg-type]  # of a method
    codes = [function.__code__] if hasattr(function, "__code__") else []
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        yield from code.co_names
        for name in code.co_names:  # loss_function = nn.CrossEntropyLoss(reduction="none") at the top of a file
            value = function.__globals__.get(name)
            yield from (type(value).__name__, getattr(value, "__name__", ""))
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # it is empty
            yield from (type(cell.cell_contents).__name__, getattr(cell.cell_contents, "__name__", ""))


def _standardize(target: Tensor, mean: float, std: float) -> Tensor:
    """A target of numbers as floats of mean 0 and variance 1; those that take no part are NaN."""
    import torch

    own = target if target.dtype == torch.float64 else target.double()
    standard = torch.where(find_known(target), (own - mean) / std, torch.nan)
    return standard if target.dtype == torch.float64 else standard.float()


def _widen(outputs: Any) -> Tensor:
    """Outputs in float32 at least."""
    import torch

    if not isinstance(outputs, torch.Tensor) or not outputs.is_floating_point():
        raise SpecError(f"the model returned {type(outputs).__name__}, and the loss needs a tensor of floats")
    return outputs if outputs.dtype == torch.float64 else outputs.float()


def _mean(losses: Tensor, counted: Tensor) -> Tensor:
    """The mean over all axes but the first, [b], of what counts; 0 where nothing does."""
    import torch

    if losses.dim() == 1:
        return torch.where(counted, losses, 0.0)
    losses, counted = losses.reshape(len(losses), -1), counted.reshape(len(counted), -1)
    sums = torch.where(counted, losses, 0.0).sum(dim=1)
    return sums / counted.sum(dim=1).clamp(min=1)


def _cross_entropy(outputs: Any, target: Tensor, label_smoothing: float, model: Any = None) -> Tensor:
    from torch.nn.functional import cross_entropy

    if target.is_floating_point():
        kind = str(target.dtype).removeprefix("torch.")
        raise SpecError(f"cross_entropy: the target is {kind}, and classes are integers: return int64")
    scores = _widen(outputs)
    if scores.dim() == 2 and scores.shape[1] == 1 and target.dim() == 1:
        raise SpecError(
            "cross_entropy needs an output for each class, and the model has one output: let it have as many as "
            "there are classes, two for two; for one output of two classes declare loss='binary_cross_entropy'"
        )
    if scores.dim() != 2 or target.dim() != 1:
        scores = _move_classes(scores, target, model)
    options: dict[str, Any] = {"ignore_index": IGNORED, "label_smoothing": label_smoothing, "reduction": "none"}
    losses = cross_entropy(scores, target.long(), **options)  # 0 where the target is ignored
    return losses if losses.dim() == 1 else _mean(losses, find_known(target))


def remember_class_axis(model: Any, axis: int | None) -> None:
    """Note along which axis, 1 or -1, a model has its classes: a batch as long as there are classes hides it."""
    if axis:
        CLASS_AXES[model] = axis


def _move_classes(scores: Tensor, target: Tensor, model: Any) -> Tensor:
    """Scores with the classes on axis 1, where torch has them; they may be on the last one."""
    at_1 = scores.dim() == target.dim() + 1 and scores.shape[2:] == target.shape[1:]
    at_last = scores.shape[:-1] == target.shape
    axis: int | None = 1 if at_1 else -1 if at_last else None
    if at_1 and at_last and scores.dim() > 2:
        axis = None if model is None else CLASS_AXES.get(model)
    elif model is not None and target.dim() > 1:
        remember_class_axis(model, axis)
    if axis is None:
        why = "either axis 1 or the last may hold the classes" if at_1 else "they do not fit"
        raise SpecError(
            f"cross_entropy: scores of shape {list(scores.shape)} for a target of shape {list(target.shape)}: "
            f"{why}; give a loss function of your own"
        )
    return scores if axis == 1 else scores.movedim(-1, 1)


def _known(target: Tensor, *, of_labels: bool = False) -> tuple[Tensor, Tensor]:
    """The target with 0 where there is none, and where there is one."""
    import torch

    counted = find_known(target, of_labels=of_labels)
    return torch.where(counted, target, torch.zeros((), dtype=target.dtype, device=target.device)), counted


def find_wrong_label(labels: Tensor) -> tuple[int, str] | None:
    """Row and fault of the first sample of labels [b, ...] with one that is not 0 ... 1; None without one."""
    wrong = (labels < 0) | (labels > 1)
    if not bool(wrong.any()):
        return None
    row = int(wrong.reshape(len(wrong), -1).any(dim=1).nonzero()[0])
    return row, f"has the label {labels[wrong][0].item():g}: labels are 0, 1, or shares between"


def _fit(outputs: Tensor, target: Tensor, what: str) -> Tensor:
    """Outputs in the shape of the target, from which they may differ by a last axis of 1."""
    if outputs.shape == (*target.shape, 1):
        return outputs.squeeze(-1)
    if outputs.shape != target.shape:
        shapes = list(outputs.shape), list(target.shape)
        raise SpecError(f"{what}: outputs of shape {shapes[0]} for a target of shape {shapes[1]}")
    return outputs


def _elementwise(name: str, outputs: Tensor, target: Tensor) -> Tensor:
    from torch.nn import functional

    outputs = _fit(outputs, target, name)
    filled, counted = _known(target, of_labels=name in _OF_LABELS)
    is_looked_at = name in _OF_LABELS and filled.device.type == "cpu"  # a GPU would wait
    if is_looked_at and (wrong := find_wrong_label(filled)) is not None:
        raise SpecError(f"sample {wrong[0]} of a batch {wrong[1]}")
    functions: dict[str, Any] = {
        "binary_cross_entropy": functional.binary_cross_entropy_with_logits,
        "mse": functional.mse_loss,
        "huber": functional.huber_loss,
    }
    return _mean(functions[name](outputs, filled.to(outputs.dtype), reduction="none"), counted)


def _gaussian_nll(outputs: Any, target: Tensor) -> Tensor:
    from torch.nn.functional import gaussian_nll_loss

    parts = [outputs["mean"], outputs["variance"]] if isinstance(outputs, Mapping) else outputs
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise SpecError("gaussian_nll: the model returns (mean, variance), or a dict of 'mean' and 'variance'")
    mean, variance = (_fit(_widen(part), target, "gaussian_nll") for part in parts)
    filled, counted = _known(target)
    return _mean(gaussian_nll_loss(mean, filled.to(mean.dtype), variance, full=True, reduction="none"), counted)


def _pinball(outputs: Tensor, target: Tensor, levels: tuple[float, ...]) -> Tensor:
    import torch

    if outputs.shape != (*target.shape, len(levels)):
        raise SpecError(
            f"pinball: outputs of shape {list(outputs.shape)} for a target of shape {list(target.shape)} and "
            f"{len(levels)} quantiles: they are the last axis"
        )
    filled, counted = _known(target)
    at = torch.tensor(levels, dtype=outputs.dtype, device=outputs.device)
    below = filled.to(outputs.dtype).unsqueeze(-1) - outputs
    return _mean(torch.maximum(at * below, (at - 1) * below), counted.unsqueeze(-1).expand_as(below))
