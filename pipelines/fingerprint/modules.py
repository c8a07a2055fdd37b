"""Tells the user's modules from installed ones, and gives what of a module a chain of attributes leads to."""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

from pipelines.fingerprint.ours import OURS

_INSTALLED = frozenset(("site-packages", "dist-packages"))


def is_foreign(module: str | None, file: object) -> bool:
    """Whether a module belongs to ray-ensemble, Python or an installed package."""
    top = str(module or "").partition(".")[0]
    if top in OURS or top in sys.stdlib_module_names or top == "builtins":
        return True
    return isinstance(file, str) and _is_installed(file)


@functools.lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    path = Path(file)
    return not _INSTALLED.isdisjoint(path.parts) or path.is_relative_to(sysconfig.get_paths()["stdlib"])


def is_foreign_module(module: types.ModuleType) -> bool:
    """As `is_foreign`, of a module object."""
    return is_foreign(module.__name__, getattr(module, "__file__", None))


def is_foreign_class(cls: type) -> bool:
    """As `is_foreign`, of a class."""
    return is_foreign(cls.__module__, file_of(cls))


def is_foreign_function(function: types.FunctionType) -> bool:
    """As `is_foreign`, of a function: by its code, as `functools.wraps` gives it the name of what it wraps."""
    return is_foreign(function.__globals__.get("__name__"), function.__code__.co_filename)


def module_name(name: str | None, file: object) -> str:
    """A module's name; for a script the name of its file, as in modules that import it."""
    return Path(file).stem if name == "__main__" and isinstance(file, str) else str(name)


def folder_of(file: object) -> str:
    """The folder of a file; an empty string where there is no file."""
    return str(Path(file).parent) if isinstance(file, str) else ""


def file_of(cls: type) -> str | None:
    """The source file of a class, from its methods or from its module."""
    for item in vars(cls).values():
        function = getattr(item, "__func__", getattr(item, "fget", item))
        if isinstance(function, types.FunctionType) and function.__module__ == cls.__module__:
            return str(function.__globals__.get("__file__", function.__code__.co_filename))
    return getattr(sys.modules.get(cls.__module__), "__file__", None)


def resolve(chain: tuple[str, ...], value: Any) -> tuple[int, Any]:
    """Follows a chain of attributes for as long as it leads through modules.

    Args:
        chain: the names; the first is that of `value`.

    Returns:
        How many names were followed, and what they lead to. A module where the chain ends in one.

    Raises:
        AttributeError: a module has no such attribute now.
    """
    followed = 1
    while isinstance(value, types.ModuleType) and followed < len(chain):
        value = getattr(value, chain[followed])
        followed += 1
    return followed, value
