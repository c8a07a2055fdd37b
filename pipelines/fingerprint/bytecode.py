"""Describes the instructions of a function, and finds what it reads from outside, what it imports and writes.

A *chain* is a name from outside a function with the attributes that are taken of it at once: `helper.tables.small`
is the chain ("helper", "tables", "small"). Where a module is not followed by an attribute, it may be used in any
way.
"""

from __future__ import annotations

import bisect
import collections
import dis
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Instructions that depend on line numbers or on the build of Python.
_OMITTED = ("NOP", "CACHE", "RESUME", "EXTENDED_ARG", "PRECALL")
_CONTAINERS = (dict, list, set, bytearray, collections.deque, np.ndarray)
_MUTATORS = frozenset(
    (
        *("add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "extendleft"),
        *("insert", "intersection_update", "move_to_end", "pop", "popitem", "popleft", "remove"),
        *("reverse", "rotate", "setdefault", "sort", "subtract", "symmetric_difference_update", "update"),
    )
)


def describe_instructions(code: types.CodeType, describe: Callable[[Any], Any]) -> list[Any]:
    """Describe the instructions of a function as JSON: jumps by instruction number, constants by `describe`."""
    steps = [each for each in dis.get_instructions(code) if each.opname not in _OMITTED]
    offsets = [each.offset for each in steps]
    described: list[Any] = []
    for i, each in enumerate(steps):
        if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            described.append([each.opname, bisect.bisect_left(offsets, each.argval)])
        elif each.opcode in dis.hasconst:
            hidden = i + 1 < len(steps) and steps[i + 1].argval in ("__doc__", "__firstlineno__")
            described.append([each.opname, None if hidden else describe(each.argval)])
        else:
            described.append(
                [each.opname, each.argval if isinstance(each.argval, str | int) else str(each.argval)]
            )
    # What a `try` covers stands in no instruction.
    handlers = [
        [*(bisect.bisect_left(offsets, offset) for offset in (each.start, each.end, each.target)), each.depth]
        for each in dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    ]
    parameters = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x4) + bool(code.co_flags & 0x8)
    return [
        [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, list(code.co_varnames[:parameters])],
        code.co_flags & 0x2AC,
        described,
        handlers,
    ]


Chain = tuple[str, ...]


@dataclass(frozen=True)
class Use:
    """What a function uses from outside, with the functions inside it.

    Attributes:
        globals: chains of globals and builtins.
        closure: chains of variables of its closure.
        names: of all that it reads, attributes included; where it reads attributes by name, all its texts, too.
        loose: those of them that are attributes of other values than globals.
        imports: (module, level, names or None) of each import that it does when it runs.
        rebound: variables of its closure that it assigns.
    """

    globals: frozenset[Chain]
    closure: frozenset[Chain]
    names: frozenset[str]
    loose: frozenset[str]
    imports: frozenset[tuple[str, int, tuple[str, ...] | None]]
    rebound: frozenset[str]


_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_BY_NAME = frozenset(("getattr", "attrgetter", "methodcaller"))
_CLOSED = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")


@functools.lru_cache(maxsize=4096)
def find_use(code: types.CodeType) -> Use:
    """Returns what code uses from outside, with the functions inside it."""
    steps = [each for each in dis.get_instructions(code) if each.opname not in _OMITTED]
    used: dict[str, set[Chain]] = {"global": set(), "closed": set()}
    own = {"__name__"} if _is_class(code) else set()  # what the body of a class has bound so far
    imports, rebound, names, loose = set(), set(), set(), set()
    chained = 0  # up to where steps belong to a chain of a global
    for i, each in enumerate(steps):
        kind = "global" if each.opname in _GLOBAL else "closed" if each.opname in _CLOSED else None
        if kind is not None and each.argval not in own:
            end = i + 1
            while end < len(steps) and steps[end].opname in ("LOAD_ATTR", "LOAD_METHOD"):
                end += 1
            used[kind].add((each.argval, *(step.argval for step in steps[i + 1 : end])))
            chained = end if kind == "global" else chained
        elif each.opname == "STORE_NAME":
            own.add(each.argval)
        elif each.opname == "IMPORT_NAME":
            level, wanted = (before.argval for before in steps[i - 2 : i])
            imports.add((each.argval, level, wanted))
        elif each.opname in ("STORE_DEREF", "DELETE_DEREF"):
            rebound.add(each.argval)
        if each.opname in (*_GLOBAL, "LOAD_ATTR", "LOAD_METHOD"):
            names.add(each.argval)
            if i >= chained:
                loose.add(each.argval)
    if not names.isdisjoint(_BY_NAME):
        texts = {each for each in code.co_consts if isinstance(each, str)}
        names, loose = names | texts, loose | texts
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inside = find_use(constant)
            used["global"] |= inside.globals
            used["closed"] |= inside.closure
            names |= inside.names
            loose |= inside.loose
            imports |= inside.imports
            rebound |= inside.rebound
    shared = set(code.co_cellvars)  # with the functions inside it: no part of its own closure
    closed = {chain for chain in used["closed"] if chain[0] not in shared}
    return Use(
        frozenset(used["global"]),
        frozenset(closed),
        frozenset(names),
        frozenset(loose),
        frozenset(imports),
        frozenset(rebound - shared),
    )


def _is_class(code: types.CodeType) -> bool:
    """Whether it is the body of a class, which has names of its own."""
    return not code.co_flags & 0x2


def get_closure(function: types.FunctionType) -> dict[str, Any]:
    """Returns the closure of a function: variable -> value; None for one that is not bound yet."""
    return dict(zip(function.__code__.co_freevars, map(read_cell, function.__closure__ or ()), strict=True))


def read_cell(cell: types.CellType) -> Any:
    """What a cell of a closure holds; None for one that is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def find_written_globals(code: types.CodeType, names: Mapping[str, Any]) -> set[str]:
    """Returns the globals that code assigns, and the containers that it changes, also in the functions inside it.

    Args:
        names: the globals, by name.
    """
    steps = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "EXTENDED_ARG")]
    found = {each.argval for each in steps if each.opname == "STORE_GLOBAL"}
    found |= {name for name in _find_changed(steps) if isinstance(names.get(name), _CONTAINERS)}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= find_written_globals(constant, names)
    return found


def _find_changed(steps: list[dis.Instruction]) -> Iterator[str]:
    """Globals of which an item is set or removed, or a method is called that changes containers."""
    for i, each in enumerate(steps):
        holder = -1
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD") and each.argval in _MUTATORS:
            holder = i - 1
        elif each.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            holder = _find_step_before(steps, i)
        elif each.opname == "COPY" and [step.opname for step in steps[i + 1 : i + 3]] == ["COPY", "BINARY_SUBSCR"]:
            holder = _find_step_before(steps, i)  # of `x[key] += 1`
        if holder >= 0 and steps[holder].opname == "LOAD_GLOBAL":
            yield steps[holder].argval


def _find_step_before(steps: list[dis.Instruction], end: int) -> int:
    """The step before those that made the uppermost value of the stack at `end`; -1 where there is none."""
    wanted = 1
    for i in range(end - 1, -1, -1):
        each = steps[i]
        argument = each.arg if each.opcode >= dis.HAVE_ARGUMENT else None
        wanted -= dis.stack_effect(each.opcode, argument, jump=False)
        if wanted <= 0:
            return i - 1
    return -1
