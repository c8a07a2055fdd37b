"""Fingerprints the user's code that a run trains with, so that another process or a later day can compare it.

From the functions of a declaration (the recipe or the train function, and the pipelines' stages) on, all code that
they use is visited: functions, classes, closures, defaults, the globals that they read, the modules that they
import. Each is a *part* with a name and a digest, so that a difference can be named.

- A function is digested as its instructions with their constants: without paths, line numbers, comments,
  docstrings and layout of the source.
- A global that these functions write (a cache, a counter, a value loaded at first use) is state, not code: only
  the fact that it is written is included.
- Installed packages and the standard library are assumed to stay the same: their functions and classes are
  included by name, their objects (except torch modules and arrays) by type. A user's function that one of their
  functions wraps, such as a decorator's result, is visited.
- ray-ensemble's own code is included by public name, version and bound values (`pipelines.fingerprint`), so that
  it can be reworded and moved.

Instructions depend on the minor version of Python, which `Code.python` records; `Code.scheme` is the version of
the descriptions. Between two Pythons only names can be compared, between two schemes only parts that are wholly
the user's.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.user_code import instructions
from ensemble.user_code.imports import (
    Imports,
    file_of,
    folder_of,
    is_foreign,
    module_name,
    syntax_of,
    wrapped_functions,
)
from pipelines import fingerprint as prints

if TYPE_CHECKING:
    from ensemble.spec import Ensemble

#: Version of the descriptions. Version 1, which is not recorded, named our own code by its module.
SCHEME = 2
#: The minor version of this Python: instructions of another one cannot be compared, nor run.
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
#: Attributes that Python and torch, not its author, put into a class.
_MACHINERY = prints.MACHINERY | {
    "__name__",
    "__classcell__",
    "_is_protocol",
    "_backward_cls",
    "_autograd_function_id",
}
#: Fields of a Recipe that rank members and do not affect training.
_RANKING = frozenset(("objective", "mode"))
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Code:
    """The fingerprint of a declaration's code.

    Attributes:
        python: the minor version that compiled it, such as "3.12".
        parts: name -> digest, such as "spec.loss".
        sources: name of a user's module -> the file that it was read from, for those that have one.
        scheme: version of the descriptions that are digested.
        ours: names of the parts that refer to ray-ensemble's own code.
    """

    python: str
    parts: Mapping[str, str]
    sources: Mapping[str, Path] = dataclasses.field(default_factory=dict, compare=False)
    scheme: int = SCHEME
    ours: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)

    @property
    def fingerprint(self) -> str:
        """A digest of all parts."""
        return _digest([self.scheme, self.python, dict(self.parts)])

    def incomparable(self, other: Code) -> str | None:
        """Says why another code cannot be compared with this one; None if it can."""
        if self.scheme != other.scheme:
            return "it was recorded by another version of ray-ensemble, which describes code otherwise"
        return "it was another Python's" if self.python != other.python else None

    def changed(self, since: Code) -> list[str]:
        """Names of the parts that differ, are new, or are missing compared with an earlier code, in order of use.

        Parts that refer to ray-ensemble's own code are left out if the schemes differ.
        """
        unknown = self.ours if self.scheme != since.scheme else frozenset[str]()
        now = [name for name, digest in self.parts.items() if since.parts.get(name) != digest]
        return [*(name for name in now if name not in unknown), *(n for n in since.parts if n not in self.parts)]


def code_of(ensemble: Ensemble) -> Code:
    """The code that the members of an ensemble train with."""
    visitor = _visit_ensemble(ensemble, frozenset())
    if visitor.written:  # their values are state, which changes while the code runs
        visitor = _visit_ensemble(ensemble, frozenset(visitor.written))
    return Code(PYTHON, visitor.parts, dict(sorted(visitor.imports.files.items())), ours=frozenset(visitor.ours))


def _visit_ensemble(ensemble: Ensemble, written: frozenset[str]) -> _Visitor:
    visitor, recipe = _Visitor(written), ensemble.recipe
    if dataclasses.is_dataclass(recipe):
        for field in dataclasses.fields(recipe):
            if field.name not in _RANKING and getattr(recipe, field.name) not in (None, ()):
                visitor.add_root(f"Recipe.{field.name}", getattr(recipe, field.name))
    else:
        visitor.add_root("recipe", recipe)
    for split in ("train", "valid", "test", "shifted"):
        pipeline = getattr(ensemble, split)
        if callable(pipeline):
            visitor.add_root(split, pipeline)
        for number, stage in enumerate(getattr(pipeline, "stages", ())):
            visitor.add_root(f"{split} stage {number}", stage.call)
    visitor.finish()
    return visitor


def _digest(description: Any) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]


class _Visitor:
    """Describes values as JSON; each function, class and global of the user's becomes a part of its own."""

    def __init__(self, left_out: frozenset[str] = frozenset()) -> None:
        self.parts: dict[str, str] = {}
        self.ours: set[str] = set()  # parts that refer to ray-ensemble's own code
        self.imports = Imports()
        self.written: set[str] = set()  # globals that the visited code writes, named as parts are
        self._left_out = left_out
        self._keys: dict[int, str] = {}
        self._found: list[Any] = []  # functions and classes; the first `_done` have been visited
        self._done = 0
        self._closures: list[types.FunctionType] = []  # functions of ours that are being described

    def add_root(self, name: str, value: Any) -> None:
        """Describe a function of the declaration, and note what it uses."""
        self._add_part(name, self._describe(value, _Place("")))

    def finish(self) -> None:
        """Describe all functions and classes in use; iterative, because a chain of calls may be long."""
        while self._done < len(self._found):
            value = self._found[self._done]
            self._done += 1
            if isinstance(value, types.FunctionType):
                self._visit_function(value)
            else:
                self._visit_class(value)
        # A module that is imported while a function runs is described by its file.
        for name, path in self.imports.late.items():
            self.parts[f"module {name}"] = syntax_of(path)

    def _add_part(self, name: str, description: Any) -> None:
        self.parts[name] = _digest(description)
        if prints.refers_to_ours(description):
            self.ours.add(name)

    # -- values -------------------------------------------------------------------------------------------------

    def _describe(self, value: Any, at: _Place) -> Any:
        if value is None or value is ... or isinstance(value, bool | int | complex):
            return repr(value) if isinstance(value, complex) or value is ... else value
        if isinstance(value, enum.Enum):
            return ["member", self._describe(type(value), at), value.name]
        if isinstance(value, str):
            return at.make_relative(value)
        if isinstance(value, float):
            return ["float", value.hex()]
        if isinstance(value, bytes | bytearray):
            return ["bytes", hashlib.sha256(value).hexdigest()]
        if isinstance(value, PurePath):
            return ["path", at.make_relative(str(value))]
        if isinstance(value, types.CodeType):
            return instructions.describe_instructions(value, lambda constant: self._describe(constant, at))
        if isinstance(value, types.FunctionType):
            return self._describe_function(value)
        if isinstance(value, type):
            return self._describe_class(value)
        if isinstance(value, types.ModuleType):
            return ["module", module_name(value.__name__, getattr(value, "__file__", None))]
        if any(value is outer for outer in at.inside):
            return ["again", next(i for i, outer in enumerate(at.inside) if outer is value)]
        return self._describe_compound(value, at.within(value))

    def _describe_compound(self, value: Any, at: _Place) -> Any:
        """Describe a value that contains other values."""
        if isinstance(value, tuple | list):
            return [type(value).__name__, *(self._describe(each, at) for each in value)]
        if isinstance(value, dict | types.MappingProxyType):
            items = [[self._describe(k, at), self._describe(v, at)] for k, v in value.items()]
            return ["dict", *sorted(items, key=json.dumps)]
        if isinstance(value, set | frozenset):
            return ["set", *sorted((self._describe(each, at) for each in value), key=json.dumps)]
        if isinstance(value, functools.partial):
            return ["partial", *(self._describe(each, at) for each in (value.func, value.args, value.keywords))]
        if isinstance(value, types.MethodType):
            return ["method", self._describe(value.__func__, at), self._describe(value.__self__, at)]
        if isinstance(value, staticmethod | classmethod):
            return [type(value).__name__, self._describe(value.__func__, at)]
        if isinstance(value, property):
            return ["property", *(self._describe(each, at) for each in (value.fget, value.fset, value.fdel))]
        if isinstance(value, functools.cached_property):
            return ["property", self._describe(value.func, at)]
        if isinstance(value, re.Pattern):
            return ["pattern", self._describe(value.pattern, at), value.flags]
        if (array := _describe_array(value)) is not None:
            return array
        if isinstance(value, functools._lru_cache_wrapper):
            own = prints.is_ours(value)
            return prints.describe_ours(value) if own else ["cached", self._describe(value.__wrapped__, at)]
        if isinstance(value, types.BuiltinFunctionType | np.ufunc):
            return ["named", str(getattr(value, "__module__", None)), value.__name__]
        return self._describe_object(value, at)

    def _describe_object(self, value: Any, at: _Place) -> Any:
        kind, torch = type(value), sys.modules.get("torch")
        held: Any = None
        if dataclasses.is_dataclass(value):
            held = prints.collect_bound_values(value)
        elif (torch and isinstance(value, torch.nn.Module)) or not is_foreign(kind.__module__, file_of(kind)):
            held = getattr(value, "__dict__", None)
        elif kind.__module__ == "torch":  # a dtype, a device
            held = _ADDRESS.sub("", repr(value))
        return ["object", self._describe(kind, at), self._describe(held, at)]

    # -- code ---------------------------------------------------------------------------------------------------

    def _describe_function(self, function: types.FunctionType) -> Any:
        if prints.is_ours(function):
            return self._describe_own_function(function)
        if is_foreign(function.__module__, function.__code__.co_filename):
            users = [self._describe_function(each) for each in wrapped_functions(function)]
            return ["named", function.__module__, function.__qualname__, *users]
        return self._refer_to(function, module_name(function.__module__, function.__globals__.get("__file__")))

    def _describe_own_function(self, function: types.FunctionType) -> Any:
        """Describe a function of ours with its closure, such as a user's function that it decorates."""
        if any(function is outer for outer in self._closures):
            return ["again", prints.describe_ours(function)]
        self._closures.append(function)
        closed = {
            name: self._describe(bound, _Place("")) for name, bound in instructions.get_closure(function).items()
        }
        self._closures.pop()
        return [*prints.describe_ours(function), *([closed] if closed else [])]

    def _visit_function(self, function: types.FunctionType) -> None:
        code, names = function.__code__, function.__globals__
        file = names.get("__file__")
        at = _Place(folder_of(file), module_name(function.__module__, file))
        self.imports.keep(at.module, code.co_filename)
        self.imports.late_in(code, str(names.get("__package__") or ""))
        closed = instructions.get_closure(function)
        self.written |= {f"{at.module}.{name}" for name in instructions.find_written_globals(code, names)}
        bound = {name: names[name] for name in instructions.find_read_globals(code) if name in names}
        used = {name: self._describe_global(name, value, at) for name, value in bound.items()}
        for name, value in (*bound.items(), *closed.items()):
            if isinstance(value, types.ModuleType):
                used |= self._describe_module_use(name, value, instructions.find_names(code), at)
        held = {name: item for name, item in vars(function).items() if name != "__wrapped__"}
        more = [
            self._describe(each, at) for each in (function.__defaults__, function.__kwdefaults__, closed, held)
        ]
        self._add_part(self._keys[id(function)], [self._describe(code, at), more, used])

    def _describe_global(self, name: str, value: Any, at: _Place) -> Any:
        """Describe a global that a function reads; a value becomes a part with the global's name."""
        if f"{at.module}.{name}" in self._left_out:
            return "written"
        described = self._describe(value, at)
        if isinstance(value, types.FunctionType | type | types.ModuleType):
            return described
        self._add_part(f"{at.module}.{name}", described)
        return ["part", f"{at.module}.{name}"]

    def _describe_module_use(
        self, name: str, module: types.ModuleType, names: set[str], at: _Place
    ) -> dict[str, Any]:
        """Describe what code that contains these names may use of a module that it calls `name`."""
        if prints.is_ours(module):
            return {name: prints.describe_module(module, names)}
        file = getattr(module, "__file__", None)
        if is_foreign(module.__name__, file) or any(module is outer for outer in at.inside):
            return {}
        inner = _Place(folder_of(file), module_name(module.__name__, file), (*at.inside, module))
        self.imports.keep(inner.module, file)
        used: dict[str, Any] = {}
        for each in sorted(names & set(vars(module)) - _MACHINERY):
            bound = vars(module)[each]
            if isinstance(bound, types.ModuleType):
                used |= self._describe_module_use(f"{name}.{each}", bound, names, inner)
            else:
                used[f"{name}.{each}"] = self._describe_global(each, bound, inner)
        return used

    def _describe_class(self, cls: type) -> Any:
        if prints.is_ours(cls):
            return prints.describe_ours(cls)
        file = file_of(cls)
        if is_foreign(cls.__module__, file):
            return ["named", cls.__module__, cls.__qualname__]
        return self._refer_to(cls, module_name(cls.__module__, file))

    def _visit_class(self, cls: type) -> None:
        file = file_of(cls)
        at = _Place(folder_of(file), module_name(cls.__module__, file))
        self.imports.keep(at.module, file)
        defined = {
            name: self._describe_item(item, at) for name, item in vars(cls).items() if name not in _MACHINERY
        }
        if issubclass(cls, enum.Enum):
            defined = {name: self._describe(one.value, at) for name, one in cls.__members__.items()}
        if dataclasses.is_dataclass(cls):
            inherited = {each.name for each in prints.collect_inherited_fields(cls)}
            defined["fields"] = [
                [
                    each.name,
                    each.init,
                    self._describe_default(each.default, at),
                    self._describe_default(each.default_factory, at),
                ]
                for each in dataclasses.fields(cls)
                if each.name not in inherited
            ]
        bases = [self._describe(base, at) for base in (*cls.__bases__, type(cls))]
        self._add_part(self._keys[id(cls)], [defined, bases])

    def _describe_item(self, item: Any, at: _Place) -> Any:
        if isinstance(item, prints.SLOTS):
            return "slot"
        if isinstance(item, types.FunctionType) and item.__code__.co_filename == "<string>":
            return "generated"  # by dataclass, from the fields
        return self._describe(item, at)

    def _describe_default(self, value: Any, at: _Place) -> Any:
        missing = isinstance(value, dataclasses._MISSING_TYPE)  # unpickled, it is another one
        return "none" if missing else ["default", self._describe(value, at)]

    def _refer_to(self, value: Any, module: str) -> Any:
        """Refer to a function or class by the name of its part, which is added if it is new."""
        if id(value) not in self._keys:
            key = name = f"{module}.{value.__qualname__}"
            number = 1
            while key in self.parts:  # such as a second lambda
                number += 1
                key = f"{name} ({number})"
            self._keys[id(value)] = key
            self._found.append(value)
            self.parts[key] = ""  # its place: before what it uses
        return ["part", self._keys[id(value)]]


@dataclass(frozen=True)
class _Place:
    """Where a value was found: the folder and the name of its module, and the values that contain it."""

    folder: str
    module: str = ""
    inside: tuple[Any, ...] = ()

    def within(self, value: Any) -> _Place:
        return dataclasses.replace(self, inside=(*self.inside, value))

    def make_relative(self, text: str) -> str:
        """Replace the folder of the module at the start of a text with `<folder>`."""
        if self.folder and (text == self.folder or text.startswith(self.folder + "/")):
            return "<folder>" + text[len(self.folder) :]
        return text


def _describe_array(value: Any) -> Any:
    """Describe an array or a tensor by its content; None for other values."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), value
        except (RuntimeError, NotImplementedError):  # its content cannot be read: meta, sparse
            return ["tensor", str(value.dtype), list(value.shape)]
        return ["tensor", str(value[1].dtype), list(value[1].shape), hashlib.sha256(value[0]).hexdigest()]
    return prints.describe_array(value)
