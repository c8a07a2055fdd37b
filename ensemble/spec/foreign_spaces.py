"""Names the line that was meant by an entry of a search space in the notation of W&B, Ray Tune or hyperopt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_OURS = "choice(...), uniform(low, high), loguniform(low, high), integer(low, high), or a fixed value"


def find_nested(key: str, given: Any) -> str | None:
    """What to write for a dict with a space inside; None: it has none."""
    inner = (
        next((name for name, own in given.items() if hasattr(own, "draw")), None)
        if isinstance(given, Mapping)
        else None
    )
    return inner and (
        f"spaces are not nested: write {f'{key}.{inner}'!r}: {given[inner]} beside the others, a choice of whole "
        "dicts without spaces in them, or a function space(trial) that returns nested dicts"
    )


def find_meant_dimension(key: str, given: Any) -> str | None:
    """What to write for a list, a nested space or an object of another library; None: it is a fixed value."""
    package = type(given).__module__.partition(".")[0]
    if (nested := find_nested(key, given)) is not None:
        return nested
    if isinstance(given, range) and given:
        return f"write {_interval(given[0], given[-1], given.step, integer=True)}"
    if isinstance(given, list | tuple | set | range) or getattr(given, "ndim", False):
        values = given.tolist() if hasattr(given, "tolist") else list(given)
        shown = ", ".join(map(repr, values)) or "..."
        is_fixed = isinstance(given, list | tuple)
        fixed = f"choice([{given!r:.60}]) is this one fixed {type(given).__name__}" if is_fixed else ""
        return f"choice({shown:.60}) tries each of them; {fixed or f'else give {_OURS}'}"
    reader = _READERS.get("wandb" if isinstance(given, Mapping) else package)
    if reader is None:
        return None if package in ("builtins", "numpy") else f"give {_OURS}"
    try:
        line = reader(given)
    except (AttributeError, TypeError):
        line = _OURS
    return line and f"write {line}"


def _interval(low: Any, high: Any, step: Any = None, *, log: bool = False, integer: bool = False) -> str:
    if log and not integer:
        return f"loguniform({low!r}, {high!r})"
    options = f", step={step!r}" if step and (step != 1 or not integer) else ", log=True" if log else ""
    return f"{'integer' if integer else 'uniform'}({low!r}, {high!r}{options})"


def _choice(values: Any) -> str:
    return f"choice({', '.join(map(repr, values))})"


def _read_wandb(given: Mapping[Any, Any]) -> str | None:
    kind = str(given.get("distribution", ""))
    if (values := given.get("values", given.get("grid_search"))) is not None:  # the latter is Ray Tune's
        return _choice(values)
    if "value" in given and given.keys() <= {"value", "distribution"}:
        return repr(given["value"])
    if not {"min", "max"} <= given.keys():
        return _OURS if kind else None
    ends = [given["min"], given["max"]]
    is_integer = kind == "int_uniform" or (not kind and all(type(end) is int for end in ends))
    if kind in ("log_uniform", "q_log_uniform"):  # their ends are exponents
        ends = [float(f"{math.exp(end):.6g}") for end in ends]
    return _interval(ends[0], ends[1], given.get("q"), log="log_uniform" in kind, integer=is_integer)


def _read_ray(given: Any) -> str:
    if hasattr(given, "categories"):
        return _choice(given.categories)
    sampler, is_integer = given.sampler, type(given).__name__ == "Integer"
    step, inner = getattr(sampler, "q", None), getattr(sampler, "sampler", sampler)
    high = given.upper - 1 if is_integer and not step else given.upper  # the end of a range of integers
    return (
        _OURS
        if "Normal" in str(inner)
        else _interval(given.lower, high, step, log="Log" in str(inner), integer=is_integer)
    )


def _read_hyperopt(given: Any) -> str:
    if given.name == "switch":
        return _choice([value.obj for value in given.pos_args[1:]])
    is_integer = False
    while given.name in ("float", "int", "hyperopt_param"):
        is_integer, given = is_integer or given.name == "int", given.pos_args[-1]
    ends = [value.obj for value in given.pos_args]
    if given.name == "randint":
        return _interval(0 if len(ends) < 2 else ends[0], ends[-1] - 1, integer=True)
    if "uniform" in given.name and "log" in given.name:  # their ends are exponents
        return _interval(*(float(f"{math.exp(end):.6g}") for end in ends[:2]), log=True)
    return _interval(*ends, integer=is_integer) if "uniform" in given.name else _OURS


_READERS: Mapping[str, Any] = {"wandb": _read_wandb, "ray": _read_ray, "hyperopt": _read_hyperopt}
