"""The user's modules in a process that has a declaration: what it holds of them is found by their names.

A member, and what it spawns, can thus pickle by name, as a program of its own can: `DataLoader` does with
`multiprocessing_context="spawn"`. What the declaration does not hold is read from the module's file.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Mapping
from typing import Any

#: Module -> what a declaration holds of it, by name, and where it is from.
Modules = Mapping[str, Mapping[str, Any]]


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        del sys.modules[self.__name__]
        try:
            read = importlib.import_module(self.__name__)
        finally:
            sys.modules[self.__name__] = self
        for other, value in vars(read).items():
            vars(self).setdefault(other, value)
        if name not in vars(self):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return vars(self)[name]


def enter(modules: Modules, spawned: str) -> None:
    """Let this process find them by name; what it spawns begins with the module `spawned`."""
    import cloudpickle

    _enter_main({**modules.get("__main__", {})}, spawned)
    for name, part in modules.items():
        if name == "__main__":
            continue
        module = sys.modules[name] = _Module(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=part.get("__file__"))
        vars(module).update(part)
        cloudpickle.register_pickle_by_value(module)  # workers of pipelines do not import it


def _enter_main(part: dict[str, Any], spawned: str) -> None:
    main, begun = types.ModuleType("__main__"), sys.modules["__main__"]
    vars(main).update({**part, "_begun": begun})
    main.__spec__ = importlib.machinery.ModuleSpec(spawned, None)
    sys.modules["__main__"] = main
