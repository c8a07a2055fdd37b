"""Describes code and objects as JSON values, which two processes can compare.

From a function, class or object on, all of the user's code and values that it can reach are followed: functions
with their instructions, defaults, closures, attributes and the globals they read; modules' attributes; classes
with all that they define, their bases and metaclass; instances with all their state; bound methods, also of
builtins, with their object. Functions and classes are *parts*, which refer to each other by name, so that
recursion ends.

Installed packages are taken to stay the same: of them the qualified names are enough, and of objects the state.
What is ours goes by name and version (`ours`). What cannot be described is a *gap*: it is left out and said.
"""

from __future__ import annotations

import builtins
import collections
import copyreg
import dataclasses
import enum
import functools
import hashlib
import importlib
import json
import random
import re
import sys
import types
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

import numpy as np

from pipelines.fingerprint import gaps, modules, ours
from pipelines.fingerprint.bytecode import (
    Chain,
    describe_instructions,
    find_use,
    find_written_globals,
    get_closure,
)

# fmt: off
#: What Python, and not its author, puts into a class.
MACHINERY = frozenset((
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__slotnames__", "__match_args__", "__dataclass_fields__",
    "__dataclass_params__", "__abstractmethods__", "_abc_impl", "__classdictcell__", "__classcell__",
    "__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__", "__type_params__", "__name__",
    "_is_protocol", "_backward_cls", "_autograd_function_id", ours.NAME_ATTRIBUTE,
))
# fmt: on
#: What Python puts into a class for its fields; the last is a named tuple's, whose module depends on the version.
_NAMED_FIELD = type(vars(collections.namedtuple("_", "field"))["field"])
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType, _NAMED_FIELD)
_METHODS = (types.BuiltinMethodType, types.MethodWrapperType)
_UNBOUND = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)


def digest(description: Any) -> str:
    """A short name for a description."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


def describe_array(value: Any) -> Any:
    """A numpy array by its content, or a dtype; None for what is neither."""
    if isinstance(value, np.dtype):
        return ["dtype", str(value) if value.names is None else repr(value)]
    if type(value) in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        if value.dtype.hasobject:
            return None
        array = np.ascontiguousarray(value)
        layout = repr(array.dtype.descr) if array.dtype.names else str(array.dtype)
        return ["array", layout, list(np.shape(value)), hashlib.sha256(array.tobytes()).hexdigest()]
    return None


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a value was found: in which function or class, in which module, within which other values."""

    where: str = ""
    module: str = ""
    folder: str = ""
    inside: tuple[Any, ...] = ()

    def within(self, value: Any) -> Place:
        """The place of what a value contains."""
        return dataclasses.replace(self, inside=(*self.inside, value))


class Describer:
    """Describes values; the functions and classes that they use become parts.

    Args:
        is_seeded: whether generators of random numbers are seeded before each use: their state says nothing.

    Attributes:
        parts: name -> description of a function or class, in the order in which they were met.
        gaps: what could not be described, in words.
    """

    def __init__(self, *, is_seeded: bool = False) -> None:
        self._is_seeded = is_seeded
        self.parts: dict[str, Any] = {}
        self.gaps: list[str] = []
        self._keys: dict[int, str] = {}
        self._found: list[Any] = []  # functions and classes; the first `_done` have been visited
        self._done = 0
        self._own: list[types.FunctionType] = []  # functions of ours that are being described

    def describe(self, value: Any) -> Any:
        """Describes a value and all functions and classes in use.

        Iterative for these, because a chain of calls may be long.
        """
        try:
            described = self._describe(value, Place())
            while self._done < len(self._found):
                value = self._found[self._done]
                self._done += 1
                visit = self._visit_function if isinstance(value, types.FunctionType) else self._visit_class
                self._add_part(self._keys[id(value)], visit(value))
        except RecursionError:
            self._note("values that are nested too deeply", "", Place())
            described = ["deep", type(value).__qualname__]
        return described

    # -- what differs between uses ------------------------------------------------------------------------------

    def _keep_file(self, module: str, file: object) -> None:
        """Takes note of a user's module whose code or values are described."""

    def _note_written(self, names: Iterable[str], at: Place) -> None:
        """Takes note of globals that a function writes: what it returns may depend on what it did before."""
        for name in sorted(names):
            self._note(f"the global {name!r}", "changes", at)

    def _name_part(self, value: Any) -> str:
        """The name of a part, by which others refer to it; where it lies does not count."""
        return f"{len(self._found)} {value.__qualname__}"

    def _add_part(self, name: str, description: Any) -> None:
        self.parts[name] = description

    def _note(self, what: str, why: str, at: Place) -> None:
        """Notes a gap."""
        gap = f"{at.where or 'it'} {why} {what}" if why else what
        if gap not in self.gaps:
            self.gaps.append(gap)

    def _describe_text(self, text: str, at: Place) -> str:
        return text

    def _describe_items(self, items: Iterable[tuple[Any, Any]], at: Place) -> list[Any]:
        return [[self._describe(key, at), self._describe(value, at)] for key, value in items]

    def _describe_value_of(self, chain: Chain, value: Any, module: types.ModuleType | None, at: Place) -> Any:
        """Describes what a global, or an attribute of a module, is."""
        return self._describe(value, at)

    def _describe_imports(self, use: Any, package: str, at: Place) -> dict[str, Any]:
        """Describes what a function imports when it runs; it would be imported for the first sample, too."""
        described: dict[str, Any] = {}
        for name, level, wanted in sorted(use.imports, key=repr):
            try:
                module = importlib.import_module("." * level + name, package if level else None)
            except ImportError:
                described[f"import {name}"] = "absent"
                continue
            except Exception as error:
                self._note(f"{name}, which cannot be imported here ({type(error).__name__})", "imports", at)
                continue
            for each in wanted or [None]:
                if wanted is None and "." in name:  # `import a.b` gives a
                    module = sys.modules[module.__name__.partition(".")[0]]
                chain = (name,) if each is None else (name, each)
                described["import " + ".".join(chain)] = self._describe_chain(chain, module, at)
        return described

    # -- values -------------------------------------------------------------------------------------------------

    def _describe(self, value: Any, at: Place) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int):
            return value
        if kind is str:
            return self._describe_text(value, at)
        if kind is float:
            return ["float", value.hex()]
        if kind is complex or value is ... or value is NotImplemented:
            return [kind.__name__, repr(value)]
        if kind in (bytes, bytearray):
            return ["bytes", hashlib.sha256(value).hexdigest()]
        if kind is types.CodeType:
            return describe_instructions(value, lambda constant: self._describe(constant, at))
        if kind is types.FunctionType:
            return self._describe_function(value)
        if isinstance(value, type):
            return self._describe_class(value)
        if isinstance(value, types.ModuleType):
            return self._describe_module(value, at)
        if (unseen := gaps.find_unseen(value)) is not None:
            self._note(unseen, "reads", at)
            return ["unseen", unseen]
        if any(value is outer for outer in at.inside):
            return ["again", next(i for i, outer in enumerate(at.inside) if outer is value)]
        return self._describe_compound(value, at.within(value))

    def _describe_compound(self, value: Any, at: Place) -> Any:
        """Describes a value that contains other values."""
        kind = type(value)
        if kind in (tuple, list):
            return [kind.__name__, *(self._describe(each, at) for each in value)]
        if kind in (dict, types.MappingProxyType):
            return ["dict", *self._describe_items(value.items(), at)]
        if kind in (set, frozenset):
            return ["set", *sorted((self._describe(each, at) for each in value), key=json.dumps)]
        if kind is types.MethodType:
            return ["method", self._describe(value.__func__, at), self._describe(value.__self__, at)]
        if kind in (staticmethod, classmethod):
            return [kind.__name__, self._describe(value.__func__, at)]
        if kind is property:
            return ["property", *(self._describe(each, at) for each in (value.fget, value.fset, value.fdel))]
        if kind is functools.cached_property:
            return ["property", self._describe(value.func, at)]
        if kind is functools.partial:
            parts = (value.func, value.args, value.keywords, vars(value))
            return ["partial", *(self._describe(each, at) for each in parts)]
        if kind is functools._lru_cache_wrapper:
            is_own = ours.is_ours(value)
            return ours.describe_ours(value) if is_own else ["cached", self._describe(value.__wrapped__, at)]
        if kind is types.CellType:
            return ["cell", None if _is_empty(value) else self._describe(value.cell_contents, at)]
        if (array := self._describe_data(value, at)) is not None:
            return array
        if isinstance(value, (*_METHODS, *_UNBOUND)):
            return self._describe_builtin(value, at)
        if isinstance(value, _SLOTS):
            return ["slot", value.__name__]
        if isinstance(value, enum.Enum):
            return ["member", self._describe(kind, at), value.name]
        return self._describe_object(value, at)

    def _describe_data(self, value: Any, at: Place) -> Any:
        """Describes arrays, tensors and the like by their content; None for other values."""
        if (array := describe_array(value)) is not None:
            return array
        if type(value) is np.ndarray:  # of objects
            return ["objects", list(value.shape), *(self._describe(each, at) for each in value.ravel())]
        if isinstance(value, re.Pattern):
            return ["pattern", self._describe(value.pattern, at), value.flags]
        if isinstance(value, PurePath):
            return ["path", self._describe_text(str(value), at)]
        if isinstance(value, np.ufunc):
            if getattr(np, value.__name__, None) is value or type(value).__module__ != "numpy":
                return ["named", "numpy", value.__name__]
            self._note(f"the compiled function {value.__name__}", "uses", at)
            return ["ufunc", value.__name__]
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        if isinstance(value, torch.Tensor):
            return self._describe_tensor(value, torch)
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)):
            return ["torch", repr(value)]
        return None

    def _describe_tensor(self, value: Any, torch: Any) -> Any:
        try:
            raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        except (RuntimeError, NotImplementedError):  # its content cannot be read: meta, sparse
            self._note(f"a tensor whose values cannot be read ({value.layout}, {value.device})", "holds", Place())
            return ["tensor", str(value.dtype), list(value.shape)]
        return ["tensor", str(value.dtype), list(value.shape), hashlib.sha256(raw).hexdigest()]

    def _describe_builtin(self, value: Any, at: Place) -> Any:
        """Describes a compiled function, or a method of a builtin with what it is bound to."""
        owner = getattr(value, "__self__", None)
        if isinstance(value, _UNBOUND):
            return ["named", value.__objclass__.__module__, value.__objclass__.__qualname__, value.__name__]
        if owner is not None and not isinstance(owner, types.ModuleType):
            return ["bound", self._describe(owner, at), value.__name__]
        module = getattr(value, "__module__", None)
        if not modules.is_foreign(module, getattr(sys.modules.get(str(module)), "__file__", None)) and module:
            self._note(f"the compiled function {module}.{value.__qualname__}", "uses", at)
        return ["named", str(module), value.__qualname__]

    def _describe_object(self, value: Any, at: Place) -> Any:
        """Describes an object by its class and its state: what a pickled copy is made from."""
        kind = type(value)
        torch = sys.modules.get("torch")
        if isinstance(value, _GENERATORS) or (torch is not None and isinstance(value, torch.Generator)):
            if not self._is_seeded:
                what = f"a generator of random numbers ({kind.__qualname__}), which changes with each use"
                self._note(what, "holds", at)
            return ["generator", kind.__module__, kind.__qualname__]
        if kind.__module__.startswith("numba.") and hasattr(value, "py_func"):
            return ["numba", self._describe(value.py_func, at), self._describe(value.targetoptions, at)]
        described = self._describe(kind, at)
        if any(ours.is_ours(base) and dataclasses.is_dataclass(base) for base in kind.__mro__):
            bound = ours.collect_bound_values(value)
            if not ours.is_ours(kind):
                bound = {**_drop_cached(kind, getattr(value, "__dict__", {})), **bound}
            return ["dataclass", described, {name: self._describe(each, at) for name, each in bound.items()}]
        try:
            reduce = copyreg.dispatch_table.get(kind)
            state = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception as error:
            reason = str(error).partition("\n")[0][:80]
            self._note(
                f"an object of {kind.__module__}.{kind.__qualname__}, whose state cannot be read ({reason})",
                "holds",
                at,
            )
            return ["object", described]
        if isinstance(state, str):
            return ["named", kind.__module__, state]
        make, arguments, held, *items = (*state, None, None, None)[: max(5, len(state))]
        known = [each for each in arguments if each is not kind]
        described_items = [None if each is None else self._describe_items(_pairs(each), at) for each in items[:2]]
        how = None if make is copyreg.__newobj__ else self._describe(make, at)  # type: ignore[attr-defined]
        if isinstance(value, np.ndarray):
            held = (held, vars(value) if hasattr(value, "__dict__") else None)  # which copies of it lack
        elif isinstance(held, dict):
            held = _drop_cached(kind, held)
        return ["object", described, how, self._describe(known, at), self._describe(held, at), described_items]

    # -- code ---------------------------------------------------------------------------------------------------

    def _describe_function(self, function: types.FunctionType) -> Any:
        if ours.is_ours(function):
            return self._describe_own_function(function)
        if modules.is_foreign_function(function):
            return self._describe_foreign_function(function)
        return self._refer_to(function)

    def _describe_own_function(self, function: types.FunctionType) -> Any:
        """Describes a function of ours with its closure, such as a user's function that it decorates."""
        if any(function is outer for outer in self._own):
            return ["again", ours.describe_ours(function)]
        self._own.append(function)
        closed = {name: self._describe(bound, Place()) for name, bound in get_closure(function).items()}
        self._own.pop()
        return [*ours.describe_ours(function), *([closed] if closed else [])]

    def _describe_foreign_function(self, function: types.FunctionType) -> Any:
        """Describes a function of an installed package by name, and what it holds, such as what it decorates."""
        named = ["named", function.__globals__.get("__name__"), function.__code__.co_qualname]
        held = {name: value for name, value in get_closure(function).items() if value is not None}
        held |= {f"default {i}": each for i, each in enumerate(function.__defaults__ or ()) if callable(each)}
        if not held or any(function is outer for outer in self._own):
            return named
        self._own.append(function)
        described = {name: self._describe(value, Place(function.__qualname__)) for name, value in held.items()}
        self._own.pop()
        return [*named, described]

    def _visit_function(self, function: types.FunctionType) -> Any:
        code, names = function.__code__, function.__globals__
        use = find_use(code)
        file = names.get("__file__")
        at = Place(function.__qualname__, modules.module_name(function.__module__, file), modules.folder_of(file))
        self._keep_file(at.module, code.co_filename)
        self._note_written(find_written_globals(code, names), at)
        closed = get_closure(function)
        used = self._describe_imports(use, str(names.get("__package__") or ""), at)
        for chain in sorted(use.globals):
            name = chain[0]
            if name in names:
                used[".".join(chain)] = self._describe_chain(chain, self._find_global(name, names), at)
            elif hasattr(builtins, name):
                if (unseen := gaps.find_unseen(getattr(builtins, name))) is not None:
                    self._note(f"{unseen} ({name})", "reads", at)
            else:
                self._note(f"the global {name!r}, which is not set yet", "reads", at)
        for chain in sorted(use.closure):
            if isinstance(closed.get(chain[0]), types.ModuleType):
                used[".".join(chain)] = self._describe_chain(chain, closed[chain[0]], at)
        free = {name: each for name, each in closed.items() if not isinstance(each, types.ModuleType)}
        if (unseen := gaps.find_unseen_names(use.names)) is not None:
            self._note(unseen, "reads", at)
        elif gaps.opens_paths(use.names, [*free.values(), *(names.get(chain[0]) for chain in use.globals)]):
            self._note("files (open)", "reads", at)
        for name in sorted(use.rebound):
            self._note(f"{name!r}, which it is a closure over", "changes", at)
        held = {name: item for name, item in vars(function).items() if name != "__wrapped__"}
        more = (function.__defaults__, function.__kwdefaults__, free, held)
        return [
            "function",
            function.__qualname__,
            self._describe(code, at),
            [self._describe(each, at) for each in more],
            dict(sorted(used.items())),
        ]

    def _find_global(self, name: str, names: dict[str, Any]) -> Any:
        """A global; a script's functions live in __main__ for itself and under the script's name for others."""
        if name == "__name__":
            return modules.module_name(names[name], names.get("__file__"))
        return names[name]

    def _describe_chain(self, chain: Chain, value: Any, at: Place) -> Any:
        """Describes what a chain of attributes leads to, of which the first is a value's name."""
        if not isinstance(value, types.ModuleType):
            return self._describe_value_of(chain[:1], value, None, at)
        module = value
        self._keep_module(module)
        if ours.is_ours(module):
            return ours.describe_module(module, chain[1:])
        try:
            followed, value = modules.resolve(chain, module)
        except AttributeError:
            self._note(f"{'.'.join(chain)}, which is not there yet", "reads", at)
            return "absent"
        owner = module
        for name in chain[1 : followed - 1]:
            owner = getattr(owner, name)
            self._keep_module(owner)
        if isinstance(value, types.ModuleType) or not modules.is_foreign_module(owner):
            return self._describe_value_of(chain[:followed], value, owner, at)
        if (unseen := gaps.find_unseen(value)) is not None:
            self._note(f"{unseen} ({'.'.join(chain)})", "reads", at)
        return ["named", owner.__name__, chain[followed - 1]]

    def _keep_module(self, module: types.ModuleType) -> None:
        if not ours.is_ours(module) and not modules.is_foreign_module(module):
            file = getattr(module, "__file__", None)
            self._keep_file(modules.module_name(module.__name__, file), file)

    def _describe_module(self, module: types.ModuleType, at: Place) -> Any:
        """Describes a module of which anything may be used."""
        if ours.is_ours(module) or modules.is_foreign_module(module):
            return ["module", module.__name__]
        if any(module is outer for outer in at.inside):
            return ["again", module.__name__]
        self._keep_module(module)
        inside = at.within(module)
        held = {
            name: self._describe_value_of((module.__name__, name), value, module, inside)
            for name, value in sorted(vars(module).items())
            if not (name.startswith("__") and name.endswith("__")) or name == "__getattr__"
        }
        return ["module", held]

    def _describe_class(self, cls: type) -> Any:
        if ours.is_ours(cls):
            return ours.describe_ours(cls)
        if modules.is_foreign_class(cls):
            return ["named", cls.__module__, cls.__qualname__]
        return self._refer_to(cls)

    def _visit_class(self, cls: type) -> Any:
        file = modules.file_of(cls)
        at = Place(cls.__qualname__, modules.module_name(cls.__module__, file), modules.folder_of(file))
        self._keep_file(at.module, file)
        defined = {
            name: self._describe_member(item, at)
            for name, item in sorted(vars(cls).items())
            if name not in MACHINERY and not (name == "_member_map_" and issubclass(cls, enum.Enum))
        }
        if issubclass(cls, enum.Enum):
            defined = {name: item for name, item in defined.items() if not _is_of_enum(name, vars(cls)[name])}
            defined["members"] = [[name, self._describe(one.value, at)] for name, one in cls.__members__.items()]
        if dataclasses.is_dataclass(cls):
            inherited = {each.name for each in ours.collect_inherited_fields(cls)}
            defined["fields"] = [
                [
                    each.name,
                    each.init,
                    *(self._describe_default(one, at) for one in (each.default, each.default_factory)),
                ]
                for each in dataclasses.fields(cls)
                if each.name not in inherited
            ]
        bases = [self._describe(base, at) for base in (*cls.__bases__, type(cls))]
        return ["class", cls.__qualname__, defined, bases]

    def _describe_member(self, item: Any, at: Place) -> Any:
        if isinstance(item, _SLOTS):
            return "slot"
        if isinstance(item, types.FunctionType) and item.__code__.co_filename == "<string>":
            return "generated"  # by dataclass, from the fields
        return self._describe(item, at)

    def _describe_default(self, value: Any, at: Place) -> Any:
        return "none" if ours.is_missing(value) else ["default", self._describe(value, at)]

    def _refer_to(self, value: Any) -> Any:
        """Refers to a function or class by the name of its part, which is added if it is new."""
        if id(value) not in self._keys:
            name = self._name_part(value)
            self._keys[id(value)] = name
            self._found.append(value)
            self._add_part(name, None)  # its place: before what it uses
        return ["part", self._keys[id(value)]]


def _is_empty(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


def _pairs(items: Any) -> list[tuple[Any, Any]]:
    """Items of a list or a dict, as `__reduce__` gives them, as pairs."""
    return [each if isinstance(each, tuple) and len(each) == 2 else (None, each) for each in items]


def _drop_cached(kind: type, held: dict[str, Any]) -> dict[str, Any]:
    """The state of an object without what `functools.cached_property` keeps there, which follows from the rest."""
    cached = {
        name
        for base in kind.__mro__
        for name, item in vars(base).items()
        if isinstance(item, functools.cached_property)
    }
    return {name: value for name, value in held.items() if name not in cached}


def _is_of_enum(name: str, item: Any) -> bool:
    """Whether Python, and not its author, puts something into an enumeration."""
    return isinstance(item, enum.Enum) or name in (
        "_generate_next_value_", "_member_names_", "_member_map_", "_value2member_map_", "_member_type_",
        "_unhashable_values_", "_hashable_values_", "_use_args_", "_value_repr_", "__new__", "_new_member_",
    )  # fmt: skip
