"""Describes data and objects for `describer`: what values hold, and the state of objects without accidents."""

from __future__ import annotations

import collections.abc
import copyreg
import dataclasses
import enum
import functools
import hashlib
import io
import random
import struct
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.fingerprint import modules, ours
from pipelines.fingerprint.instructions import get_closure, read_cell

if TYPE_CHECKING:
    from pipelines.fingerprint.describer import Describer

#: What calls the function that `functools.singledispatch` finds in its registry.
_DISPATCHES = functools.singledispatch(abs).__code__  # type: ignore[attr-defined]
#: What Python, torch and pydantic, not its author, put into a class, and what says nothing of what it does.
# fmt: off
_MACHINERY = (
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__slotnames__", "__dataclass_fields__", "__dataclass_params__",
    "__abstractmethods__", "_abc_impl", "__classdictcell__", "__classcell__", "__firstlineno__",
    "__static_attributes__", "__parameters__", "__type_params__", "__name__", "_is_protocol", "_backward_cls",
    "_autograd_function_id", "__pydantic_core_schema__", "__pydantic_serializer__", "__pydantic_validator__",
    ours.NAME_ATTRIBUTE,
)
# fmt: on
#: What Python puts into an enumeration, of which the members are described.
# fmt: off
_OF_ENUM = (
    "_generate_next_value_", "_member_names_", "_member_map_", "_value2member_map_", "_member_type_",
    "_unhashable_values_", "_hashable_values_", "_use_args_", "_value_repr_", "__new__", "_new_member_",
)
# fmt: on


def digest_bytes(content: Any) -> str:
    """64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def without(held: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A dict without some of its names."""
    return {name: value for name, value in held.items() if name not in names}


#: Types of values that hold no others -> their content as a text.
LEAVES: dict[type, Callable[[Any], str]] = {
    **dict.fromkeys((complex, type(...), type(NotImplemented)), repr),
    **dict.fromkeys((bytes, bytearray), digest_bytes),
    int: hex,
    float: float.hex,
}
#: Types of values that are what they hold -> that.
HOLDERS: dict[type, Callable[[Any], Iterable[Any]]] = {
    tuple: iter,
    list: iter,
    types.MethodType: lambda method: (method.__func__, method.__self__),
    types.CellType: lambda cell: (read_cell(cell),),
    staticmethod: lambda method: (method.__func__,),
    classmethod: lambda method: (method.__func__,),
    property: lambda item: (item.fget, item.fset, item.fdel),
    functools.cached_property: lambda item: (item.func,),
    functools.partial: lambda item: (item.func, item.args, item.keywords, vars(item)),
    functools._lru_cache_wrapper: lambda cached: (
        *(cached.__wrapped__, cached.cache_parameters()),
        without(vars(cached), "__wrapped__", "cache_parameters", "__module__"),
    ),
    struct.Struct: lambda item: (item.format,),
}


def describe_array(value: Any) -> Any:
    """A numpy array or scalar by its content, or a dtype; None for what is neither."""
    if isinstance(value, np.dtype):
        return ["dtype", str(value) if value.names is None else repr(value)]
    is_scalar = isinstance(value, np.generic)
    if not (is_scalar or type(value) in (np.ndarray, np.memmap)) or value.dtype.hasobject:
        return None
    array = np.ascontiguousarray(value)
    layout = repr(array.dtype.descr) if array.dtype.names else str(array.dtype)
    content: Any = array.reshape(-1).view(np.uint8) if array.dtype.itemsize else b""  # no copy of its bytes
    return ["scalar" if is_scalar else "array", layout, list(np.shape(value)), digest_bytes(content)]


def find_torch() -> Any:
    """The module, if it is imported; while another thread imports it no value can be one of its objects."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "nn") else None  # of what is used here it is what comes last


def list_class_items(cls: type) -> dict[str, Any]:
    """What the author of a class, not Python or a library, has put into it, by name; members of an enumeration."""
    items = without(vars(cls), *_MACHINERY)
    if issubclass(cls, enum.Enum):
        items = without(items, *_OF_ENUM, *cls.__members__) | {"members": dict(cls.__members__)}
    if dataclasses.is_dataclass(cls):  # methods that follow from its fields
        items = {name: item for name, item in items.items() if not _is_generated(item)}
    return dict(sorted(items.items()))


def _is_generated(item: Any) -> bool:
    return isinstance(item, types.FunctionType) and item.__code__.co_qualname.startswith("__create_fn__.")


def find_held(function: types.FunctionType) -> dict[str, Any]:
    """What a function of an installed package holds, such as what it decorates, and its name says nothing of.

    Its defaults and attributes follow from its name, too, unless another function has made it.
    """
    code = function.__code__
    if code is _DISPATCHES:
        return {"registry": dict(function.registry)}  # type: ignore[attr-defined]
    held = {name: value for name, value in get_closure(function).items() if value is not None}
    defaults = {f"default {i}": value for i, value in enumerate(function.__defaults__ or ())}
    if "<" not in code.co_qualname:
        return held | {name: value for name, value in defaults.items() if callable(value)}
    defaults |= {f"default {name}": value for name, value in (function.__kwdefaults__ or {}).items()}
    attributes = {name: value for name, value in vars(function).items() if not name.startswith("_torchdynamo")}
    return held | defaults | attributes | ({"code": code} if code.co_name == "<lambda>" else {})


def describe_data(value: Any, describer: Describer) -> Any:
    """Describe arrays, tensors and the like by their content; None for other values."""
    torch = find_torch()
    if isinstance(value, np.ndarray | np.generic | np.dtype):
        return _describe_array(value, describer)
    if isinstance(value, PurePath) and modules.is_foreign_class(type(value)):
        describer.has_paths |= isinstance(value, Path)
        return ["path", describer.describe_text(str(value))]
    if torch is not None and isinstance(value, torch.Tensor):
        return _describe_tensor(value, torch, describer)
    if torch is not None and isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return ["torch", repr(value)]
    return None


def _describe_array(value: Any, describer: Describer) -> Any:
    if type(value).__qualname__ == "MaskedArray":  # its copy has a value to fill with, where it has none
        return ["masked", *map(describer.walk, (value.data, np.ma.getmaskarray(value), value.fill_value))]
    if type(value) is np.ndarray and value.dtype.hasobject:
        return ["objects", list(value.shape), *map(describer.walk, value.ravel())]
    if id(value) not in describer.arrays:
        describer.arrays[id(value)] = value, describe_array(value)
    described = describer.arrays[id(value)][1]
    is_turned = described and isinstance(value, np.ndarray) and value.flags.fnc  # as in Fortran, not as in C
    return [*described, "F"] if is_turned else described


def _describe_tensor(value: Any, torch: Any, describer: Describer) -> Any:
    described = ["tensor", str(value.dtype), list(value.shape), describer.walk(vars(value))]
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        described.append(describer.describe_class(type(value)))
    try:
        if value.is_quantized:
            raise NotImplementedError
        plain = value.detach().cpu().as_subclass(torch.Tensor).contiguous()
        return [*described, digest_bytes(plain.reshape(-1).view(torch.uint8).numpy())]
    except (RuntimeError, NotImplementedError):  # its content cannot be read: meta, sparse
        describer.note(f"a tensor whose values cannot be read ({value.layout}, {value.device})", "holds")
        return described


def describe_object(value: Any, describer: Describer) -> Any:
    """Describe an object by its class and state: what a pickled copy is made from, and what that lacks."""
    kind = type(value)
    name, is_foreign = f"{kind.__module__}.{kind.__qualname__}", modules.is_foreign_class(kind)
    if is_foreign and _is_generator(value):
        if not describer.is_seeded:
            describer.note(
                f"a generator of random numbers ({kind.__qualname__}), which changes with each use", "holds"
            )
        return ["generator", name, type(getattr(value, "bit_generator", None)).__qualname__]
    if is_foreign and _is_stream(value):
        describer.note(f"an iterator ({name}), which changes with each use", "holds")
        return ["iterator", name]
    if kind.__module__.startswith("numba.") and hasattr(value, "py_func"):
        return ["numba", describer.walk(value.py_func), describer.walk(value.targetoptions)]
    cls = describer.describe_class(kind)
    if any(ours.is_ours(base) and dataclasses.is_dataclass(base) for base in kind.__mro__):
        own = {} if ours.is_ours(kind) else _read_attributes(value)
        bound = own | ours.collect_bound_values(value)
        return ["dataclass", cls, {name: describer.walk(held) for name, held in bound.items()}]
    try:
        reduce: Any = copyreg.dispatch_table.get(kind)
        reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception as error:
        reason = str(error).partition("\n")[0][:80]
        describer.note(f"an object of {name}, whose state cannot be read ({reason})", "holds")
        return ["object", cls]
    state, copied = reduced, dict[str, Any]()
    if isinstance(reduced, str):  # it is pickled by its name
        module = getattr(value, "__module__", None)
        file = getattr(sys.modules.get(str(module)), "__file__", None)
        is_compiled = callable(value) and module and not modules.is_foreign(module, file)
        if is_compiled or (isinstance(value, np.ufunc) and getattr(np, reduced, None) is not value):
            describer.note(f"the compiled function {module}.{reduced}", "uses")
        state = [module, reduced]
    else:
        state, copied = _clean_state(value, reduced), _join_state((*reduced, None)[2])
    lacking = {
        name: held
        for name, held in ({} if is_foreign or describer.is_of_members else _read_attributes(value)).items()
        if copied.get(name, copied) is not held and not _is_handle(held)
    }
    return ["object", cls, *map(describer.walk, [*state, lacking])]


def _is_generator(value: Any) -> bool:
    """Whether it makes random numbers."""
    torch = find_torch()
    kinds = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
    return isinstance(value, kinds if torch is None else (*kinds, torch.Generator))


def _is_stream(value: Any) -> bool:
    """Whether it is an iterator, which changes with each use."""
    return isinstance(value, collections.abc.Iterator) and not isinstance(value, io.IOBase)


def _clean_state(value: Any, reduced: tuple[Any, ...]) -> list[Any]:
    """The state of an object as `__reduce_ex__` gives it, without what differs between processes."""
    kind = type(value)
    make, arguments, held, items, pairs, restore = (*reduced, *(None,) * 6)[:6]
    make = None if make is copyreg.__newobj__ else make  # type: ignore[attr-defined]
    arguments = [argument for argument in arguments if argument is not kind]
    if isinstance(value, set | frozenset):
        arguments = [frozenset(value)]
    if isinstance(held, dict):
        held = _number_hooks(_drop_cached(kind, held))
    if isinstance(held, dict) and modules.is_foreign_class(kind):
        # Albumentations fills a table of its own methods from a set; scikit-learn keeps an address, and
        # `np.vectorize` what it has made at its first use.
        kept = without(held, "_stop_words_id", "_ufunc")
        held = {name: _sort_methods(value, table) for name, table in kept.items()}
    is_dict = isinstance(value, dict) and not isinstance(value, collections.OrderedDict)
    return [make, arguments, held, items and list(items), pairs and (dict if is_dict else list)(pairs), restore]


def _read_attributes(value: Any) -> dict[str, Any]:
    """All attributes of an object, those in slots included."""
    return _drop_cached(type(value), _join_state(object.__getstate__(value)))


def _is_handle(value: Any) -> bool:
    """Whether it is an installed package's object that cannot be copied: an open file, a lock, a connection."""
    if _is_stream(value) or not modules.is_foreign_class(type(value)):
        return False
    try:
        value.__reduce_ex__(4)
    except Exception:
        return True
    return False


def _join_state(state: Any) -> dict[str, Any]:
    """The attributes in the default state of an object; empty for another state."""
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    return {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}


def _drop_cached(kind: type, held: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an object without what `functools.cached_property` keeps there, which follows from the rest."""
    return without(held, *_find_cached_properties(kind))


@functools.lru_cache(maxsize=1024)
def _find_cached_properties(kind: type) -> list[str]:
    items = [item for base in kind.__mro__ for item in vars(base).items()]
    return [name for name, item in items if isinstance(item, functools.cached_property)]


def _number_hooks(held: dict[str, Any]) -> dict[str, Any]:
    """The state of a torch module with its hooks numbered from 0, and not by how many the process has made."""
    hooks = {name: table for name, table in held.items() if "_hooks" in name and isinstance(table, dict)}
    keys = sorted({key for table in hooks.values() for key in table if type(key) is int})
    return held | {
        name: {keys.index(key) if type(key) is int else key: hook for key, hook in table.items()}
        for name, table in hooks.items()
        if keys
    }


def _sort_methods(owner: Any, table: Any) -> Any:
    is_table = type(table) is dict and all(
        type(name) is str and (isinstance(item, types.FunctionType) or getattr(item, "__self__", None) is owner)
        for name, item in table.items()
    )
    return dict(sorted(table.items())) if is_table else table
