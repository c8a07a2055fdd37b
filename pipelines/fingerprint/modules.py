"""Tells the user's modules, classes and functions from installed ones."""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

from pipelines.fingerprint.instructions import get_closure
from pipelines.fingerprint.ours import OURS


def is_foreign(module: str | None, file: object) -> bool:
    """Whether a module belongs to ray-ensemble, Python or an installed package.

    By its file, where there is one: a file of the user's may have the name of a module of Python's.
    """
    top = str(module or "").partition(".")[0]
    if top not in OURS and isinstance(file, str) and not file.startswith("<"):
        return _is_installed(file)
    return top in OURS or top in sys.stdlib_module_names or top == "builtins"


@functools.lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    path = Path(file)
    is_package = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return is_package or path.is_relative_to(sysconfig.get_paths()["stdlib"])


def is_foreign_module(module: types.ModuleType) -> bool:
    """As `is_foreign`, of a module object."""
    return is_foreign(module.__name__, getattr(module, "__file__", None))


def is_foreign_class(cls: type) -> bool:
    """As `is_foreign`, of a class."""
    return is_foreign(cls.__module__, file_of(cls))


def is_foreign_function(function: types.FunctionType) -> bool:
    """As `is_foreign`, of a function: by its code, as `functools.wraps` gives it the name of what it wraps."""
    file, module = function.__code__.co_filename, str(function.__globals__.get("__name__"))
    if file.startswith("<"):  # it was generated
        file = function.__globals__.get("__file__", file)
    return is_foreign(module, file) or module.startswith("namedtuple_")


def may_be_patch(value: Any) -> bool:
    """Whether a user may have put it into an installed package's module: a value, or what holds a user's code."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, functools.partial)):
        return True
    if isinstance(value, types.MethodType):
        return may_be_patch(value.__func__) or may_be_patch(value.__self__)
    if isinstance(value, functools._lru_cache_wrapper):
        return may_be_patch(value.__wrapped__)
    if isinstance(value, types.FunctionType):
        return not is_foreign_function(value) or any(map(is_patch, get_closure(value).values()))
    return not is_foreign_class(value if isinstance(value, type) else type(value))


def is_patch(item: Any) -> bool:
    """Whether what is in a class or function of an installed package is a function of a user's."""
    if not isinstance(item, types.FunctionType) or is_foreign_function(item):
        return False
    is_generated = item.__code__.co_filename.startswith("<")
    return not is_generated or item.__globals__.get("__name__") == "__main__"


def name_of(module: types.ModuleType) -> str:
    """As `module_name`, of a module object."""
    return module_name(module.__name__, getattr(module, "__file__", None))


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
