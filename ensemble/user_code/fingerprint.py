"""Fingerprints the user's code that a run trains with, so that another process or a later day can compare it.

Starting from the functions of a declaration (the recipe's or the train function, and the pipelines' stages), all
code
that they use is visited: functions, classes, closures, defaults, the globals that they read, the modules that they
import. Each is a *part* with a name and a digest, so that a difference can be named.

- A function is digested as its instructions with their constants: without paths, line numbers, comments,
  docstrings and layout of the source.
- A global that these functions write (a cache, a counter, a value loaded at first use) is state, not code: only
  the fact that it is written is included.
- Installed packages and the standard library are assumed to stay the same: their functions and classes are
  included by name, and so are their objects (except torch modules and arrays) by type. A user's function that one
  of their functions wraps, such as a decorator's result, is visited.
- ray-ensemble's own code is included by public name, version and bound values (`pipelines.fingerprint`), so that
  it can be reworded and moved.

Instructions depend on the minor version of Python, which `Code.python` records; `Code.scheme` is the version of
the descriptions. Between two Pythons only names can be compared, between two schemes only parts that are wholly
the user's.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import hashlib
import json
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.user_code.imports import (
    Imports,
    file_of,
    folder_of,
    is_foreign,
    module_name,
    syntax_of,
    wrapped_functions,
)
from ensemble.user_code.written_globals import attributes, closed_over, read_globals, written_globals
from pipelines import fingerprint as prints

if TYPE_CHECKING:
    from ensemble.spec import Ensemble

#: Version of the descriptions. Version 1, which is not recorded, named our own code by its module.
SCHEME = 2
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
_OF_THE_SOURCE = (
    "NOP",
    "CACHE",
    "RESUME",
    "EXTENDED_ARG",
    "PRECALL",
)  # they depend on line numbers or on the build of Python
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
        """Why another code cannot be compared with this one; None where it can."""
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
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Code(python, visitor.parts, dict(sorted(visitor.imports.files.items())), ours=frozenset(visitor.ours))


def _visit_ensemble(ensemble: Ensemble, written: frozenset[str]) -> _Visitor:
    visitor, recipe = _Visitor(written), ensemble.recipe
    if dataclasses.is_dataclass(recipe):
        for field in dataclasses.fields(recipe):
            if field.name not in _RANKING and getattr(recipe, field.name) is not None:
                visitor.root(f"Recipe.{field.name}", getattr(recipe, field.name))
    else:
        visitor.root("recipe", recipe)
    for split in ("train", "valid", "test"):
        pipeline = getattr(ensemble, split)
        if callable(pipeline):
            visitor.root(split, pipeline)
        for number, stage in enumerate(getattr(pipeline, "stages", ())):
            visitor.root(f"{split} stage {number}", stage.call)
    visitor.finish()
    return visitor


def _digest(description: Any) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]


class _Visitor:
    """Describes values as JSON; each function, class and global of the user's becomes a part of its own."""

    def __init__(self, left_out: frozenset[str] = frozenset()) -> None:
        self.parts: dict[str, str] = {}
        self.ours: set[str] = set()  # parts that speak of ray-ensemble's own
        self.imports = Imports()
        self.written: set[str] = set()  # globals, as parts are named, that the code met so far writes
        self._left_out = left_out
        self._keys: dict[int, str] = {}
        self._found: list[Any] = []  # functions and classes, of which the first `_done` have been looked into
        self._done = 0
        self._closures: list[types.FunctionType] = []  # functions of ours that are being described

    def root(self, name: str, value: Any) -> None:
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
            return at.relocated(value)
        if isinstance(value, float):
            return ["float", value.hex()]
        if isinstance(value, bytes | bytearray):
            return ["bytes", hashlib.sha256(value).hexdigest()]
        if isinstance(value, PurePath):
            return ["path", at.relocated(str(value))]
        if isinstance(value, types.CodeType):
            return self._instructions(value, at)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            return self._module(value, at)
        if any(value is outer for outer in at.inside):
            return ["again", next(i for i, outer in enumerate(at.inside) if outer is value)]
        return self._compound(value, at.within(value))

    def _compound(self, value: Any, at: _Place) -> Any:
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
        if (array := _array(value)) is not None:
            return array
        if isinstance(value, functools._lru_cache_wrapper):
            ours = prints.is_ours(value)
            return prints.describe_ours(value) if ours else ["cached", self._describe(value.__wrapped__, at)]
        if isinstance(value, types.BuiltinFunctionType | np.ufunc):
            return ["named", str(getattr(value, "__module__", None)), value.__name__]
        return self._object(value, at)

    def _object(self, value: Any, at: _Place) -> Any:
        kind = type(value)
        held: Any = None
        if dataclasses.is_dataclass(value):
            held = prints.collect_bound_values(value)
        elif not is_foreign(kind.__module__, file_of(kind)) or _is_torch_module(value):
            held = getattr(value, "__dict__", None)
        elif kind.__module__ == "torch":  # a dtype, a device
            held = _ADDRESS.sub("", repr(value))
        return ["object", self._describe(kind, at), self._describe(held, at)]

    # -- code ---------------------------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType) -> Any:
        if prints.is_ours(function):
            return self._describe_own(function)
        if is_foreign(function.__module__, function.__code__.co_filename):
            users = [self._function(each) for each in wrapped_functions(function)]
            return ["named", function.__module__, function.__qualname__, *users]
        return self._part(function, module_name(function.__module__, function.__globals__.get("__file__")))

    def _describe_own(self, function: types.FunctionType) -> Any:
        """Describe a function of ours with its closure, such as a user's function that it decorates."""
        if any(function is outer for outer in self._closures):
            return ["again", prints.describe_ours(function)]
        self._closures.append(function)
        closed = {name: self._describe(bound, _Place("")) for name, bound in closed_over(function).items()}
        self._closures.pop()
        return [*prints.describe_ours(function), *([closed] if closed else [])]

    def _visit_function(self, function: types.FunctionType) -> None:
        code, names = function.__code__, function.__globals__
        file = names.get("__file__")
        at = _Place(folder_of(file), module_name(function.__module__, file))
        self.imports.keep(at.module, code.co_filename)
        self.imports.late_in(code, str(names.get("__package__") or ""))
        closed = closed_over(function)
        self.written |= {f"{at.module}.{name}" for name in written_globals(code, names)}
        bound = {name: names[name] for name in read_globals(code) if name in names}
        used = {name: self._global(name, value, at) for name, value in bound.items()}
        for name, value in (*bound.items(), *closed.items()):
            if isinstance(value, types.ModuleType) and prints.is_ours(value):
                used[name] = prints.describe_module(value, attributes(code))
            elif isinstance(value, types.ModuleType):
                used |= {
                    f"{name}.{each}": described
                    for each, described in self._describe_module_use(value, attributes(code), at)
                }
        held = {name: item for name, item in vars(function).items() if name != "__wrapped__"}
        more = [
            self._describe(each, at) for each in (function.__defaults__, function.__kwdefaults__, closed, held)
        ]
        self._add_part(self._keys[id(function)], [self._instructions(code, at), more, used])

    def _global(self, name: str, value: Any, at: _Place) -> Any:
        """Describe a global that a function reads; a value becomes a part with the global's name."""
        if f"{at.module}.{name}" in self._left_out:
            return "written"
        described = self._describe(value, at)
        if isinstance(value, types.FunctionType | type | types.ModuleType):
            return described
        self._add_part(f"{at.module}.{name}", described)
        return ["part", f"{at.module}.{name}"]

    def _describe_module_use(
        self, module: types.ModuleType, names: set[str], at: _Place
    ) -> Iterator[tuple[str, Any]]:
        """Describe what code with these attribute names may use of a user's module."""
        file = getattr(module, "__file__", None)
        if is_foreign(module.__name__, file) or any(module is outer for outer in at.inside):
            return
        inner = _Place(folder_of(file), module_name(module.__name__, file), (*at.inside, module))
        self.imports.keep(inner.module, file)
        for name in sorted(names & set(vars(module)) - _MACHINERY):
            bound = vars(module)[name]
            if isinstance(bound, types.ModuleType) and prints.is_ours(bound):
                yield name, prints.describe_module(bound, names)
            elif isinstance(bound, types.ModuleType):
                yield from (
                    (f"{name}.{each}", described)
                    for each, described in self._describe_module_use(bound, names, inner)
                )
            else:
                yield name, self._global(name, bound, inner)

    def _module(self, module: types.ModuleType, at: _Place) -> Any:
        return ["module", module_name(module.__name__, getattr(module, "__file__", None))]

    def _class(self, cls: type) -> Any:
        if prints.is_ours(cls):
            return prints.describe_ours(cls)
        file = file_of(cls)
        if is_foreign(cls.__module__, file):
            return ["named", cls.__module__, cls.__qualname__]
        return self._part(cls, module_name(cls.__module__, file))

    def _visit_class(self, cls: type) -> None:
        file = file_of(cls)
        at = _Place(folder_of(file), module_name(cls.__module__, file))
        self.imports.keep(at.module, file)
        defined = {name: self._item(item, at) for name, item in vars(cls).items() if name not in _MACHINERY}
        if issubclass(cls, enum.Enum):
            defined = {name: self._describe(one.value, at) for name, one in cls.__members__.items()}
        if dataclasses.is_dataclass(cls):
            inherited = {each.name for each in prints.collect_inherited_fields(cls)}
            defined["fields"] = [
                [each.name, each.init, self._default(each.default, at), self._default(each.default_factory, at)]
                for each in dataclasses.fields(cls)
                if each.name not in inherited
            ]
        bases = [self._describe(base, at) for base in (*cls.__bases__, type(cls))]
        self._add_part(self._keys[id(cls)], [defined, bases])

    def _item(self, item: Any, at: _Place) -> Any:
        made = types.MemberDescriptorType | types.GetSetDescriptorType
        if isinstance(item, made) or type(item).__module__ == "_collections":  # the last: of a named tuple
            return "slot"
        if isinstance(item, types.FunctionType) and item.__code__.co_filename == "<string>":
            return "generated"  # by dataclass, from the fields
        return self._describe(item, at)

    def _default(self, value: Any, at: _Place) -> Any:
        missing = isinstance(value, dataclasses._MISSING_TYPE)  # unpickled, it is another one
        return "none" if missing else ["default", self._describe(value, at)]

    def _part(self, value: Any, module: str) -> Any:
        """A function or class by its name among the parts."""
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

    def _instructions(self, code: types.CodeType, at: _Place) -> Any:
        """Describe the instructions of a function; jumps by instruction number, constants by value."""
        steps = [each for each in dis.get_instructions(code) if each.opname not in _OF_THE_SOURCE]
        number = {each.offset: i for i, each in enumerate(steps)}
        offsets = sorted(number)
        described: list[Any] = []
        for i, each in enumerate(steps):
            if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
                target = next((number[offset] for offset in offsets if offset >= each.argval), len(steps))
                described.append([each.opname, target])
            elif each.opcode in dis.hasconst:
                hidden = i + 1 < len(steps) and steps[i + 1].argval in ("__doc__", "__firstlineno__")
                described.append([each.opname, None if hidden else self._describe(each.argval, at)])
            else:
                described.append(
                    [each.opname, each.argval if isinstance(each.argval, str | int) else str(each.argval)]
                )
        return [
            code.co_argcount,
            code.co_posonlyargcount,
            code.co_kwonlyargcount,
            code.co_flags & 0x2AC,
            described,
        ]


@dataclass(frozen=True)
class _Place:
    """Where a value was found: the folder and the name of its module, and the values that contain it."""

    folder: str
    module: str = ""
    inside: tuple[Any, ...] = ()

    def within(self, value: Any) -> _Place:
        return dataclasses.replace(self, inside=(*self.inside, value))

    def relocated(self, text: str) -> str:
        """The text, with `<folder>` in place of the folder of its module."""
        if self.folder and (text == self.folder or text.startswith(self.folder + "/")):
            return "<folder>" + text[len(self.folder) :]
        return text


def _array(value: Any) -> Any:
    """Describe an array or a tensor by its content; None for other values."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), value
        except (RuntimeError, NotImplementedError):  # its content cannot be read: meta, sparse
            return ["tensor", str(value.dtype), list(value.shape)]
        return ["tensor", str(value[1].dtype), list(value[1].shape), hashlib.sha256(value[0]).hexdigest()]
    return prints.describe_array(value)


def _is_torch_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)
