"""The words of a declaration that stand for a choice with options: optimizer, schedule, compression, pruner ...

Each is a name, `optimizer="lars"`, or a dict of the name and what departs from its options' defaults,
`optimizer={"name": "lars", "momentum": 0.95}`. `resolve` makes the dict with every option filled in that a
member's identity records: what a member was trained with does not change when a default does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ensemble.spec.validation import SpecError, check_choice, check_number, json_value, unknown_name

Word = str | Mapping[str, Any]
Check = Callable[[str, Any], None]


@dataclass(frozen=True)
class Option:
    """An option's default, and `check(where, value)`, which refuses a wrong one; a default of None is valid."""

    default: Any
    check: Check


Table = Mapping[str, Mapping[str, Option]]


def number(default: float | None, low: float = 0.0, *, above: bool = False, below: float | None = None) -> Option:
    """A finite number of at least (or above) `low`, and below `below`."""

    def check(where: str, value: Any) -> None:
        check_number(where, value, low=low, above=above)
        if below is not None and value >= below:
            raise SpecError(f"{where} must be below {below:g}, got {value!r}")

    return Option(default, check)


def count(default: int | None, low: int = 1) -> Option:
    """An integer of at least `low`."""
    return Option(default, lambda where, value: check_number(where, value, low=low, integer=True))


def power_of_two(default: int, low: int, high: int) -> Option:
    """A power of two in a range."""

    def check(where: str, value: Any) -> None:
        if type(value) is not int or not low <= value <= high or value & (value - 1):
            raise SpecError(f"{where} must be a power of two from {low} to {high}, got {value!r}")

    return Option(default, check)


def one_of(default: str, *valid: str) -> Option:
    """One of some words."""
    return Option(default, lambda where, value: check_choice(where, value, (default, *valid)))


def flag(default: bool) -> Option:
    """True or False."""

    def check(where: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise SpecError(f"{where} must be True or False, got {value!r}")

    return Option(default, check)


def numbers(default: list[float], length: int | None = None, *, below: float | None = None) -> Option:
    """A list of finite numbers of at least 0, and below `below`."""

    def check(where: str, value: Any) -> None:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise SpecError(f"{where} must be a list of {length or 'any'} numbers, got {value!r}")
        for i, item in enumerate(value):
            check_number(f"{where}[{i}]", item, low=0)
            if below is not None and item >= below:
                raise SpecError(f"{where}[{i}] must be below {below:g}, got {item!r}")

    return Option(default, check)


def count_or(word: str, default: str | int) -> Option:
    """An integer of at least 1, or a word."""

    def check(where: str, value: Any) -> None:
        if value != word:
            if isinstance(value, str):
                raise SpecError(f"{where} must be an integer or {word!r}, got {value!r}")
            check_number(where, value, low=1, integer=True)

    return Option(default, check)


_LR = {"lr": number(None, above=True)}
_DECAY_ALL = {"decay_norm": flag(True)}
_ADAM = {**_LR, "betas": numbers([0.9, 0.999], 2, below=1), "eps": number(1e-8)}

#: Options of `ensemble.train.optimizers`. A hyperparameter of an option's name takes its place.
OPTIMIZERS: Table = {
    "sgd": {
        **_LR,
        "momentum": number(0.0, below=1),
        "nesterov": flag(False),
        "weight_decay": number(0.0),
        **_DECAY_ALL,
    },
    "adam": {**_ADAM, "weight_decay": number(0.0), **_DECAY_ALL},
    "adamw": {**_ADAM, "weight_decay": number(0.01), **_DECAY_ALL},
    "lars": {
        **_LR,
        "momentum": number(0.9, below=1),
        "nesterov": flag(False),
        "weight_decay": number(1e-4),
        "trust": number(0.001, above=True),
        "decay_norm": flag(False),
    },
}

_FACTOR = {"warmup_epochs": number(0.0), "base_batch_size": count(None)}

#: Options of `ensemble.train.lr_schedulers`.
SCHEDULES: Table = {
    "constant": _FACTOR,
    "damped": {"gamma": number(1.0, above=True)},
    "capped_linear": {"gamma": number(1.0, above=True)},
    "polynomial": {**_FACTOR, "power": number(2.0, above=True), "end": number(0.0, below=1)},
    "cosine": {**_FACTOR, "end": number(0.0, below=1)},
    "step": {
        **_FACTOR,
        "milestones": numbers([]),
        "every_epochs": number(None, above=True),
        "gamma": number(0.1, above=True),
    },
}


def _group(default: int) -> Option:
    """How many values share a scale."""
    return power_of_two(default, 32, 65536)


_SMALL = {"min_size": count(10_000)}
_QSGD = {"norm": one_of("max", "l2"), "error_feedback": flag(False), **_SMALL}
_CAST = {"error_feedback": flag(False), **_SMALL}

#: Options of `ensemble.comm.codecs` and of the exchange; tensors of fewer than `min_size` values travel in fp32.
COMPRESSIONS: Table = {
    "none": {},
    "fp16": _CAST,
    "bf16": _CAST,
    "qsgd2": {"bucket": _group(128), **_QSGD},
    "qsgd4": {"bucket": _group(512), **_QSGD},
    "qsgd8": {"bucket": _group(512), **_QSGD},
    "onebit": {
        "column": _group(64),
        "threshold": one_of("mean", "zero"),
        "error_feedback": flag(True),
        **_SMALL,
    },
    "powersgd": {"rank": count(4), "error_feedback": flag(True), **_SMALL},
    "auto": _SMALL,
}

_FUSION = {"bucket_bytes": count_or("auto", 4 * 2**20)}
_GROUPS = {"backend": one_of("torch", "horovod"), "group_size": count(None)}

#: Options of `ensemble.comm.autotune.communicator`.
COMMUNICATORS: Table = {
    "torch": _FUSION,
    "horovod": _FUSION,
    "hierarchical": {**_GROUPS, **_FUSION},
    "hybrid": {**_GROUPS, **_FUSION},
}


_HALVING = {"min_resource": count(1)}

#: Options of a search's pruner; a resource is an epoch.
PRUNERS: Table = {
    "hyperband": {**_HALVING, "reduction_factor": count(3, 2)},
    "asha": {**_HALVING, "reduction_factor": count(4, 2)},
    "median": {"startup_trials": count(5, 0), "warmup_epochs": count(0, 0), "interval_epochs": count(1)},
    "patience": {
        "epochs": count(3),
        "min_delta": number(0.0),
        "around": one_of("none", "hyperband", "asha", "median"),
    },
    "none": {},
}

#: Options of a search's objective.
OBJECTIVES: Table = {"metric": {}, "gain": {"metric": one_of("nll", "accuracy", "brier")}}


def resolve(where: str, given: object, table: Table) -> dict[str, Any]:
    """The choice with all its options, `{"name": ..., option: value, ...}`, as JSON values.

    Raises:
        SpecError: there is no such name or option, or a value is wrong.
    """
    if isinstance(given, Mapping):
        options = json_value(where, given)
        if "name" not in options:
            raise SpecError(f"{where} needs a 'name' (valid: {', '.join(table)}), got {dict(given)!r}")
        name = options.pop("name")
    else:
        name, options = given, {}
    if not isinstance(name, str):
        function = "; a function goes into the Recipe" if callable(name) else ""
        raise SpecError(f"{where} must be a name ({', '.join(table)}) or a dict of it and options{function}")
    if name not in table:
        raise SpecError(unknown_name(f"{where} cannot be", name, list(table)))
    known = table[name]
    for option, value in options.items():
        if option not in known:
            if not known:
                raise SpecError(f"{where}: {name!r} has no options, got {option!r}")
            raise SpecError(unknown_name(f"{where}: {name!r} has no option", option, list(known)))
        if value is not None or known[option].default is not None:
            known[option].check(f"{where}[{option!r}]", value)
    chosen = {"name": name, **{option: options.get(option, known[option].default) for option in known}}
    trouble = _contradiction(chosen)
    if trouble is not None:
        raise SpecError(f"{where}: {trouble}")
    return chosen


def _contradiction(chosen: Mapping[str, Any]) -> str | None:
    """Why options that are valid each cannot be together."""
    if chosen.get("nesterov") and not chosen["momentum"]:
        return "nesterov=True needs a momentum above 0"
    if chosen.get("milestones") and chosen["every_epochs"] is not None:
        return "give milestones or every_epochs, not both"
    l2_remembered = chosen.get("norm") == "l2" and chosen["error_feedback"]
    # From 1 on residuals grow from step to step.
    if l2_remembered and qsgd_variance(int(chosen["name"].removeprefix("qsgd")), chosen["bucket"]) >= 1:
        return "error_feedback with norm='l2' and so few bits grows without bound: take norm='max'"
    return None


def qsgd_variance(bits: int, bucket: int) -> float:
    """The bound on QSGD's mean squared error over the squared Euclidean norm (Alistarh et al. 2017)."""
    levels = (1 << (bits - 1)) - 1
    return min(bucket / levels**2, math.sqrt(bucket) / levels)


def with_hyperparameters(where: str, given: Word, table: Table, params: Mapping[str, Any]) -> dict[str, Any]:
    """`resolve`, where a hyperparameter of an option's name takes the option's place.

    Raises:
        SpecError: as `resolve` does, also for a hyperparameter's value.
    """
    options = resolve(where, given, table)
    taken = {option: params[option] for option in table[options["name"]] if option in params}
    return resolve(where, {**options, **taken}, table)
