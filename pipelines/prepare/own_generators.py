"""Finds the random generators that a stage's function holds itself: `self.rng`, a closure's, a module's global.

Nobody seeds them for each sample. Every preparation worker has a copy, which starts where it was pickled, so the
samples would depend on how many workers there are and on what each has prepared before. They are found in order to
be watched beside the global ones.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_DEEPEST = 6  # a generator of a transform in a list of a transform in a list of a stage
_MOST = 2000  # objects to look at, per function
_LONGEST = 64  # items of a list or dict to look at: more are data


def find_generators(call: Any) -> dict[str, Any]:
    """Returns name -> generator of those that a function or object holds, at most a few levels down.

    Found are `numpy.random.Generator` and `RandomState`, `random.Random`, and `torch.Generator`. The global
    ones of Python, numpy and torch are not among them.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    level = [(_name(call), call)]
    for _ in range(_DEEPEST):
        further: list[tuple[str, Any]] = []
        for name, value in level:
            if id(value) in seen or len(seen) >= _MOST:
                continue
            seen.add(id(value))
            if _is_generator(value):
                if not _is_global(value):
                    found[f"{name}, a {type(value).__module__}.{type(value).__name__} of its own"] = value
            else:
                further.extend(_iterate_parts(name, value))
        level = further
    return found


def read_state(generator: Any) -> Any:
    """The state of one of the generators that `find_generators` finds."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Sets a state that `read_state` has read."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def advance(generator: Any) -> None:
    """Advances a generator to another state."""
    if isinstance(generator, np.random.Generator | np.random.RandomState | random.Random):
        generator.random()
    else:
        sys.modules["torch"].rand((), generator=generator)


def _is_generator(value: Any) -> bool:
    if isinstance(value, np.random.Generator | np.random.RandomState):
        return True
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    torch_generator = getattr(sys.modules.get("torch"), "Generator", None)
    return torch_generator is not None and isinstance(value, torch_generator) and value.device.type == "cpu"


def _is_global(generator: Any) -> bool:
    torch = sys.modules.get("torch")
    known = (random.random, np.random.random)
    shared = (*(getattr(draw, "__self__", None) for draw in known), getattr(torch, "default_generator", None))
    return any(generator is each for each in shared)


def _iterate_parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds, each with a name for error messages."""
    if isinstance(value, functools.partial):
        yield from ((name, part) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, types.MethodType):
        yield _name(value.__self__), value.__self__
        yield name, value.__func__
    elif isinstance(value, types.FunctionType):
        for free, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f"{name}'s {free}", cell.cell_contents
            except ValueError:  # empty yet
                continue
        yield from ((name, part) for part in value.__defaults__ or ())
        yield from ((f"{name}'s {key}", part) for key, part in (value.__kwdefaults__ or {}).items())
        names = value.__globals__
        yield from ((key, names[key]) for key in value.__code__.co_names if key in names)
    elif isinstance(value, Mapping):
        if len(value) <= _LONGEST:
            yield from ((name, part) for part in value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        if len(value) <= _LONGEST:
            yield from ((name, part) for part in value)
    elif isinstance(value, types.ModuleType | type) or not isinstance(getattr(value, "__dict__", None), dict):
        return
    else:
        yield from ((f"{_name(value)}.{key}", part) for key, part in vars(value).items())


def _name(value: Any) -> str:
    return str(getattr(value, "__qualname__", None) or type(value).__qualname__)
