"""Checks that a user's function can be called as it will be, and names what a hyperparameter may be meant for."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from ensemble.spec.validation import SpecError
from pipelines.errors import SYNONYMS

#: How the functions of a Recipe are called.
CALLS = {
    "model": "model(params)",
    "loss": "loss(model, batch)",
    "optimizer": "optimizer(model, params)",
    "schedule": "schedule(optimizer, params, steps)",
    "metrics": "metrics(outputs, batch)",
    "predict": "predict(model, batch)",
    "train": "train(member)",
}
#: What to write where one of torch's classes or functions is given.
_LINES = {
    "model": "lambda params: {name}(...), which builds a new one for each member",
    "loss": "lambda model, batch: {name}{given}(model(batch['x']), batch['label']{more})",
    "optimizer": "lambda model, params: torch.optim.{name}(model.parameters(), lr=params['lr'])",
    "schedule": "lambda optimizer, params, steps: torch.optim.lr_scheduler.{name}(optimizer, ...)",
}
#: torch's losses that are losses by name.
_LOSSES = {
    **dict.fromkeys(("CrossEntropyLoss", "cross_entropy"), "cross_entropy"),
    **dict.fromkeys(("BCEWithLogitsLoss", "binary_cross_entropy_with_logits"), "binary_cross_entropy"),
    **dict.fromkeys(("MSELoss", "mse_loss"), "mse"),
    **dict.fromkeys(("HuberLoss", "huber_loss"), "huber"),
    **dict.fromkeys(("GaussianNLLLoss", "gaussian_nll_loss"), "gaussian_nll"),
}


def takes_steps_per_epoch(schedule: Any) -> bool:
    """Whether a function of a schedule has an argument for the steps of an epoch."""
    try:
        return "steps_per_epoch" in inspect.signature(schedule).parameters
    except (TypeError, ValueError):  # of a builtin it is not known
        return False


def check_function(where: str, function: Any, call: str | None) -> None:
    """Raise SpecError for what cannot be called like that, such as a part of torch.

    Args:
        where: of which option it is (`Recipe.loss`).
        call: `loss(model, batch)`; None: it is not known.
    """
    option = where.rpartition(".")[2]
    kind = function if hasattr(function, "__name__") else type(function)
    is_network = any(base.__module__ == "torch.nn.modules.module" for base in type(function).__mro__)
    if option in _LINES and (kind.__module__.partition(".")[0] == "torch" or (option == "model" and is_network)):
        of_class = isinstance(kind, type)
        arguments, more = ("(..., reduction='none')", "") if of_class else ("", ", ..., reduction='none'")
        line = _LINES[option].format(name=kind.__name__, given=arguments, more=more)
        named_loss = f"{_LOSSES[kind.__name__]!r}, or " if option == "loss" and kind.__name__ in _LOSSES else ""
        raise SpecError(
            f"{where} is called as {call}, and {kind.__name__} is not: write {option}={named_loss}{line}"
        )
    if not callable(function):
        raise SpecError(f"{where} must be a function, got {function!r}")
    if call is None or inspect.isbuiltin(function):
        return
    try:
        named = {"steps_per_epoch": None} if takes_steps_per_epoch(function) and option == "schedule" else {}
        given = [] if call.endswith("()") else call.split(",")
        inspect.signature(function).bind(*given, **named)
    except ValueError:  # it has none
        return
    except TypeError as error:
        raise SpecError(f"{where} is called as {call}, which this function does not accept: {error}") from None


def find_meant(name: str, options: Iterable[str]) -> str | None:
    """Which of the options a hyperparameter may be a misspelling of; None where none is near."""
    names = {option.lower(): option for option in options}
    names = {other: option for other, option in SYNONYMS.items() if option in names} | names
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return names[close[0]] if close else None


def describe_unused(names: Iterable[str], meant: Mapping[str, str]) -> str:
    """One line about hyperparameters that nothing reads.

    Args:
        meant: by the names of those that may be misspelt, what was looked for.
    """
    hint = " or ".join(repr(name) for name in dict.fromkeys(meant.values()))
    return f"nothing reads the hyperparameter {', '.join(map(repr, names))}" + (
        f"; did you mean {hint}?" if hint else ""
    )
