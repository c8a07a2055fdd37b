"""Detects unseeded randomness: draws from the global generators of Python, numpy and torch.

A sample is a function of pipeline, epoch and index. A draw from a global generator depends on earlier draws, so
each process and each run would make other samples of the same record. Such a draw is detected by comparing the
states of the generators before and after each stage.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

TORCH = "torch's global generator"
_PYTHON, _NUMPY = "Python's random", "numpy's global generator"

States = dict[str, Any]

# Held while states are set, drawn from or compared: draws of another thread would change a sample, or be noticed.
_lock = threading.RLock()


def _renew_lock() -> None:
    """Replace the lock in a forked child: a thread that held it does not exist there."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def read_states() -> States:
    """Returns the state of each global generator; torch's only if torch has been imported."""
    found: States = {_PYTHON: random.getstate(), _NUMPY: np.random.get_state(legacy=False)}
    torch = _get_torch()
    if torch is not None:
        found[TORCH] = torch.get_rng_state()
    return found


def lock_generators() -> threading.RLock:
    """The lock to be held by a thread that uses the global generators."""
    return _lock


@contextlib.contextmanager
def preserve_states() -> Iterator[None]:
    """Locks the global generators, and restores their states on exit."""
    with lock_generators():
        before = read_states()
        try:
            yield
        finally:
            random.setstate(before[_PYTHON])
            np.random.set_state(before[_NUMPY])
            if TORCH in before:
                _get_torch().set_rng_state(before[TORCH])


def find_changes(before: States, after: States) -> set[str]:
    """Returns the names of the generators whose states differ, or that are new."""
    return {name for name, state in after.items() if name not in before or not _is_equal(before[name], state)}


def find_draws(call: Callable[[], Any]) -> set[str]:
    """Returns the names of the generators that a call draws from without seeding them first."""
    ends = []
    for _ in range(2):
        _advance()
        before = read_states()
        call()
        ends.append((before, read_states()))
    touched = set().union(*(find_changes(*end) for end in ends))
    return touched & find_changes(ends[0][1], ends[1][1])


def _advance() -> None:
    """Advances each generator to another state."""
    random.random()
    np.random.random()
    torch = _get_torch()
    if torch is not None:
        torch.rand(())


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(value, other[key]) for key, value in one.items())
    if hasattr(one, "numpy"):
        one, other = one.numpy(), other.numpy()
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


def _get_torch() -> Any:
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "get_rng_state") else None  # it may be under way to being imported
