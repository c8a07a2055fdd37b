"""How a member trains, from the words of its declaration: checked together, and as its identity records them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ensemble.checks import SpecError, check_loss_scale, check_number
from ensemble.options import COMMUNICATORS, COMPRESSIONS, OPTIMIZERS, SCHEDULES, resolve, with_hyperparameters

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
    optimizer, schedule = words["optimizer"], words["schedule"]
    if optimizer is not None:
        arguments = with_hyperparameters("optimizer", optimizer, OPTIMIZERS, params)
        if arguments["lr"] is None and not proposed:
            raise SpecError(f"the optimizer {optimizer['name']!r} needs lr: its option, or a hyperparameter")
    if schedule is not None and schedule.get("warmup_epochs", 0) > member["epochs"]:
        warm_up = f"a warm-up of {schedule['warmup_epochs']:g} epochs"
        raise SpecError(f"{warm_up} is longer than the training, {member['epochs']}")
    return words


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
