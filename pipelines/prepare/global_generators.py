"""The global generators of Python, numpy and torch: seeded for stages that declare it, watched for all others.

A sample is a function of pipeline, epoch and index. A draw from a global generator depends on earlier draws, so
each process and each run would make other samples of the same record. Such a draw is detected by comparing the
states of the generators before and after each stage; generators that a stage holds itself are compared with them
(see `own_generators`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import random
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from typing import Any

import numpy as np

from pipelines.prepare import own_generators

TORCH = "torch's global generator"
PYTHON, NUMPY = "Python's random", "numpy's global generator"
#: What a stage declares, `Stage.random` -> the global generators that are seeded before each of its calls.
SEEDED: dict[str | None, frozenset[str]] = {
    "torch": frozenset((TORCH,)),
    "python": frozenset((PYTHON, NUMPY)),
    "global": frozenset((PYTHON, NUMPY, TORCH)),
}

_MT19937_BYTES = 4 * 624 + 4  # of numpy and Python: its 624 words, and the place in them

States = dict[str, Any]
Own = Mapping[str, Any]

# Held while states are set, drawn from or compared: draws of another thread would change a sample, or be noticed.
_lock = threading.RLock()


def _renew_lock() -> None:
    """Replace the lock in a forked child: a thread that held it does not exist there."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def read_states(names: Collection[str] | None = None, own: Own | None = None) -> States:
    """Returns the state of each global generator, or of those named; torch's only if torch has been imported.

    Args:
        names: of global generators; by default all.
        own: name -> generator of further ones to be read (`own_generators.find_generators`).
    """
    found: States = {}
    if names is None or PYTHON in names:
        found[PYTHON] = random.getstate()
    if names is None or NUMPY in names:
        found[NUMPY] = np.random.get_state(legacy=False)
    torch = _get_torch() if names is None or TORCH in names else None
    if torch is not None:
        found[TORCH] = torch.get_rng_state()
    for name, generator in (own or {}).items():
        found[name] = own_generators.read_state(generator)
    return found


def read_marks(names: Set[str], own: Own) -> States:
    """As `read_states`, in a fraction of the time: what differs if a state does, and cannot be set.

    A draw of numpy that only uses up the second of a pair of Gaussian numbers does not show.
    """
    found = read_states(names - {PYTHON, NUMPY, TORCH}, own)
    if PYTHON in names:
        found[PYTHON] = _read_python_mark()
    if NUMPY in names:
        found[NUMPY] = _read_numpy_mark()
    torch = _get_torch() if TORCH in names else None
    if torch is not None:
        found[TORCH] = torch.get_rng_state().numpy().tobytes()
    return found


def seed_for_sample(kind: str, generator: np.random.Generator) -> None:
    """Seeds the global generators that a stage declares, from the generator of its sample.

    Args:
        kind: `Stage.random`, a key of `SEEDED`.
        generator: of the sample and stage.
    """
    seeded = SEEDED[kind]
    if PYTHON in seeded:
        random.seed(int(generator.integers(1 << 63)))
        np.random.seed(generator.integers(1 << 32, size=4, dtype=np.uint32))
    if TORCH in seeded:
        import torch

        # The default CPU generator alone: torch.manual_seed would reseed the devices of a training process too.
        torch.default_generator.manual_seed(int(generator.integers(1 << 63)))


def lock_generators() -> threading.RLock:
    """The lock to be held by a thread that uses the global generators."""
    return _lock


@contextlib.contextmanager
def preserve_states(names: Collection[str] | None = None, own: Own | None = None) -> Iterator[None]:
    """Locks the global generators, and restores the states of those named on exit (by default of all).

    Args:
        names: of global generators; with none, and no `own`, nothing is locked.
        own: name -> further generator to be restored.
    """
    if names is not None and not names and not own:
        yield
        return
    if names is not None and TORCH in names:
        import torch  # noqa: F401  # its state is then read below
    with lock_generators():
        before = read_states(names, own)
        try:
            yield
        finally:
            _restore(before, own or {})


def _restore(states: States, own: Own) -> None:
    for name, state in states.items():
        if name == PYTHON:
            random.setstate(state)
        elif name == NUMPY:
            np.random.set_state(state)
        elif name == TORCH:
            _get_torch().set_rng_state(state)
        else:
            own_generators.set_state(own[name], state)


def find_changes(before: States, after: States) -> set[str]:
    """Returns the names of the generators whose states differ, or that are new."""
    return {name for name, state in after.items() if name not in before or not _is_equal(before[name], state)}


def find_draws(call: Callable[[], Any], own: Own | None = None) -> set[str]:
    """Returns the names of the generators that a call draws from without seeding them first."""
    ends = []
    for _ in range(2):
        advance(None, own or {})
        before = read_states(own=own)
        call()
        ends.append((before, read_states(own=own)))
    touched = set().union(*(find_changes(*end) for end in ends))
    return touched & find_changes(ends[0][1], ends[1][1])


def advance(names: Collection[str] | None, own: Own) -> None:
    """Advances each of the generators that `read_states` would read to another state."""
    if names is None or PYTHON in names:
        random.random()
    if names is None or NUMPY in names:
        np.random.random()
    torch = _get_torch() if names is None or TORCH in names else None
    if torch is not None:
        torch.rand(())
    for generator in own.values():
        own_generators.advance(generator)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(value, other[key]) for key, value in one.items())
    if hasattr(one, "numpy"):
        one, other = one.numpy(), other.numpy()
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


def _read_python_mark() -> Any:
    """The memory of Python's global generator, and its second Gaussian number; else its state."""
    generator: Any = getattr(random.random, "__self__", None)
    if type(generator) is random.Random and _is_python_known():
        memory = ctypes.string_at(id(generator) + object.__basicsize__, _MT19937_BYTES)
        return memory, vars(generator).get("gauss_next")
    return random.getstate()


@functools.cache
def _is_python_known() -> bool:
    """Whether Python's generator has its place, then its 624 words, in memory (CPython: _randommodule.c)."""
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < object.__basicsize__ + _MT19937_BYTES:
        return False
    generator = random.Random(1)
    generator.getrandbits(96)
    *words, place = generator.getstate()[1]
    expected = np.array([place, *words], np.uint32).tobytes()
    return ctypes.string_at(id(generator) + object.__basicsize__, _MT19937_BYTES) == expected


def _read_numpy_mark() -> Any:
    """The memory of numpy's global generator; its state where that cannot be read."""
    bits = np.random.mtrand.get_bit_generator()
    if type(bits) is np.random.MT19937 and _is_mt19937_known():
        return ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)
    return np.random.get_state(legacy=False)


@functools.cache
def _is_mt19937_known() -> bool:
    """Whether numpy's MT19937 has its 624 words, then the place in them, in memory (numpy/random: mt19937.h)."""
    bits = np.random.MT19937(1)
    bits.random_raw(3)
    state: Any = bits.state["state"]
    expected = state["key"].astype(np.uint32).tobytes() + np.int32(state["pos"]).tobytes()
    return bool(ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES) == expected)


def _get_torch() -> Any:
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "get_rng_state") else None  # it may be under way to being imported
