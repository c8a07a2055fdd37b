"""The state of objects without what differs between processes, or follows from the rest."""

from __future__ import annotations

import collections.abc
import functools
import io
import random
import sys
import types
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from pipelines.fingerprint import modules

_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)


def join_state(state: Any) -> dict[str, Any]:
    """The attributes in the default state of an object, those in slots included; empty for another state."""
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    return {name: each for part in parts if isinstance(part, dict) for name, each in part.items()}


def is_handle(value: Any) -> bool:
    """Whether it is an installed package's object that cannot be copied: an open file, a lock, a connection."""
    is_stream = isinstance(value, collections.abc.Iterator) and not isinstance(value, io.IOBase)
    if is_stream or not modules.is_foreign_class(type(value)):
        return False
    try:
        value.__reduce_ex__(4)
    except Exception:
        return True
    return False


def number_hooks(held: dict[str, Any]) -> dict[str, Any]:
    """The state of a torch module with its hooks numbered from 0, and not by how many the process has made."""
    hooks = {name: each for name, each in held.items() if "_hooks" in name and isinstance(each, dict)}
    keys = sorted({key for each in hooks.values() for key in each if type(key) is int})
    numbers = {key: number for number, key in enumerate(keys)}
    for name, each in hooks.items():
        hooks[name] = {numbers.get(key, key): hook for key, hook in each.items()}
    return {**held, **hooks} if keys else held


def find_torch() -> Any:
    """The module, if it is imported; while another thread imports it no value can be one of its objects."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "nn") else None  # of what is used here it is what comes last


def drop_accidents(value: Any, held: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an installed package's object without what differs in each process.

    Those are the order of a table of its own methods, which Albumentations fills from a set, and the address that
    scikit-learn's vectorizers keep of their stop words.
    """

    def is_own(each: Any) -> bool:
        return isinstance(each, types.FunctionType) or getattr(each, "__self__", None) is value

    def sort(table: Any) -> Any:
        is_table = type(table) is dict and all(type(name) is str and is_own(each) for name, each in table.items())
        return dict(sorted(table.items())) if is_table else table

    return {name: sort(each) for name, each in held.items() if name != "_stop_words_id"}


def is_generator(value: Any) -> bool:
    """Whether it makes random numbers."""
    torch = find_torch()
    return isinstance(value, _GENERATORS) or (torch is not None and isinstance(value, torch.Generator))


def without(held: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in held.items() if name not in names}


def drop_cached(kind: type, held: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an object without what `functools.cached_property` keeps there, which follows from the rest."""
    cached = {
        name
        for base in kind.__mro__
        for name, item in vars(base).items()
        if isinstance(item, functools.cached_property)
    }
    return without(held, cached)
