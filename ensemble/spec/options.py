"""Options that are chosen by name: `optimizer="lars"`, or `optimizer={"name": "lars", "momentum": 0.95}`.

`resolve` fills in all defaults; a member's identity records the result, so that a later change of a default does
not change how a recorded member trains.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ensemble.spec.validation import (
    SpecError,
    as_json_value,
    check_choice,
    check_number,
    unknown_name,
)
from pipelines.providers import Providers

#: A name, or a dict of the name and options.
NamedOptions = str | Mapping[str, Any]
#: `validator(where, value)` raises SpecError for an invalid value.
Validator = Callable[[str, Any], object]


@dataclass(frozen=True)
class Option:
    """An option's default value and its validator, which is not called for a default of None."""

    default: Any
    check: Validator


OptionTable = Mapping[str, Mapping[str, Option]]


def check_fields(owner: Any, options: Mapping[str, Option]) -> None:
    """Check fields of an option class, each by itself; None is valid where it is the field's default.

    Raises:
        SpecError: one is invalid.
    """
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        if field.name in options and (value is not None or field.default is not None):
            options[field.name].check(f"{type(owner).__name__}.{field.name}", value)


def number(default: float | None, low: float = 0.0, *, above: bool = False, below: float | None = None) -> Option:
    """A finite number of at least `low` (above it with `above`), and below `below`."""
    return Option(default, functools.partial(check_number, low=low, above=above, below=below))


def count(default: int | None, low: int = 1) -> Option:
    """An integer of at least `low`."""
    return Option(default, functools.partial(check_number, low=low, integer=True))


def one_of(default: str, *valid: str) -> Option:
    """One of several names."""
    return Option(default, functools.partial(check_choice, valid=(default, *valid)))


def flag(default: bool) -> Option:
    """True or False."""
    return Option(default, functools.partial(_check_type, types=bool, what="True or False"))


def _check_type(where: str, value: Any, types: type, what: str) -> None:
    if not isinstance(value, types):
        raise SpecError(f"{where} must be {what}, got {value!r}")


def numbers(default: list[float], length: int | None = None, *, below: float | None = None) -> Option:
    """A list of finite numbers of at least 0, and below `below`."""

    def check(where: str, value: Any) -> None:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise SpecError(f"{where} must be a list of {f'{length} ' if length else ''}numbers, got {value!r}")
        for i, item in enumerate(value):
            check_number(f"{where}[{i}]", item, low=0, below=below)

    return Option(default, check)


def names() -> Option:
    """A list of names; by default none."""

    def check(where: str, value: Any) -> None:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise SpecError(f"{where} must be a list of names, got {value!r}")

    return Option([], check)


def count_or_name(name: str, default: str | int) -> Option:
    """An integer of at least 1, or one name."""

    def check(where: str, value: Any) -> None:
        if isinstance(value, str) and value != name:
            raise SpecError(f"{where} must be an integer or {name!r}, got {value!r}")
        if value != name:
            check_number(where, value, low=1, integer=True)

    return Option(default, check)


def _bucket_size(default: int) -> Option:
    """Number of values that share a scale."""

    def check(where: str, value: Any) -> None:
        if type(value) is not int or not 32 <= value <= 65536 or value & (value - 1):
            raise SpecError(f"{where} must be a power of two from 32 to 65536, got {value!r}")

    return Option(default, check)


_LR = {"lr": number(None, above=True)}
_DECAY_ALL = {"decay_norm": flag(True)}
_ADAM = {**_LR, "betas": numbers([0.9, 0.999], 2, below=1), "eps": number(1e-8)}

#: Options of `ensemble.train.optimizers`. A hyperparameter with the name of an option overrides it.
OPTIMIZERS: OptionTable = {
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
_LAW = {**_FACTOR, "gamma": number(1.0, above=True), "max_lr": number(0.1, above=True)}

#: Options of `ensemble.train.lr_schedulers`.
SCHEDULES: OptionTable = {
    "constant": _FACTOR,
    "damped": {**_LAW, "n0": number(100.0, above=True)},
    "capped_linear": _LAW,
    "polynomial": {**_FACTOR, "power": number(2.0, above=True), "end": number(0.0, below=1)},
    "cosine": {**_FACTOR, "end": number(0.0, below=1)},
    "cyclic": {**_FACTOR, "cycle_epochs": number(10.0, above=True), "end": number(0.0, below=1)},
    "step": {
        **_FACTOR,
        "milestones": numbers([]),
        "every_epochs": number(None, above=True),
        "gamma": number(0.1, above=True),
    },
}


_MIN_SIZE = {"min_size": count(10_000)}
_CAST = {"error_feedback": flag(False), **_MIN_SIZE}
_QSGD = {"norm": one_of("max", "l2"), **_CAST}

#: What makes a codec of its options, and what connects the ranks of a member.
CODECS = Providers(
    "codecs",
    {
        "fp16": "ensemble.comm.codecs.casts:Cast",
        "bf16": "ensemble.comm.codecs.casts:Cast",
        **{f"qsgd{bits}": "ensemble.comm.codecs.qsgd:make_qsgd" for bits in (2, 4, 8, 16)},
        "onebit": "ensemble.comm.codecs.onebit:make_onebit",
    },
)
BACKENDS = Providers(
    "communicators", {"torch": "ensemble.comm.torch_dist:connect", "horovod": "ensemble.comm.horovod:connect"}
)

#: Options of `ensemble.comm.codecs`; tensors of fewer than `min_size` values are exchanged in fp32.
COMPRESSIONS: OptionTable = {
    "none": {},
    "fp16": _CAST,
    "bf16": _CAST,
    "qsgd2": {"bucket": _bucket_size(128), **_QSGD},
    "qsgd4": {"bucket": _bucket_size(512), **_QSGD},
    "qsgd8": {"bucket": _bucket_size(512), **_QSGD},
    "qsgd16": {"bucket": _bucket_size(8192), **_QSGD},
    "onebit": {
        "column": count_or_name("tensor", 64),
        "threshold": one_of("mean", "zero"),
        "error_feedback": flag(True),
        **_MIN_SIZE,
    },
    "powersgd": {"rank": count(4), "error_feedback": flag(True), **_MIN_SIZE},
}

_FUSION = {"bucket_bytes": count(4 * 2**20)}
_GROUPS = {"backend": one_of("torch", "horovod"), "group_size": count(None)}

#: Options of `ensemble.comm.exchange_plan.open_communicator`.
COMMUNICATORS: OptionTable = {
    "torch": _FUSION,
    "horovod": _FUSION,
    "hierarchical": {**_GROUPS, **_FUSION},
    "hybrid": {**_GROUPS, **_FUSION},
}

#: Of a name that another distribution provides: its table, and the options that the exchange itself has.
_FOREIGN = ((COMPRESSIONS, CODECS, _CAST), (COMMUNICATORS, BACKENDS, _FUSION))


def resolve(where: str, declared: object, table: OptionTable) -> dict[str, Any]:
    """The name and all its options, `{"name": ..., option: value, ...}`, as JSON values.

    Args:
        where: what is resolved, for error messages (`Ensemble.optimizer`).
        declared: a name, or a dict of a name and options.
        table: the valid names with their options.

    Raises:
        SpecError: there is no such name or option, or a value is invalid.
    """
    if isinstance(declared, Mapping):
        options = as_json_value(where, declared)
        if "name" not in options:
            raise SpecError(f"{where} needs a 'name' (valid: {', '.join(table)}), got {dict(declared)!r}")
        name = options.pop("name")
    else:
        name, options = declared, {}
    if not isinstance(name, str):
        function = "; a function goes into the Recipe" if callable(name) else ""
        raise SpecError(f"{where} must be a name ({', '.join(table)}) or a dict of it and options{function}")
    if name not in table:
        for ours, types, shared in _FOREIGN:
            if ours is table and types.find(name) is not None:
                return {"name": name, **{option: value.default for option, value in shared.items()}, **options}
        raise SpecError(unknown_name(f"{where} cannot be", name, list(table)))
    valid = table[name]
    for option, value in options.items():
        if option not in valid:
            if not valid:
                raise SpecError(f"{where}: {name!r} has no options, got {option!r}")
            raise SpecError(unknown_name(f"{where}: {name!r} has no option", option, list(valid)))
        if value is not None or valid[option].default is not None:
            valid[option].check(f"{where}[{option!r}]", value)
    resolved = {"name": name, **{option: options.get(option, valid[option].default) for option in valid}}
    contradiction = _find_contradiction(resolved)
    if contradiction is not None:
        raise SpecError(f"{where}: {contradiction}")
    return resolved


def _find_contradiction(options: Mapping[str, Any]) -> str | None:
    """Why options that are each valid cannot be combined; None where they can."""
    if options.get("nesterov") and not options["momentum"]:
        return "nesterov=True needs a momentum above 0"
    if options.get("milestones") and options["every_epochs"] is not None:
        return "give milestones or every_epochs, not both"
    l2_feedback = options.get("norm") == "l2" and options["error_feedback"]
    # From a variance of 1 on the remaining error grows from step to step.
    if l2_feedback and qsgd_variance(int(options["name"].removeprefix("qsgd")), options["bucket"]) >= 1:
        return "error_feedback with norm='l2' and so few bits grows without bound: take norm='max'"
    return None


def qsgd_variance(bits: int, bucket: int) -> float:
    """The bound on QSGD's mean squared error over the squared Euclidean norm (Alistarh et al. 2017)."""
    levels = (1 << (bits - 1)) - 1
    return min(bucket / levels**2, math.sqrt(bucket) / levels)


def resolve_with_hyperparameters(
    where: str, declared: NamedOptions, table: OptionTable, params: Mapping[str, Any]
) -> dict[str, Any]:
    """`resolve`, with hyperparameters overriding the options of the same name.

    Raises:
        SpecError: as `resolve` does, also for a hyperparameter's value.
    """
    options = resolve(where, declared, table)
    overrides = {option: params[option] for option in table.get(options["name"], ()) if option in params}
    return resolve(where, {**options, **overrides}, table)


#: Named options of an `Ensemble` or `Member`, with their tables.
TRAINING_OPTIONS = {
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "compression": COMPRESSIONS,
    "communicator": COMMUNICATORS,
}
# An identity does not record these: they change nothing.
_NO_EFFECT = {"compression": "none", "communicator": "torch"}


def resolve_training_options(
    declared: Mapping[str, Any], functions: Mapping[str, Any] | None, params: Mapping[str, Any], *, partial: bool
) -> dict[str, dict[str, Any] | None]:
    """The named options as a member's identity records them; None for one that changes nothing.

    Args:
        declared: the member's precision, loss scale, epochs and named options.
        functions: its Recipe's functions for "optimizer" and "schedule"; None for a train function.
        params: its hyperparameters.
        partial: whether a search may propose further hyperparameters, so that the learning rate may be missing.

    Raises:
        SpecError: two of them cannot be combined, or a hyperparameter is no valid value of the option it
            overrides.
    """
    options = {name: _resolve_recorded(name, declared[name], functions) for name in TRAINING_OPTIONS}
    if declared["precision"] == "fp32" and declared["loss_scale"] != "dynamic":
        raise SpecError("loss_scale is for the precisions fp16 and bf16, not for fp32")
    optimizer, schedule = options["optimizer"], options["schedule"]
    if optimizer is None and functions is not None and functions["optimizer"] is None:
        # SGD is the default; `make_recipe_optimizer` reports a missing learning rate
        check_hyperparameters(resolve("optimizer", "sgd", OPTIMIZERS), schedule, params, partial=True)
    else:
        check_hyperparameters(optimizer, schedule, params, partial=partial)
    if schedule is not None and schedule.get("warmup_epochs", 0) > declared["epochs"]:
        raise SpecError(
            f"schedule['warmup_epochs'] is {schedule['warmup_epochs']:g}, but the member trains for "
            f"{declared['epochs']} epochs: take a shorter warm-up or more epochs"
        )
    return options


def check_hyperparameters(
    optimizer: Mapping[str, Any] | None,
    schedule: Mapping[str, Any] | None,
    params: Mapping[str, Any],
    *,
    partial: bool,
) -> None:
    """Check the hyperparameters that override options of the optimizer and the schedule.

    Args:
        partial: whether there are further hyperparameters, so that the learning rate may be missing.

    Raises:
        SpecError: a value is invalid, or there is no learning rate.
    """
    if schedule is not None:
        resolve_with_hyperparameters("schedule", schedule, SCHEDULES, params)
    if optimizer is not None:
        arguments = resolve_with_hyperparameters("optimizer", optimizer, OPTIMIZERS, params)
        if arguments["lr"] is None and not partial:
            raise SpecError(f"the optimizer {optimizer['name']!r} needs lr: its option, or a hyperparameter")


def _resolve_recorded(
    name: str, recorded: NamedOptions | None, functions: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    if recorded is None:
        return None
    if name in ("optimizer", "schedule"):
        if functions is None:
            raise SpecError(f"{name}= is for a Recipe; a train function gives its own to member.prepare(...)")
        if functions[name] is not None:
            raise SpecError(f"give {name}= or Recipe.{name}, not both")
    table = TRAINING_OPTIONS[name]
    options = resolve(name, recorded, table)
    return None if name in _NO_EFFECT and options == resolve(name, _NO_EFFECT[name], table) else options
