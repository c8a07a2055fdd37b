"""Describes the instructions of a function, and finds what they read from outside, import and change.

A *chain* is a global with the attributes that are read of it at once: `helper.tables.small` is the chain
("helper", "tables", "small").
"""

from __future__ import annotations

import bisect
import collections
import dis
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Chain = tuple[str, ...]

#: Instructions that depend on line numbers or on the build of Python.
_OMITTED = ("NOP", "CACHE", "RESUME", "EXTENDED_ARG", "PRECALL")
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_BY_NAME = frozenset(("getattr", "attrgetter", "methodcaller"))
#: Types that code changes in place, and the names of the methods that do.
CONTAINERS = (dict, list, set, bytearray, collections.deque, np.ndarray)
_MUTATORS = frozenset(
    (
        *("add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "extendleft"),
        *("insert", "intersection_update", "move_to_end", "pop", "popitem", "popleft", "remove"),
        *("reverse", "rotate", "setdefault", "sort", "subtract", "symmetric_difference_update", "update"),
    )
)


def describe_instructions(code: types.CodeType, describe: Callable[[Any], Any]) -> list[Any]:
    """Describe the instructions of a function as JSON: jumps by instruction number, constants by `describe`."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _OMITTED]
    offsets = [step.offset for step in steps]
    described: list[Any] = []
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        argument = step.argval
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            argument = bisect.bisect_left(offsets, argument)
        elif step.opcode in dis.hasconst:
            is_hidden = following is not None and following.argval in ("__doc__", "__firstlineno__")
            argument = None if is_hidden else describe(argument)
        elif not isinstance(argument, str | int):
            argument = str(argument)
        described.append([step.opname, argument])
    # What a `try` covers stands in no instruction.
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    handlers = [
        [*(bisect.bisect_left(offsets, offset) for offset in (entry.start, entry.end, entry.target)), entry.depth]
        for entry in entries
    ]
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x4) + bool(code.co_flags & 0x8)
    parameters = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_varnames[:count]]
    return [parameters, code.co_flags & 0x2AC, described, handlers]


@dataclass(frozen=True)
class Use:
    """What a function uses from outside, with the functions inside it.

    Attributes:
        globals: chains of globals and builtins.
        names: of all that it reads, attributes included; where it reads attributes by name, all its texts, too.
        imports: (module, level, names or None) of each import that it does when it runs.
        rebound: variables of its closure that it assigns.
        written: globals that it assigns.
        changed: globals of which it changes the content, where they are `CONTAINERS`.
    """

    globals: set[Chain] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    imports: set[tuple[str, int, tuple[str, ...] | None]] = field(default_factory=set)
    rebound: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)


@functools.lru_cache(maxsize=4096)
def find_use(code: types.CodeType) -> Use:
    """Return what code uses from outside, with the functions inside it."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("NOP", "CACHE", "EXTENDED_ARG")]
    use = Use(changed=set(_find_changed(steps)))
    is_class = not code.co_flags & 0x2
    bound = {"__name__"} if is_class else set()  # what the body of a class has bound so far
    for i, step in enumerate(steps):
        if step.opname in (*_GLOBAL, *_ATTRIBUTE):
            use.names.add(step.argval)
        if step.opname in _GLOBAL and step.argval not in bound:
            end = i + 1
            while end < len(steps) and steps[end].opname in _ATTRIBUTE:
                end += 1
            use.globals.add((step.argval, *(attribute.argval for attribute in steps[i + 1 : end])))
        elif step.opname == "STORE_NAME":
            bound.add(step.argval)
        elif step.opname == "STORE_GLOBAL":
            use.written.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            use.imports.add((step.argval, steps[i - 2].argval, steps[i - 1].argval))
        elif step.opname in ("STORE_DEREF", "DELETE_DEREF"):
            use.rebound.add(step.argval)
    if not use.names.isdisjoint(_BY_NAME):
        use.names.update(constant for constant in code.co_consts if isinstance(constant, str))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for name, inner in vars(find_use(constant)).items():
                getattr(use, name).update(inner)
    use.rebound.difference_update(code.co_cellvars)  # which it shares with the functions inside it
    return use


def _find_changed(steps: list[dis.Instruction]) -> Iterator[str]:
    """Globals of which an item is set or removed, or a method is called that changes containers."""
    for i, step in enumerate(steps):
        holder = -1
        if step.opname in _ATTRIBUTE and step.argval in _MUTATORS:
            holder = i - 1
        elif (
            step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR")
            or (  # or `x[key] += 1`
                step.opname == "COPY"
                and [later.opname for later in steps[i + 1 : i + 3]] == ["COPY", "BINARY_SUBSCR"]
            )
        ):
            holder = _find_step_before(steps, i)
        if holder >= 0 and steps[holder].opname == "LOAD_GLOBAL":
            yield steps[holder].argval


def _find_step_before(steps: list[dis.Instruction], end: int) -> int:
    """The step before those that made the uppermost value of the stack at `end`; -1 where there is none."""
    missing = 1
    for i in range(end - 1, -1, -1):
        argument = steps[i].arg if steps[i].opcode >= dis.HAVE_ARGUMENT else None
        missing -= dis.stack_effect(steps[i].opcode, argument, jump=False)
        if missing <= 0:
            return i - 1
    return -1


def get_closure(function: types.FunctionType) -> dict[str, Any]:
    """Return the closure of a function: variable -> value; None for one that is not bound yet."""
    return dict(zip(function.__code__.co_freevars, map(read_cell, function.__closure__ or ()), strict=True))


def read_cell(cell: types.CellType) -> Any:
    """What a cell of a closure holds; None for one that is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
