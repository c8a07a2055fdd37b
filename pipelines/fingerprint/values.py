"""Describes values and objects as JSON values; functions, classes and modules are for `describer`.

Values of Python's own types and arrays are described by their content. Other objects go by their class and the
state that a pickled copy is made from.
"""

from __future__ import annotations

import abc
import collections.abc
import copyreg
import dataclasses
import enum
import functools
import hashlib
import io
import json
import re
import struct
import sys
import types
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from pipelines.fingerprint import gaps, modules, object_state, ours
from pipelines.fingerprint.bytecode import describe_instructions, read_cell

#: What Python puts into a class for its fields; the last is a named tuple's, whose module depends on the version.
_NAMED_FIELD = type(vars(collections.namedtuple("_", "field"))["field"])
SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType, _NAMED_FIELD)
_METHODS = (types.BuiltinMethodType, types.MethodWrapperType)
_UNBOUND = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
#: What Python keeps in a member of an enumeration.
_OF_MEMBERS = frozenset(("_name_", "_value_", "__objclass__", "_sort_order_"))
#: Values that hold others; more of them are a gap.
_MOST = 1_000_000
#: Sets within each other: their elements are described anew from each, so more of them would take for ever.
_MOST_SETS = 3
#: Bits of an integer that is written in digits; Python refuses to write more than 4,300 of these.
_MOST_BITS = 8192


class TooLarge(Exception):
    """Raised inside this package for an object that leads to too many others."""


def digest(description: Any) -> str:
    """A short name for a description."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


def describe_array(value: Any) -> Any:
    """A numpy array or scalar by its content, or a dtype; None for what is neither."""
    if isinstance(value, np.dtype):
        return ["dtype", str(value) if value.names is None else repr(value)]
    is_scalar = isinstance(value, np.generic)
    if is_scalar or type(value) in (np.ndarray, np.memmap):
        if value.dtype.hasobject:
            return None
        array = np.ascontiguousarray(value)
        layout = repr(array.dtype.descr) if array.dtype.names else str(array.dtype)
        kind = "scalar" if is_scalar else "array"
        content: Any = array.reshape(-1).view(np.uint8) if array.dtype.itemsize else b""  # no copy of its bytes
        return [kind, layout, list(np.shape(value)), hashlib.sha256(content).hexdigest()]
    return None


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a value was found: in which function or class, in which module.

    Attributes:
        names: that the code there reads, attributes included.
        met: of the containers and objects that were described there: id -> (number, value). Each is described once
            and is its number from then on, also within itself. That they are kept here keeps their ids theirs.
    """

    where: str = ""
    module: str = ""
    folder: str = ""
    names: frozenset[str] = frozenset()
    met: dict[int, tuple[int, Any]] = dataclasses.field(default_factory=dict)

    def find_again(self, value: Any) -> list[Any] | None:
        """The reference to a value that was described here; None for another, which gets the next number."""
        if (known := self.met.get(id(value))) is not None:
            return ["again", known[0]]
        self.met[id(value)] = len(self.met), value
        return None


class ValueDescriber(abc.ABC):
    """Describes values.

    Args:
        is_seeded: whether generators of random numbers are seeded before each use: their state says nothing.

    Attributes:
        gaps: what could not be described, in words.
    """

    def __init__(self, *, is_seeded: bool = False) -> None:
        self.gaps: list[str] = []
        self._is_seeded = is_seeded
        self._count = self._sets = 0  # values that hold others; sets within each other
        self._arrays: dict[int, tuple[Any, Any]] = {}  # id -> an array and its description: each is hashed once
        self._has_paths = False  # whether paths, or their class, are among what was described

    def _note(self, what: str, why: str, at: Place) -> None:
        """Notes a gap."""
        gap = f"{at.where or 'it'} {why} {what}"
        if gap not in self.gaps:
            self.gaps.append(gap)

    @abc.abstractmethod
    def _describe_function(self, function: types.FunctionType, at: Place) -> Any: ...

    @abc.abstractmethod
    def _describe_class(self, cls: type, at: Place) -> Any: ...

    @abc.abstractmethod
    def _describe_module(self, module: types.ModuleType) -> Any: ...

    def _describe_text(self, text: str, at: Place) -> str:
        return text

    def _describe_items(self, items: Iterable[tuple[Any, Any]], at: Place) -> list[Any]:
        return [[self._describe(key, at), self._describe(value, at)] for key, value in items]

    def _describe(self, value: Any, at: Place) -> Any:
        kind = type(value)
        if kind is int and value.bit_length() > _MOST_BITS:
            return ["int", hex(value)]
        if value is None or kind in (bool, int):
            return value
        if kind is str:
            return self._describe_text(value, at)
        if kind is float:
            return ["float", value.hex()]
        if kind is complex or value is ... or value is NotImplemented:
            return [kind.__name__, repr(value)]
        if kind in (bytes, bytearray):
            return [kind.__name__, hashlib.sha256(value).hexdigest()]
        if (unseen := gaps.find_unseen(value)) is not None:
            self._note(unseen, "reads", at)
            return ["unseen", unseen, str(getattr(value, "__qualname__", kind.__qualname__))]
        if kind is types.CodeType:
            return describe_instructions(value, lambda constant: self._describe(constant, at))
        if kind is types.FunctionType:
            return self._describe_function(value, at)
        if isinstance(value, type):
            return self._describe_class(value, at)
        if isinstance(value, types.ModuleType):
            return self._describe_module(value)
        self._count += 1
        if self._count > _MOST:
            raise TooLarge
        return self._describe_compound(value, at)

    def _describe_compound(self, value: Any, at: Place) -> Any:
        """Describes a value that contains other values."""
        kind = type(value)
        if kind in (list, dict, set) and (again := at.find_again(value)) is not None:
            return again
        if kind in (tuple, list):
            return [kind.__name__, *(self._describe(each, at) for each in value)]
        if kind in (dict, types.MappingProxyType):
            return [kind.__name__, *self._describe_items(value.items(), at)]
        if kind in (set, frozenset):
            return [kind.__name__, *self._describe_set(value, at)]
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
            return self._describe_cached(value, at)
        if kind is types.CellType:
            return ["cell", self._describe(read_cell(value), at)]
        if (described := self._describe_data(value, at)) is not None:
            return described
        if isinstance(value, (*_METHODS, *_UNBOUND)):
            return self._describe_builtin(value, at)
        if isinstance(value, SLOTS):
            return ["slot", value.__name__]
        if isinstance(value, enum.Enum):
            cls = self._describe_class(type(value), at)
            return ["member", cls, value.name, *self._describe_enumerated(value, at)]
        return at.find_again(value) or self._describe_object(value, at)

    def _describe_enumerated(self, value: enum.Enum, at: Place) -> list[Any]:
        """Describes the value of a member of an enumeration, and its attributes."""
        return [self._describe(each, at) for each in (value.value, object_state.without(vars(value), _OF_MEMBERS))]

    def _describe_set(self, value: Iterable[Any], at: Place) -> list[Any]:
        described, known = [], len(at.met)
        self._sets += 1
        for each in value if self._sets <= _MOST_SETS else ():
            described.append(self._describe(each, at))
            while len(at.met) > known:  # the order differs in each process: none is told by another's number
                at.met.popitem()
        if self._sets > _MOST_SETS:
            self._note("sets in sets, too deep to be described", "leads to", at)
        self._sets -= 1
        return sorted(described, key=json.dumps)

    def _describe_cached(self, value: Any, at: Place) -> Any:
        """Describes a function that `functools.lru_cache` decorates, without what is in the cache."""
        if ours.is_ours(value):
            return ours.describe_ours(value)
        options = value.cache_parameters()
        held = object_state.without(vars(value), ("__wrapped__", "cache_parameters"))
        return ["cached", *(self._describe(each, at) for each in (value.__wrapped__, options, held))]

    # -- data ---------------------------------------------------------------------------------------------------

    def _describe_data(self, value: Any, at: Place) -> Any:
        """Describes arrays, tensors and the like by their content; None for other values."""
        if (array := self._describe_array(value)) is not None:
            is_turned = isinstance(value, np.ndarray) and value.flags.fnc  # as in Fortran, and not as in C
            return [*array, "F"] if is_turned else array
        if type(value) is np.ndarray:  # of objects
            return ["objects", list(value.shape), *(self._describe(each, at) for each in value.ravel())]
        if isinstance(value, np.ndarray) and type(value).__qualname__ == "MaskedArray":
            masked: Any = value  # of which a copy has a value to fill with, where it has none yet
            parts = (masked.data, np.ma.getmaskarray(masked), masked.fill_value)
            return ["masked", *(self._describe(each, at) for each in parts)]
        if isinstance(value, re.Pattern):
            return ["pattern", self._describe(value.pattern, at), value.flags]
        if type(value) is struct.Struct:
            return ["struct", value.format]
        if isinstance(value, PurePath) and modules.is_foreign_class(type(value)):
            self._has_paths |= isinstance(value, Path)
            return ["path", self._describe_text(str(value), at)]
        if isinstance(value, np.ufunc):
            if getattr(np, value.__name__, None) is not value and type(value).__module__ == "numpy":
                self._note(f"the compiled function {value.__name__}", "uses", at)
            return ["named", "numpy", value.__name__]
        torch = object_state.find_torch()
        if torch is None:
            return None
        if isinstance(value, torch.Tensor):
            return self._describe_tensor(value, torch, at)
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)):
            return ["torch", repr(value)]
        return None

    def _describe_array(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return describe_array(value)
        if id(value) not in self._arrays:
            self._arrays[id(value)] = value, describe_array(value)
        return self._arrays[id(value)][1]

    def _describe_tensor(self, value: Any, torch: Any, at: Place) -> Any:
        kind = type(value)
        described = ["tensor", str(value.dtype), list(value.shape)]
        if kind not in (torch.Tensor, torch.nn.Parameter):
            described.append(self._describe_class(kind, at))
        if vars(value):
            described.append(self._describe(vars(value), at))
        try:
            if value.is_quantized:
                raise NotImplementedError
            plain = value.detach().cpu().as_subclass(torch.Tensor).contiguous()
            raw = plain.reshape(-1).view(torch.uint8).numpy()
        except (RuntimeError, NotImplementedError):  # its content cannot be read: meta, sparse
            self._note(f"a tensor whose values cannot be read ({value.layout}, {value.device})", "holds", at)
            return described
        return [*described, hashlib.sha256(raw).hexdigest()]

    def _describe_builtin(self, value: Any, at: Place) -> Any:
        """Describes a compiled function, or a method of a builtin with what it is bound to."""
        owner = getattr(value, "__self__", None)
        if isinstance(value, _UNBOUND):
            return ["named", value.__objclass__.__module__, value.__objclass__.__qualname__, value.__name__]
        if owner is not None and not isinstance(owner, types.ModuleType):
            return ["bound", self._describe(owner, at), value.__name__]
        module = getattr(value, "__module__", None)
        self._note_compiled(module, value.__qualname__, at)
        return ["named", str(module), value.__qualname__]

    def _note_compiled(self, module: str | None, name: str, at: Place) -> None:
        """Notes a gap for compiled code of the user's own."""
        if module and not modules.is_foreign(module, getattr(sys.modules.get(module), "__file__", None)):
            self._note(f"the compiled function {module}.{name}", "uses", at)

    # -- objects ------------------------------------------------------------------------------------------------

    def _describe_object(self, value: Any, at: Place) -> Any:
        """Describes an object by its class and state: what a pickled copy is made from, and what that lacks."""
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        is_foreign = modules.is_foreign_class(kind)
        if is_foreign and object_state.is_generator(value):
            if not self._is_seeded:
                what = f"a generator of random numbers ({kind.__qualname__}), which changes with each use"
                self._note(what, "holds", at)
            return ["generator", name, type(getattr(value, "bit_generator", None)).__qualname__]
        if is_foreign and isinstance(value, collections.abc.Iterator) and not isinstance(value, io.IOBase):
            self._note(f"an iterator ({name}), which changes with each use", "holds", at)
            return ["iterator", name]
        if kind.__module__.startswith("numba.") and hasattr(value, "py_func"):
            return ["numba", self._describe(value.py_func, at), self._describe(value.targetoptions, at)]
        described = self._describe_class(kind, at)
        if any(ours.is_ours(base) and dataclasses.is_dataclass(base) for base in kind.__mro__):
            bound = ours.collect_bound_values(value)
            if not ours.is_ours(kind):
                bound = {
                    **object_state.drop_cached(kind, object_state.join_state(object.__getstate__(value))),
                    **bound,
                }
            return ["dataclass", described, {name: self._describe(each, at) for name, each in bound.items()}]
        try:
            reduce = copyreg.dispatch_table.get(kind)
            state = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception as error:
            reason = str(error).partition("\n")[0][:80]
            self._note(f"an object of {name}, whose state cannot be read ({reason})", "holds", at)
            return ["object", described]
        lacking = (
            [] if is_foreign and not isinstance(value, np.ndarray) else [self._describe_lacking(value, state, at)]
        )
        if isinstance(state, str):  # it is pickled by its name
            if callable(value):
                self._note_compiled(getattr(value, "__module__", None), state, at)
            return ["named", described, state, *lacking]
        return ["object", described, *self._describe_state(value, state, at), *filter(None, lacking)]

    def _describe_state(self, value: Any, state: tuple[Any, ...], at: Place) -> list[Any]:
        """Describes the state of an object as `__reduce_ex__` gives it."""
        kind = type(value)
        make, arguments, held, items, pairs, restore = (*state, *(None,) * 6)[:6]
        if isinstance(value, (set, frozenset)):
            known = self._describe_set(value, at)
        else:
            known = [self._describe(each, at) for each in arguments if each is not kind]
        how = None if make is copyreg.__newobj__ else self._describe(make, at)  # type: ignore[attr-defined]
        if isinstance(held, dict):
            held = object_state.number_hooks(object_state.drop_cached(kind, held))
            if modules.is_foreign_class(kind):
                held = object_state.drop_accidents(value, held)
        listed = None if items is None else [self._describe(each, at) for each in items]
        paired = None if pairs is None else self._describe_items(pairs, at)
        return [how, known, self._describe(held, at), listed, paired, self._describe(restore, at)]

    def _describe_lacking(self, value: Any, state: Any, at: Place) -> dict[str, Any]:
        """Describes attributes that copies lack or have otherwise; handles are opened again by each copy."""
        told = {} if isinstance(state, str) else object_state.join_state((*state, None)[2])
        own = object_state.drop_cached(type(value), object_state.join_state(object.__getstate__(value)))
        return {
            name: self._describe(each, at)
            for name, each in own.items()
            if (name not in told or told[name] is not each) and not object_state.is_handle(each)
        }
