"""Options of a training loop: early stopping, the weights that are kept, averages, validation, mixup, compiling.

An `Ensemble` has the values for all members, a `Member` its own. An `Identity` records them, as
`resolve_loop_options` returns them, because each changes the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ensemble.spec.options import NamedOptions, Option, OptionTable, count, number, one_of, resolve
from ensemble.spec.validation import SpecError, check_number, option_class

Keep = Literal["last", "best"]


@option_class
@dataclass(frozen=True)
class EarlyStopping:
    """Ends a member after epochs in which the objective did not improve.

    Attributes:
        patience: the number of such epochs in a row after which it ends; those in which nothing was reported do
            not count.
        min_delta: by how much the objective must be better than the best so far to count as improved.
    """

    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        check_number("EarlyStopping.patience", self.patience, low=1, integer=True)
        check_number("EarlyStopping.min_delta", self.min_delta, low=0)


@option_class
@dataclass(frozen=True)
class EMA:
    """An exponential moving average of the weights, updated after each step.

    Attributes:
        decay: how much of the average stays at a step. In the first steps it is less, (1 + n) / (10 + n) after n
            of them, so that the initial weights are soon forgotten.
    """

    decay: float = 0.999


@option_class
@dataclass(frozen=True)
class SWA:
    """Stochastic weight averaging (Izmailov et al. 2018): the mean of the weights at the ends of epochs.

    The running statistics of batch normalization are computed again for the averaged weights, by a pass over the
    training data before an evaluation.

    Attributes:
        start: the number of epochs before the first that counts; below 1 a part of all epochs.
        every_epochs: how many epochs apart those are that count from then on.
    """

    start: float = 0.75
    every_epochs: int = 1


EarlyStop = EarlyStopping | Mapping[str, Any] | Literal["none"]
Averaging = EMA | SWA | NamedOptions
Compile = bool | NamedOptions

#: Options of `ensemble.train.averaging`.
AVERAGES: OptionTable = {
    "none": {},
    "ema": {"decay": number(0.999, below=1)},
    "swa": {"start": number(0.75), "every_epochs": count(1)},
}


def _check_backend(where: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise SpecError(f"{where} must be the name of a backend of torch.compile, got {value!r}")


_COMPILED = {"backend": Option("inductor", _check_backend)}

#: The modes of torch.compile, with their options.
COMPILES: OptionTable = {
    "none": {},
    "default": _COMPILED,
    "reduce-overhead": _COMPILED,
    "max-autotune": _COMPILED,
    "max-autotune-no-cudagraphs": _COMPILED,
}


def resolve_loop_options(
    declared: Mapping[str, Any], objective: str, mode: str, *, validates: bool
) -> dict[str, Any]:
    """The loop options as a member's identity records them.

    Args:
        declared: the member's values of `LOOP_OPTIONS`.
        objective, mode: the metric that decides which epoch is best.
        validates: whether the member may report it: it has a validation split, or a train function.

    Raises:
        SpecError: one needs a validation split, and there is none.
    """
    stopping = _resolve_early_stopping("early_stopping", declared["early_stopping"])
    selects = stopping is not None or declared["keep"] == "best"
    used = {
        "keep='best'": declared["keep"] == "best",
        "early_stopping": stopping is not None,
        "validate_every": declared["validate_every"] > 0,
    }
    unmet = [name for name, is_used in used.items() if is_used and not validates]
    if unmet:
        raise SpecError(f"{unmet[0]} needs a validation split: give Ensemble.valid")
    return {
        "early_stopping": stopping,
        "keep": declared["keep"],
        "averaging": _resolve_averaging("averaging", declared["averaging"]),
        "validate_every": declared["validate_every"],
        "compile": _resolve_compile("compile", declared["compile"]),
        "mixup": float(declared["mixup"]),
        "selected_by": {"metric": str(objective), "mode": str(mode)} if selects else None,
    }


def explain_no_averages(averaging: Any, epochs: int) -> str | None:
    """Why a member of so many epochs would average nothing; None where it averages, or is not to."""
    options = None if averaging is None else _resolve_averaging("averaging", averaging)
    if options is None or "start" not in options or options["start"] < epochs:
        return None
    return f"averaging begins after {options['start']:g} epochs, and the member trains for {epochs}: begin earlier"


def _resolve_early_stopping(where: str, value: Any) -> dict[str, Any] | None:
    if isinstance(value, str) and value == "none":
        return None
    value = EarlyStopping(**value) if isinstance(value, Mapping) else value
    if not isinstance(value, EarlyStopping):
        raise SpecError(f"{where} must be EarlyStopping(patience=...) or 'none', got {value!r}")
    return dataclasses.asdict(value)


def _resolve_averaging(where: str, value: Any) -> dict[str, Any] | None:
    if isinstance(value, EMA | SWA):
        value = {"name": type(value).__name__.lower(), **dataclasses.asdict(value)}
    options = resolve(where, value, AVERAGES)
    return None if options["name"] == "none" else options


def _resolve_compile(where: str, value: Any) -> dict[str, Any] | None:
    if isinstance(value, bool):
        value = "default" if value else "none"
    options = resolve(where, value, COMPILES)
    return None if options["name"] == "none" else options


#: The options of this module, as `Ensemble` and `Member` name them.
LOOP_OPTIONS = {
    "early_stopping": Option("none", _resolve_early_stopping),
    "keep": one_of("last", "best"),
    "averaging": Option("none", _resolve_averaging),
    "validate_every": count(0, 0),
    "compile": Option(False, _resolve_compile),
    "mixup": number(0.0),
}
