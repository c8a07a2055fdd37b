"""Private API of Optuna, used nowhere else; `tests/test_compat.py` fails for a version not in `CHECKED_WITH`."""

from __future__ import annotations

import contextlib
import importlib
import random
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

CHECKED_WITH = ("4.5.0", "5.0.0")


def import_optuna() -> None:
    """Import Optuna in a thread of its own.

    Its module for Redis keeps the error of an import that failed, with every frame of the stack. In the caller's
    thread these would be the frames of a run and of the user's program, whose arrays stay in memory with them.

    Unnecessary with: an `optuna._imports` that keeps no traceback.
    """
    thread = threading.Thread(target=importlib.import_module, args=("optuna",), name="import optuna")
    thread.start()
    thread.join()


@contextlib.contextmanager
def silence_optuna() -> Iterator[None]:
    """Suppress Optuna's messages about new studies on stderr."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def without_constraints(attrs: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a trial without its constraints, which Optuna sets but never changes.

    Unnecessary with: a `Trial.set_constraint` that replaces one.
    """
    from optuna.study._constrained_optimization import _CONSTRAINTS_KEY

    return {key: value for key, value in attrs.items() if not key.startswith(_CONSTRAINTS_KEY)}


def find_generators(sampler: BaseSampler) -> tuple[list[Any], bool]:
    """The generators of random numbers in a sampler, in a fixed order, and whether all its samplers are Optuna's.

    `LazyRandomState` is the generator of most: it is made when it is first used. No public method seeds a sampler:
    `reseed_rng` takes entropy of the system.

    Unnecessary with: a sampler that is seeded anew by a given number.
    """
    from optuna.samplers._lazy_random_state import LazyRandomState

    generators: list[Any] = []
    seen: dict[int, Any] = {}
    waiting: list[Any] = [sampler]
    while waiting:
        part = waiting.pop(0)
        if id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, LazyRandomState | np.random.RandomState | np.random.Generator | random.Random):
            generators.append(part)
        elif isinstance(part, list | tuple):
            waiting += part
        elif part is sampler or type(part).__module__.startswith("optuna"):
            waiting += [value for _, value in sorted(getattr(part, "__dict__", {}).items())]
    parts = [part for part in seen.values() if hasattr(part, "sample_relative")]
    return generators, all(type(part).__module__.startswith("optuna") for part in parts)


def seed_generator(generator: Any, seed: int) -> None:
    """Seed one of `find_generators`."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        getattr(generator, "rng", generator).seed(seed)


def draw_number(generator: Any) -> int:
    """A number that follows from the state of one of `find_generators`; 0 where it was given no seed."""
    if getattr(generator, "_rng", generator) is None:
        return 0
    generator = getattr(generator, "rng", generator)
    if isinstance(generator, random.Random):
        return generator.getrandbits(31)
    draw = generator.integers if isinstance(generator, np.random.Generator) else generator.randint
    return int(draw(2**31))
