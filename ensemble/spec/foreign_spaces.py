"""Names the line that was meant by an entry of a search space in the notation of another library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_OURS = "give choice(...), uniform(low, high), loguniform(low, high), integer(low, high), or a fixed value"


def find_meant_dimension(key: str, given: Any) -> str | None:
    """What to write for a list, a nested space, or an entry for W&B, Ray Tune, hyperopt or SciPy.

    Returns:
        None: it is a fixed value.
    """
    from ensemble.spec.search_space import Dimension

    package = type(given).__module__.partition(".")[0]
    if package == "ray":
        return f"write {_translate_ray(given)}"
    if package == "hyperopt":
        return f"write {_translate_hyperopt(given)}"
    if isinstance(given, range):
        return f"write integer({given.start}, {given[-1] if given else given.stop}, step={given.step})"
    if isinstance(given, list | tuple | set | frozenset) or getattr(given, "ndim", 0):
        values = given.tolist() if hasattr(given, "tolist") else list(given)
        shown = ", ".join(map(repr, values)) or "..."
        return f"choice({shown:.60}) tries each of them, choice({values!r:.60},) too; {_OURS}"
    if isinstance(given, Mapping):
        if (line := _translate_wandb(given)) is not None:
            return f"write {line}"
        inner = next((name for name, value in given.items() if isinstance(value, Dimension)), None)
        if inner is not None:
            return (
                f"spaces are not nested: write {key + '.' + str(inner)!r}: {given[inner]} beside the others, "
                f"choice({{...}}, {{...}}) of whole dicts, or a function space(trial) that returns nested dicts"
            )
        return None
    if type(given).__module__ == "builtins" or package == "numpy":
        return None
    return f"{_OURS}, not an object of {package}"


def _translate_wandb(given: Mapping[Any, Any]) -> str | None:
    """W&B's `values`, `min` and `max`, `distribution`."""
    kind = str(given.get("distribution", ""))
    if "values" in given and isinstance(given["values"], list | tuple):
        return f"choice({', '.join(map(repr, given['values']))})"
    if kind == "constant" or given.keys() == {"value"}:
        return repr(given.get("value"))
    if "mu" in given or kind.endswith("normal"):
        return "uniform(low, high): there is no normal distribution"
    if not {"min", "max"} <= given.keys():
        return None if not kind else _OURS.removeprefix("give ")
    low, high, step = given["min"], given["max"], given.get("q")
    if kind in ("log_uniform", "q_log_uniform"):  # of exponents
        return f"loguniform({math.exp(low):.6g}, {math.exp(high):.6g})"
    if "log_uniform" in kind:
        return f"loguniform({low!r}, {high!r})"
    is_integer = kind == "int_uniform" or (not kind and type(low) is int and type(high) is int)
    return _write("integer" if is_integer else "uniform", low, high, step)


def _translate_ray(given: Any) -> str:
    """Ray Tune's domains; its integers end before `upper`."""
    if isinstance(values := getattr(given, "categories", None), list | tuple):
        return f"choice({', '.join(map(repr, values))})"
    sampler = getattr(given, "sampler", None)
    step = getattr(sampler, "q", None)
    sampler = getattr(sampler, "sampler", sampler)
    low, high = getattr(given, "lower", None), getattr(given, "upper", None)
    if low is None or high is None:
        return _OURS.removeprefix("give ")
    is_log = "Log" in type(sampler).__name__
    if type(given).__name__ == "Integer":
        return _write("integer", low, high if step else high - 1, step, log=is_log)
    return f"loguniform({low!r}, {high!r})" if is_log else _write("uniform", low, high, step)


def _translate_hyperopt(given: Any) -> str:
    """hyperopt's expressions; ends of its logarithmic intervals are exponents."""
    if given.name == "switch":
        return f"choice({', '.join(repr(getattr(value, 'obj', '...')) for value in given.pos_args[1:])})"
    while given.name in ("float", "int", "hyperopt_param"):
        given = given.pos_args[-1]
    ends = [getattr(value, "obj", None) for value in given.pos_args]
    if given.name in ("uniform", "quniform", "uniformint"):
        return _write("integer" if given.name == "uniformint" else "uniform", *ends[:3])
    if given.name in ("loguniform", "qloguniform"):
        return f"loguniform({math.exp(ends[0]):.6g}, {math.exp(ends[1]):.6g})"
    if given.name == "randint":
        return _write("integer", ends[0] if len(ends) > 1 else 0, ends[-1] - 1)
    return _OURS.removeprefix("give ")


def _write(kind: str, low: Any, high: Any, step: Any = None, *, log: bool = False) -> str:
    options = f", step={step!r}" if step not in (None, 1) or (step == 1 and kind == "uniform") else ""
    return f"{kind}({low!r}, {high!r}{options}{', log=True' if log else ''})"
