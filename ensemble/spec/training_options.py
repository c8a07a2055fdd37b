"""How a member trains, from the words of its declaration: checked together, and as its identity records them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ensemble.spec.options import COMMUNICATORS, COMPRESSIONS, OPTIMIZERS, SCHEDULES, resolve, with_hyperparameters
from ensemble.spec.search_space import Dimension
from ensemble.spec.validation import SpecError, check_loss_scale, check_number

#: Words with options, and their tables.
WORDS = {
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "compression": COMPRESSIONS,
    "communicator": COMMUNICATORS,
}
# Those that change nothing leave no trace in an identity.
_PLAIN = {"compression": "none", "communicator": "torch"}


def check_words(where: str, given: Any) -> None:
    """Refuse an `Ensemble` or `Member` of which a word, the loss scale or accumulation is wrong by itself."""
    if given.loss_scale is not None:
        check_loss_scale(f"{where}.loss_scale", given.loss_scale)
    if given.accumulate is not None:
        check_number(f"{where}.accumulate", given.accumulate, low=1, integer=True)
    for name, table in WORDS.items():
        if getattr(given, name) is not None:
            resolve(f"{where}.{name}", getattr(given, name), table)


def resolved(
    member: Mapping[str, Any], functions: Mapping[str, Any] | None, params: Mapping[str, Any], *, proposed: bool
) -> dict[str, Any]:
    """What a member's identity records of its words: None for one that changes nothing.

    Args:
        member: its precision, loss scale, epochs and words, as declared.
        functions: those that its Recipe has for "optimizer" and "schedule"; None of a train function.
        params: its hyperparameters.
        proposed: whether a search has them to propose: then they need not be known yet.

    Raises:
        SpecError: two of them cannot be together.
    """
    words = {name: _recorded(name, member[name], functions) for name in WORDS}
    if member["precision"] == "fp32" and member["loss_scale"] != "dynamic":
        raise SpecError("loss_scale is for the precisions fp16 and bf16, not for fp32")
    _check_hyperparameters(words, params, partly=proposed)
    schedule = words["schedule"]
    if schedule is not None and schedule.get("warmup_epochs", 0) > member["epochs"]:
        warm_up = f"a warm-up of {schedule['warmup_epochs']:g} epochs"
        raise SpecError(f"{warm_up} is longer than the training, {member['epochs']}")
    return words


def check_space(words: Mapping[str, Any], space: Mapping[str, Any]) -> None:
    """Refuse a search that may propose what an optimizer or schedule cannot be given.

    Args:
        words: what `resolved` made.
        space: of the search; of an interval both ends are looked at.
    """
    known = {name: axis.values if isinstance(axis, Dimension) else (axis,) for name, axis in space.items()}
    try:
        for name, values in known.items():
            for value in values:
                _check_hyperparameters(words, {name: value}, partly=True)
        _check_hyperparameters(words, {name: values[0] for name, values in known.items()}, partly=False)
    except SpecError as error:
        raise SpecError(f"Search.space: {error}") from None


def _check_hyperparameters(words: Mapping[str, Any], params: Mapping[str, Any], *, partly: bool) -> None:
    """Hyperparameters that take the place of options; `partly`: there will be more of them."""
    optimizer, schedule = words["optimizer"], words["schedule"]
    if schedule is not None:
        with_hyperparameters("schedule", schedule, SCHEDULES, params)
    if optimizer is not None:
        arguments = with_hyperparameters("optimizer", optimizer, OPTIMIZERS, params)
        if arguments["lr"] is None and not partly:
            raise SpecError(f"the optimizer {optimizer['name']!r} needs lr: its option, or a hyperparameter")


def _recorded(name: str, word: Any, functions: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if word is None:
        return None
    if name in ("optimizer", "schedule"):
        if functions is None:
            raise SpecError(f"{name}= is for a Recipe; a train function gives its own to member.prepare(...)")
        if functions[name] is not None:
            raise SpecError(f"give {name}= or Recipe.{name}, not both")
    chosen = resolve(name, word, WORDS[name])
    return None if name in _PLAIN and chosen == resolve(name, _PLAIN[name], WORDS[name]) else chosen
