"""Describes code and values as JSON: all of the user's code and state that can be reached from them.

Functions, classes and modules of the user's are *parts*, which refer to each other by name. Of installed packages
qualified names are enough, of objects the state that a pickled copy is made from. What is ours goes by name and
version (`ours`). What cannot be described is a *gap*.
"""

from __future__ import annotations

import abc
import builtins
import collections
import dataclasses
import functools
import importlib
import itertools
import json
import operator
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Set
from pathlib import Path
from typing import Any

from pipelines.fingerprint import gaps, modules, ours, values
from pipelines.fingerprint.instructions import CONTAINERS, Chain, Use, describe_instructions, find_use, get_closure

_MOST = 1_000_000  # values that hold others; more of them are a gap
_MOST_SETS = 3  # sets within each other: their elements are described anew from each
_MOST_BITS = 8192  # of an integer in decimal digits; Python refuses to write more than 4,300 of these


class _TooLarge(Exception):
    """An object leads to too many others."""


@dataclasses.dataclass
class Place:
    """Where a value was met: in which function or class, in which module and folder.

    Attributes:
        names: that the code there reads, attributes included.
        met: id -> (number, value) of the containers and objects that were described there. Each is described once
            and is its number from then on, also within itself.
    """

    where: str = ""
    module: str = ""
    folder: str = ""
    names: Set[str] = frozenset()
    met: dict[int, tuple[int, Any]] = dataclasses.field(default_factory=dict)


class Describer:
    """Describes values; the functions, classes and modules that they use become parts.

    Args:
        is_seeded: whether generators of random numbers are seeded before each use: their state says nothing.
        written: globals that the described code writes, as module.name: their values are left out.

    Attributes:
        is_of_members: whether the code of members is described: globals are parts, paths are relative to their
            module, late imports are collected and not imported, the order of dicts' items and what pickled copies
            lack do not count.
        gaps: what could not be described, in words.
        parts: key -> description of a function, class, module or global, in the order in which they were met.
        names: key -> the part's name, with its module.
        written: as the argument, of what was described.
        roots: the functions, classes and modules that the described value refers to itself.
        files: of the user's modules that were met, by name.
        late: use and package of functions, which may import something when they run.
    """

    is_of_members = False

    def __init__(self, *, is_seeded: bool = False, written: Collection[str] = ()) -> None:
        self.gaps: list[str] = []
        self.parts: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.written: set[str] = set()
        self.roots: tuple[Any, ...] = ()
        self.files: dict[str, Path] = {}
        self.late: list[tuple[Use, str]] = []
        self.is_seeded, self._left_out = is_seeded, written
        self._at = Place()
        self._keys: dict[Any, tuple[str, Any]] = {}  # id of a part, or name of a global -> its key, and the part
        self._queue: collections.deque[Any] = collections.deque()  # parts to be described
        self._count = self._sets = 0  # values that hold others; sets within each other
        self.arrays: dict[int, tuple[Any, Any]] = {}  # id -> an array and its description: each is hashed once
        self._patched: dict[type, list[Any]] = {}  # class of an installed package -> functions of the user's in it
        self.has_paths = False  # whether paths, or their class, are among what was described
        self._path_methods: list[tuple[str, str]] = []  # (where, name) of what reads, if it is of a path

    def describe(self, value: Any) -> Any:
        """Describe a value and all functions, classes and modules in use, one after the other."""
        try:
            described = self._describe_at(Place(), value)
            self.roots = tuple(self._queue)
            while self._queue:
                part = self._queue.popleft()
                self.parts[self._keys[id(part)][0]] = self._describe_part(part)
        except (RecursionError, _TooLarge) as error:
            self._at = Place()
            extent = "nested too deeply" if isinstance(error, RecursionError) else "too many"
            self.note(f"objects that are {extent} to be described", "leads to")
            return ["large", type(value).__qualname__]
        for where, name in self._path_methods if self.has_paths else ():
            self.note(f"files ({name})", "reads", where)
        return described

    def _describe_at(self, place: Place, value: Any) -> Any:
        before, self._at = self._at, place
        described = self.walk(value)
        self._at = before
        return described

    def note(self, what: str, why: str, where: str | None = None) -> None:
        """Note a gap."""
        gap = f"{(self._at.where if where is None else where) or 'it'} {why} {what}"
        if gap not in self.gaps:
            self.gaps.append(gap)

    def walk(self, value: Any) -> Any:
        """Describe a value; functions, classes and modules of the user's by the keys of their parts."""
        kind = type(value)
        if value is None or kind is bool or (kind is int and value.bit_length() <= _MOST_BITS):
            return value
        if kind is str:
            return self.describe_text(value)
        if kind in values.LEAVES:
            return [kind.__name__, values.LEAVES[kind](value)]
        if (unseen := gaps.find_unseen(value)) is not None:
            self.note(unseen, "reads")
            return ["unseen", unseen, str(getattr(value, "__qualname__", kind.__qualname__))]
        if kind is types.CodeType:
            return describe_instructions(value, self.walk)
        if kind is types.FunctionType:
            return self._describe_function(value)
        if isinstance(value, type):
            return self.describe_class(value)
        if isinstance(value, types.ModuleType):
            return self._describe_module(value)
        self._count += 1
        if self._count > _MOST:
            raise _TooLarge
        if kind is functools._lru_cache_wrapper and ours.is_ours(value):
            return ours.describe_ours(value)
        if kind in (list, dict, set) and (again := self._find_again(value)) is not None:
            return again
        if kind in values.HOLDERS:
            return [kind.__name__, *map(self.walk, values.HOLDERS[kind](value))]
        if kind in (dict, types.MappingProxyType):
            return [kind.__name__, *self._describe_items(value.items())]
        if kind in (set, frozenset):
            return [kind.__name__, *self.describe_set(value)]
        return values.describe_data(value, self) or self._find_again(value) or self._describe_object(value)

    def _describe_items(self, items: Iterable[tuple[Any, Any]]) -> Iterator[list[Any]]:
        if self.is_of_members:  # their order may come from a set; `update_wrapper` adds the name of a module
            keys = [(json.dumps(self.walk(key)), item) for key, item in items if key != "__module__"]
            return ([key, self.walk(item)] for key, item in sorted(keys, key=operator.itemgetter(0)))
        return ([self.walk(key), self.walk(item)] for key, item in items)

    def _find_again(self, value: Any) -> list[Any] | None:
        """The reference to a value that was described here; None for another, which gets the next number."""
        met = self._at.met
        if id(value) in met:
            return ["again", met[id(value)][0]]
        met[id(value)] = len(met), value
        return None

    def describe_text(self, text: str) -> str:
        folder = self._at.folder if self.is_of_members else ""
        is_path = folder and (text == folder or text.startswith(folder + "/"))
        return "<folder>" + text[len(folder) :] if is_path else text

    def describe_set(self, items: Collection[Any]) -> list[Any]:
        if self._sets == _MOST_SETS:
            self.note("sets in sets, too deep to be described", "leads to")
            return []
        described, met = [], self._at.met
        count = len(met)
        self._sets += 1
        for item in items:
            described.append(self.walk(item))
            while len(met) > count:  # the order differs in each process: none is told by another's number
                met.popitem()
        self._sets -= 1
        return sorted(described, key=json.dumps)

    def _describe_object(self, value: Any) -> Any:
        return values.describe_object(value, self)

    def _describe_part(self, part: Any) -> Any:
        if isinstance(part, types.FunctionType):
            return self._describe_users_function(part)
        return self._describe_users_class(part) if isinstance(part, type) else self._describe_users_module(part)

    def _refer_to(self, value: Any) -> Any:
        """Refer to a function, class or module of the user's by its key; it becomes a part if it is none yet."""
        if id(value) not in self._keys:
            if isinstance(value, types.ModuleType):
                key = self._add_key(id(value), value, "module", modules.name_of(value))
            else:
                is_function = isinstance(value, types.FunctionType)
                file = value.__globals__.get("__file__") if is_function else modules.file_of(value)
                name = f"{modules.module_name(value.__module__, file)}.{value.__qualname__}"
                key = self._add_key(id(value), value, value.__qualname__, _number(name, self.names.values()))
            self.parts[key] = None  # its place: before what it uses
            self._queue.append(value)
        return ["part", self._keys[id(value)][0]]

    def _add_key(self, identity: Any, part: Any, what: str, name: str) -> str:
        key = _number(what, self.parts)
        self._keys[identity], self.names[key] = (key, part), name
        return key

    def _describe_function(self, function: types.FunctionType) -> Any:
        """Describe ours and those of installed packages by their names, with what they hold."""
        if ours.is_ours(function):
            named, held = ours.describe_ours(function), get_closure(function)
        elif modules.is_foreign_function(function):
            named = ["named", function.__globals__.get("__name__"), function.__code__.co_qualname]
            held = values.find_held(function)
        else:
            return self._refer_to(function)
        if not held:
            return named
        place = Place(function.__qualname__, met=self._at.met)
        return self._find_again(function) or [*named, self._describe_at(place, held)]

    def _describe_users_function(self, function: types.FunctionType) -> Any:
        code, names = function.__code__, function.__globals__
        use, file, package = find_use(code), names.get("__file__"), str(names.get("__package__") or "")
        module = modules.module_name(names.get("__name__"), file)
        self._at = Place(function.__qualname__, module, modules.folder_of(file), use.names)
        self._keep_file(module, code.co_filename)
        changed = {name for name in use.changed if isinstance(names.get(name), CONTAINERS)}
        for name in sorted(use.written | changed):  # what it returns may depend on what it did before
            self.written.add(f"{module}.{name}")
            self.note(f"the global {name!r}", "changes")
        for name in sorted(use.rebound):
            self.note(f"{name!r}, which it is a closure over", "changes")
        if (unseen := gaps.find_unseen_name(use.names)) is not None:
            self.note(unseen, "reads")
        self._path_methods += [(self._at.where, name) for name in sorted(use.names & gaps.PATH_METHODS)]
        if self.is_of_members:
            self.late.append((use, package))
            used = {}
        else:
            used = self._describe_imports(use, package)
        for chain in sorted(use.globals):
            if chain[0] in names and chain[0] != "__name__":
                used[".".join(chain)] = self._describe_chain(chain, names[chain[0]])
            else:
                used[chain[0]] = self._describe_builtin(chain[0])
        free = values.without(get_closure(function), *use.rebound)
        held = (function.__name__, code, function.__defaults__, function.__kwdefaults__, free, vars(function))
        described = [self.walk(value) for value in held]
        return ["function", function.__qualname__, described, dict(sorted(used.items()))]

    def _describe_builtin(self, name: str) -> Any:
        """Describe what a function reads that is no global of its module."""
        if name == "__name__":  # of a script another one than in what imports it
            return "module" if self.is_of_members else self._at.module
        value = getattr(builtins, name, None)
        if value is None:
            return self.note(f"the global {name!r}, which is not set yet", "reads")
        if isinstance(value, types.BuiltinFunctionType | type) and value.__module__ in ("builtins", "io", "_io"):
            return self.note(f"{unseen} ({name})", "reads") if (unseen := gaps.find_unseen(value)) else None
        return self.walk(value)  # somebody has put it there

    def _describe_imports(self, use: Use, package: str) -> dict[str, Any]:
        """Describe what a function imports when it runs; it would be imported for the first sample, too."""
        described: dict[str, Any] = {}
        for name, level, wanted in sorted(use.imports, key=repr):
            try:
                module = importlib.import_module("." * level + name, package if level else None)
            except Exception as error:
                self.note(f"{name}, which cannot be imported here ({type(error).__name__})", "imports")
                continue
            if wanted is None and "." in name:  # `import a.b` gives a
                module = sys.modules[module.__name__.partition(".")[0]]
            for chain in [(name, attribute) for attribute in wanted] if wanted else [(name,)]:
                described["import " + ".".join(chain)] = self._describe_chain(chain, module)
        return described

    def _describe_chain(self, chain: Chain, value: Any) -> Any:
        """Describe what a chain of attributes leads to, of which the first is a value's name."""
        if not isinstance(value, types.ModuleType):
            return self._describe_global(value, f"{self._at.module}.{chain[0]}")
        owner, last = value, chain[0]
        for name in chain[1:]:
            if not isinstance(value, types.ModuleType) or name == "__dict__":
                break
            owner, last = value, name
            self._keep_module(owner)
            if not hasattr(owner, name):
                self.note(f"{'.'.join(chain)}, which is not there yet", "reads")
                return "absent"
            value = getattr(owner, name)
        if ours.is_ours(owner) and isinstance(value, types.FunctionType | type) and ours.is_ours(value):
            return ours.describe_ours(value)
        if isinstance(value, types.ModuleType):
            return self._describe_module(value)
        self.has_paths |= isinstance(value, type) and issubclass(value, Path)
        if not modules.is_foreign_module(owner):
            return self._describe_global(value, f"{modules.name_of(owner)}.{last}")
        if (unseen := gaps.find_unseen(value)) is not None:
            self.note(f"{unseen} ({'.'.join(chain)})", "reads")
        return ["named", owner.__name__, last, self.walk(value) if modules.may_be_patch(value) else None]

    def _describe_global(self, value: Any, name: str) -> Any:
        """Describe a global of the user's by itself: what it shares with others does not count."""
        if name in self._left_out:
            return "written"
        described = self._describe_at(dataclasses.replace(self._at, met={}), value)
        if not self.is_of_members or isinstance(value, types.FunctionType | type | types.ModuleType):
            return described
        if name not in self._keys:
            self._add_key(name, value, name.rpartition(".")[2], name)
        self.parts[self._keys[name][0]] = described
        return ["part", self._keys[name][0]]

    def _keep_file(self, module: str, file: object) -> None:
        is_new = self.is_of_members and module not in self.files
        if is_new and isinstance(file, str) and file.endswith(".py") and Path(file).is_file():
            self.files[module] = Path(file)

    def _keep_module(self, module: types.ModuleType) -> None:
        if not modules.is_foreign_module(module):
            self._keep_file(modules.name_of(module), getattr(module, "__file__", None))

    def _describe_module(self, module: types.ModuleType) -> Any:
        """Describe a module of which anything may be used."""
        self._keep_module(module)
        if not modules.is_foreign_module(module):
            return self._refer_to(module)
        if not ours.is_ours(module) and (unseen := gaps.find_unseen_of(module, self._at.names)) is not None:
            self.note(unseen, "reads")
        return ["module", module.__name__]

    def _describe_users_module(self, module: types.ModuleType) -> Any:
        name = modules.name_of(module)
        self._at = Place(name, name, modules.folder_of(getattr(module, "__file__", None)))
        held = {
            key: self._describe_module(value)
            if isinstance(value, types.ModuleType)
            else self._describe_global(value, f"{name}.{key}")
            for key, value in sorted(vars(module).items())
            if not (key.startswith("__") and key.endswith("__")) or key == "__getattr__"
        }
        return ["module", held]

    def describe_class(self, cls: type) -> Any:
        self.has_paths |= issubclass(cls, Path)
        if ours.is_ours(cls):
            return ours.describe_ours(cls)
        if not modules.is_foreign_class(cls):
            return self._refer_to(cls)
        if cls not in self._patched:
            patched = self._patched[cls] = []  # while it is described
            items = [item for base in cls.__mro__ for item in sorted(vars(base).items())]
            patched += [[name, self._describe_function(item)] for name, item in items if modules.is_patch(item)]
        return ["named", cls.__module__, cls.__qualname__, *self._patched[cls]]

    def _describe_users_class(self, cls: type) -> Any:
        file = modules.file_of(cls)
        module = modules.module_name(cls.__module__, file)
        self._at = Place(cls.__qualname__, module, modules.folder_of(file))
        self._keep_file(module, file)
        defined: dict[str, Any] = {name: self.walk(item) for name, item in values.list_class_items(cls).items()}
        if isinstance(cls, abc.ABCMeta):
            registered = [reference() for reference in abc._get_dump(cls)[0]]  # type: ignore[attr-defined]
            defined["registered"] = self.describe_set(registered)
        if dataclasses.is_dataclass(cls):
            inherited = {field.name for field in ours.collect_inherited_fields(cls)}
            fields = [field for field in dataclasses.fields(cls) if field.name not in inherited]
            defined["fields"] = [self._describe_field(field) for field in fields]
        return ["class", cls.__qualname__, defined, [self.walk(base) for base in (*cls.__bases__, type(cls))]]

    def _describe_field(self, field: dataclasses.Field[Any]) -> list[Any]:
        defaults = [
            "none" if ours.is_missing(default) else ["default", self.walk(default)]
            for default in (field.default, field.default_factory)
        ]
        return [field.name, [field.init, field.repr, field.compare, field.hash, field.kw_only is True], *defaults]


def _number(name: str, taken: Collection[str]) -> str:
    """A name that is not taken: itself, or with a number."""
    numbers = (f" ({number})" if number > 1 else "" for number in itertools.count(1))
    return next(name + number for number in numbers if name + number not in taken)
