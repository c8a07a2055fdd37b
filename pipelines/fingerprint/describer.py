"""Describes code as JSON values: functions, classes and modules, with all of the user's that they reach.

From a function, class or object on, all of the user's code and values are followed: functions with their
instructions, defaults, closures, attributes and the globals they read; modules' attributes; classes with all that
they define, their bases and metaclass; instances with all their state; bound methods, also of builtins, with
their object. Functions, classes and modules are *parts*, which refer to each other by name, so that recursion
ends.

Installed packages are taken to stay the same: of them the qualified names are enough, and of objects the state.
What is ours goes by name and version (`ours`). What cannot be described is a *gap*: it is left out and said.
"""

from __future__ import annotations

import abc
import builtins
import dataclasses
import enum
import functools
import importlib
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelines.fingerprint import gaps, modules, ours
from pipelines.fingerprint.bytecode import Chain, Use, find_use, find_written_globals, get_closure
from pipelines.fingerprint.values import SLOTS, Place, TooLarge, ValueDescriber

# fmt: off
#: What Python, torch and pydantic, not its author, put into a class, and what says nothing of what it does.
_MACHINERY = frozenset((
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__slotnames__", "__dataclass_fields__", "__dataclass_params__",
    "__abstractmethods__", "_abc_impl", "__classdictcell__", "__classcell__", "__firstlineno__",
    "__static_attributes__", "__parameters__", "__type_params__", "__name__", "_is_protocol", "_backward_cls",
    "_autograd_function_id", "__pydantic_core_schema__", "__pydantic_serializer__",
    "__pydantic_validator__", ours.NAME_ATTRIBUTE,
))
#: What Python puts into an enumeration, of which the members are described.
_OF_ENUM = frozenset((
    "_generate_next_value_", "_member_names_", "_member_map_", "_value2member_map_", "_member_type_",
    "_unhashable_values_", "_hashable_values_", "_use_args_", "_value_repr_", "__new__", "_new_member_",
))
# fmt: on
#: What calls the function that `functools.singledispatch` finds in its registry.
_DISPATCHES = functools.singledispatch(abs).__code__  # type: ignore[attr-defined]


class Describer(ValueDescriber):
    """Describes values; the functions, classes and modules that they use become parts.

    Args:
        is_seeded: see `ValueDescriber`.
        written: globals that the described code writes, as module.name: their values are left out, as they are
            others after each use.

    Attributes:
        parts: name -> description of a function, class or module, in the order in which they were met.
        written: as the argument, of what was described.
        roots: the functions, classes and modules that the described value refers to itself.
    """

    def __init__(self, *, is_seeded: bool = False, written: frozenset[str] = frozenset()) -> None:
        super().__init__(is_seeded=is_seeded)
        self.parts: dict[str, Any] = {}
        self.written: set[str] = set()
        self.roots: tuple[Any, ...] = ()
        self._left_out = written
        self._keys: dict[int, str] = {}
        self._found: list[Any] = []  # what became parts; the first `_done` have been visited
        self._done = 0
        self._path_methods: list[tuple[str, Place]] = []  # names that would read, if they were of a path
        self._patched: dict[type, Any] = {}  # see `_describe_patches`

    def describe(self, value: Any) -> Any:
        """Describes a value and all functions, classes and modules in use.

        Iterative for these, because a chain of calls may be long.
        """
        try:
            described = self._describe(value, Place())
            self.roots = tuple(self._found)
            while self._done < len(self._found):
                part = self._found[self._done]
                self._done += 1
                self._add_part(self._keys[id(part)], self._visit(part))
            for name, at in self._path_methods if self._has_paths else ():
                self._note(f"files ({name})", "reads", at)
        except (RecursionError, TooLarge) as error:
            extent = "nested too deeply" if isinstance(error, RecursionError) else "too many"
            self._note(f"objects that are {extent} to be described", "leads to", Place())
            described = ["large", type(value).__qualname__]
        return described

    # -- what differs between uses ------------------------------------------------------------------------------

    def _keep_file(self, module: str, file: object) -> None:
        """Takes note of a user's module whose code or values are described."""

    def _name_part(self, value: Any) -> str:
        """The name of a part, by which others refer to it; where it lies does not count."""
        kind = "module" if isinstance(value, types.ModuleType) else value.__qualname__
        return f"{len(self._found)} {kind}"

    def _describe_name(self, at: Place) -> str:
        """Describes the name of a module that its code reads."""
        return at.module

    def _add_part(self, name: str, description: Any) -> None:
        self.parts[name] = description

    def _describe_global(self, value: Any, name: str, at: Place) -> Any:
        """Describes a global of the user's, or an attribute of a module; `name` is module.name."""
        return self._describe(value, at)

    def _describe_imports(self, use: Use, package: str, at: Place) -> dict[str, Any]:
        """Describes what a function imports when it runs; it would be imported for the first sample, too."""
        described: dict[str, Any] = {}
        for name, level, wanted in sorted(use.imports, key=repr):
            try:
                module = importlib.import_module("." * level + name, package if level else None)
            except Exception as error:
                self._note(f"{name}, which cannot be imported here ({type(error).__name__})", "imports", at)
                continue
            for each in wanted or [None]:
                if wanted is None and "." in name:  # `import a.b` gives a
                    module = sys.modules[module.__name__.partition(".")[0]]
                chain = (name,) if each is None else (name, each)
                described["import " + ".".join(chain)] = self._describe_chain(chain, module, at)
        return described

    # -- functions ----------------------------------------------------------------------------------------------

    def _describe_function(self, function: types.FunctionType, at: Place) -> Any:
        """Describes ours and those of installed packages by their names, with what they hold."""
        if ours.is_ours(function):
            named, held = ours.describe_ours(function), get_closure(function)
        elif modules.is_foreign_function(function):
            named = ["named", function.__globals__.get("__name__"), function.__code__.co_qualname]
            held = _find_held(function)
        else:
            return self._refer_to(function)
        if not held:
            return named
        inner = Place(function.__qualname__, met=at.met)
        if (again := at.find_again(function)) is not None:
            return again
        return [*named, {name: self._describe(each, inner) for name, each in held.items()}]

    def _visit(self, part: Any) -> Any:
        if isinstance(part, types.FunctionType):
            return self._visit_function(part)
        return self._visit_class(part) if isinstance(part, type) else self._visit_module(part)

    def _visit_function(self, function: types.FunctionType) -> Any:
        code, names = function.__code__, function.__globals__
        use, file = find_use(code), names.get("__file__")
        module = modules.module_name(names.get("__name__"), file)
        at = Place(function.__qualname__, module, modules.folder_of(file), use.names)
        self._keep_file(module, code.co_filename)
        for name in sorted(find_written_globals(code, names)):  # what it returns may depend on what it did before
            self.written.add(f"{module}.{name}")
            self._note(f"the global {name!r}", "changes", at)
        for name in sorted(use.rebound):
            self._note(f"{name!r}, which it is a closure over", "changes", at)
        closed = get_closure(function)
        free = {
            name: each
            for name, each in closed.items()
            if name not in use.rebound and not isinstance(each, types.ModuleType)
        }
        if (unseen := gaps.find_unseen_names(use.names)) is not None:
            self._note(unseen, "reads", at)
        self._keep_path_methods(sorted(use.loose), at)
        used = self._describe_imports(use, str(names.get("__package__") or ""), at)
        used |= self._describe_globals(use, names, at)
        for chain in sorted(use.closure):
            if isinstance(closed.get(chain[0]), types.ModuleType):
                used[".".join(chain)] = self._describe_chain(chain, closed[chain[0]], at)
        held = (function.__name__, function.__defaults__, function.__kwdefaults__, free, vars(function))
        return [
            "function",
            function.__qualname__,
            self._describe(code, at),
            [self._describe(each, at) for each in held],
            dict(sorted(used.items())),
        ]

    def _describe_globals(self, use: Use, names: dict[str, Any], at: Place) -> dict[str, Any]:
        """Describes the globals and builtins that a function reads."""
        used: dict[str, Any] = {}
        for chain in sorted(use.globals):
            name = chain[0]
            if name == "__name__":  # of a script another one than in what imports it
                used[name] = self._describe_name(at)
            elif name in names:
                used[".".join(chain)] = self._describe_chain(chain, names[name], at)
            elif hasattr(builtins, name):
                if not _is_pythons(value := getattr(builtins, name)):
                    used[name] = self._describe(value, at)
                elif (unseen := gaps.find_unseen(value)) is not None:
                    self._note(f"{unseen} ({name})", "reads", at)
            else:
                self._note(f"the global {name!r}, which is not set yet", "reads", at)
        return used

    def _describe_chain(self, chain: Chain, value: Any, at: Place) -> Any:
        """Describes what a chain of attributes leads to, of which the first is a value's name."""
        if not isinstance(value, types.ModuleType):
            self._keep_path_methods(chain[1:], at)
            return self._describe_kept(value, f"{at.module}.{chain[0]}", at)
        self._keep_module(value)
        if ours.is_ours(value):
            return ours.describe_module(value, chain[1:])
        try:
            followed, owner, value = modules.resolve(chain, value, self._keep_module)
        except AttributeError:
            self._note(f"{'.'.join(chain)}, which is not there yet", "reads", at)
            return "absent"
        if isinstance(value, types.ModuleType):
            if modules.is_foreign_module(value) and (unseen := gaps.find_unseen_of(value, at.names)) is not None:
                self._note(unseen, "reads", at)
            return self._describe_module(value)
        self._keep_path_methods(chain[followed:], at)
        self._has_paths |= isinstance(value, type) and issubclass(value, Path)
        name = chain[followed - 1]
        if not modules.is_foreign_module(owner):
            return self._describe_kept(value, f"{modules.name_of(owner)}.{name}", at)
        if (unseen := gaps.find_unseen(value)) is not None:
            self._note(f"{unseen} ({'.'.join(chain)})", "reads", at)
        patch = [self._describe(value, at)] if modules.may_be_patch(value) else []
        return ["named", owner.__name__, name, *patch]

    def _keep_path_methods(self, names: Iterable[str], at: Place) -> None:
        self._path_methods += [(name, at) for name in names if name in gaps.PATH_METHODS]

    def _describe_kept(self, value: Any, name: str, at: Place) -> Any:
        """Describes a global, by itself: what it shares with others does not count."""
        if name in self._left_out:
            return "written"
        return self._describe_global(value, name, dataclasses.replace(at, met={}))

    # -- modules ------------------------------------------------------------------------------------------------

    def _keep_module(self, module: types.ModuleType) -> None:
        if not modules.is_foreign_module(module):
            self._keep_file(modules.name_of(module), getattr(module, "__file__", None))

    def _describe_module(self, module: types.ModuleType) -> Any:
        """Describes a module of which anything may be used."""
        return ["module", module.__name__] if modules.is_foreign_module(module) else self._refer_to(module)

    def _visit_module(self, module: types.ModuleType) -> Any:
        self._keep_module(module)
        name = modules.name_of(module)
        at = Place(name, name, modules.folder_of(getattr(module, "__file__", None)))
        held = {
            key: self._describe_module(value)
            if isinstance(value, types.ModuleType)
            else self._describe_kept(value, f"{name}.{key}", at)
            for key, value in sorted(vars(module).items())
            if not (key.startswith("__") and key.endswith("__")) or key == "__getattr__"
        }
        return ["module", held]

    # -- classes ------------------------------------------------------------------------------------------------

    def _describe_class(self, cls: type, at: Place) -> Any:
        self._has_paths |= issubclass(cls, Path)
        if ours.is_ours(cls):
            return ours.describe_ours(cls)
        if modules.is_foreign_class(cls):
            return ["named", cls.__module__, cls.__qualname__, *self._describe_patches(cls, at)]
        return self._refer_to(cls)

    def _describe_patches(self, cls: type, at: Place) -> list[Any]:
        """Describes the functions of a user that have been put into a class of an installed package."""
        if cls not in self._patched:
            self._patched[cls] = []  # while it is described
            for base in cls.__mro__:
                for name, item in sorted(vars(base).items()):
                    if modules.is_patch(item):
                        self._patched[cls].append([name, self._describe_function(item, at)])
        return list(self._patched[cls])

    def _visit_class(self, cls: type) -> Any:
        file = modules.file_of(cls)
        at = Place(cls.__qualname__, modules.module_name(cls.__module__, file), modules.folder_of(file))
        self._keep_file(at.module, file)
        is_enum, is_dataclass = issubclass(cls, enum.Enum), dataclasses.is_dataclass(cls)
        defined = {
            name: self._describe_member(item, at)
            for name, item in sorted(vars(cls).items())
            if name not in _MACHINERY
            and not (is_enum and (name in _OF_ENUM or isinstance(item, enum.Enum)))
            and not (is_dataclass and _is_generated(item))
        }
        if issubclass(cls, enum.Enum):
            members = cls.__members__.items()
            defined["members"] = [[name, *self._describe_enumerated(one, at)] for name, one in members]
        if isinstance(cls, abc.ABCMeta):
            registered = [each() for each in abc._get_dump(cls)[0]]  # type: ignore[attr-defined]
            defined["registered"] = self._describe_set(registered, at)
        if is_dataclass:
            inherited = {each.name for each in ours.collect_inherited_fields(cls)}
            fields = [each for each in dataclasses.fields(cls) if each.name not in inherited]
            defined["fields"] = [self._describe_field(each, at) for each in fields]
        bases = [self._describe(base, at) for base in (*cls.__bases__, type(cls))]
        return ["class", cls.__qualname__, defined, bases]

    def _describe_member(self, item: Any, at: Place) -> Any:
        return "slot" if isinstance(item, SLOTS) else self._describe(item, at)

    def _describe_field(self, field: dataclasses.Field[Any], at: Place) -> list[Any]:
        defaults = [
            "none" if ours.is_missing(default) else ["default", self._describe(default, at)]
            for default in (field.default, field.default_factory)
        ]
        options = [field.init, field.repr, field.compare, field.hash, field.kw_only is True]
        return [field.name, options, *defaults]

    def _refer_to(self, value: Any) -> Any:
        """Refers to a function, class or module by the name of its part, which is added if it is new."""
        if id(value) not in self._keys:
            name = self._name_part(value)
            self._keys[id(value)] = name
            self._found.append(value)
            self._add_part(name, None)  # its place: before what it uses
        return ["part", self._keys[id(value)]]


def _find_held(function: types.FunctionType) -> dict[str, Any]:
    """What a function of an installed package holds, such as what it decorates, and its name says nothing of.

    Its defaults and attributes follow from its name, too, unless another function has made it.
    """
    code = function.__code__
    if code is _DISPATCHES:
        return {"registry": dict(function.registry)}  # type: ignore[attr-defined]
    held = {name: value for name, value in get_closure(function).items() if value is not None}
    defaults = {f"default {i}": each for i, each in enumerate(function.__defaults__ or ())}
    if "<" not in code.co_qualname:
        return held | {name: each for name, each in defaults.items() if callable(each)}
    defaults |= {f"default {name}": each for name, each in (function.__kwdefaults__ or {}).items()}
    attributes = {name: each for name, each in vars(function).items() if not name.startswith("_torchdynamo")}
    return held | defaults | attributes | ({"code": code} if code.co_name == "<lambda>" else {})


def _is_pythons(value: Any) -> bool:
    """Whether a builtin is Python's own, and nobody has put another in its place."""
    return isinstance(value, types.BuiltinFunctionType | type) and value.__module__ in ("builtins", "io", "_io")


def _is_generated(item: Any) -> bool:
    """Whether `dataclasses` made a method, which follows from the fields."""
    return isinstance(item, types.FunctionType) and item.__code__.co_qualname.startswith("__create_fn__.")
