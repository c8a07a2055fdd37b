"""What members predict: the task fixes how predictions are laid out, measured, combined and calibrated.

A member's predictions on a split are one float32 array, `values`, with one row for each of n samples. `...` stands
for the positions of a sample: none, or its steps, its pixels, its several targets.

| task           | values       | of which                                    | target                  |
| classification | [n, ..., C]  | probabilities of C >= 2 classes, sum 1      | int [n, ...], the class |
| multilabel     | [n, L]       | the probability of each of L labels         | int [n, L], 0 or 1      |
| regression     | [n, ...]     | points                                      | float [n, ...]          |
| gaussian       | [n, ..., 2]  | mean and variance (above 0)                 | float [n, ...]          |
| quantiles      | [n, ..., Q]  | the quantiles of `Task.levels`, ascending   | float [n, ...]          |
| free           | any          | whatever the recipe's outputs are           | any, or none            |

A target that is `IGNORED` (integers) or NaN (floats) takes no part in anything: padding of sequences, unlabelled
pixels. `find_known` alone decides that, for losses, figures, combination and calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from ensemble.spec.validation import SpecError, check_choice, option_class

Kind = Literal["classification", "multilabel", "regression", "gaussian", "quantiles", "free"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ArrayT = TypeVar("ArrayT")  # an array of numpy, or a tensor

#: The integer target of a position that takes no part, as in torch's losses.
IGNORED = -100


@option_class
@dataclass(frozen=True)
class Task:
    """What the members of an ensemble predict.

    Attributes:
        kind: one of `KINDS`.
        levels: for quantiles, their probabilities, ascending, each between 0 and 1.
    """

    kind: Kind
    levels: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_choice("Task.kind", self.kind, KINDS)
        levels = tuple(float(level) for level in self.levels)
        object.__setattr__(self, "levels", levels)
        if (self.kind == "quantiles") != bool(levels):
            raise SpecError("Task.levels are given for quantiles, and only for them: quantiles(0.1, 0.5, 0.9)")
        if any(not 0 < level < 1 for level in levels) or list(levels) != sorted(set(levels)):
            raise SpecError(f"Task.levels must ascend between 0 and 1, got {', '.join(map(str, levels))}")

    def decide(self, values: Any) -> Any:
        """What is predicted, as a target says it: the most probable class, labels of at least 0.5, else the point.

        Args:
            values: [n, ...] laid out by the task, an array or a tensor; those of a free task stay as they are.
        """
        if self.kind == "classification":
            return values.argmax(-1)
        return values >= 0.5 if self.kind == "multilabel" else self.take_point(values)

    def take_point(self, values: Any) -> Any:
        """The number that is predicted, [n, ...]: the point, a Gaussian's mean, the quantile nearest to 0.5."""
        if self.kind == "gaussian":
            return values[..., 0]
        if self.kind == "quantiles":
            return values[..., min(range(len(self.levels)), key=lambda i: abs(self.levels[i] - 0.5))]
        return values

    def as_record(self) -> dict[str, Any]:
        """The task as JSON; see `from_record`."""
        return {"kind": self.kind, **({"levels": list(self.levels)} if self.levels else {})}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Task:
        """The task that `as_record` describes."""
        return cls(record["kind"], tuple(record.get("levels", ())))


CLASSIFICATION = Task("classification")

#: The tasks whose targets stand for classes or labels, also where they are floats.
LABELS: tuple[Kind, ...] = ("classification", "multilabel")
NUMBERS: tuple[Kind, ...] = ("regression", "gaussian", "quantiles")


def find_known(target: ArrayT, *, of_labels: bool = False) -> ArrayT:
    """Which targets take part, bool of the same shape: those that are neither NaN nor `IGNORED`.

    Args:
        target: an array or a tensor. Unsigned integers and bools all take part. Floats that equal `IGNORED` are
            numbers like any other, unless
        of_labels: they stand for classes or labels.
    """
    values: Any = target
    kind = str(values.dtype).removeprefix("torch.")
    if kind.startswith("int"):
        return values != IGNORED  # type: ignore[no-any-return]
    takes_part: Any = values == values
    if of_labels and not kind.startswith(("uint", "bool")):  # torch would compare with -100 as a uint8: 156
        takes_part = takes_part & (values != IGNORED)
    return takes_part  # type: ignore[no-any-return]


def quantiles(*levels: float) -> Task:
    """The task of a model that predicts quantiles: outputs [b, ..., Q], one for each level.

    Args:
        levels: their probabilities, ascending, each above 0 and below 1.

    Returns:
        A task, for `Recipe.task`.

    Raises:
        SpecError: there is no level, or they do not ascend between 0 and 1.
    """
    return Task("quantiles", levels)


def as_task(where: str, value: Any) -> Task | None:
    """The task that a word or a `Task` stands for; None for None.

    Args:
        where: the name of the option, for error messages.
    """
    if value is None or isinstance(value, Task):
        return value
    if not isinstance(value, str):
        raise SpecError(f"{where} must be one of {', '.join(KINDS)}, or quantiles(0.1, 0.5, 0.9), got {value!r}")
    check_choice(where, value, KINDS)
    if value == "quantiles":
        raise SpecError(f"{where}: quantiles need their levels: quantiles(0.1, 0.5, 0.9)")
    return Task(value)  # type: ignore[arg-type]
