"""Finds the globals that a function reads, and those that it writes, whose values are state and not code."""

from __future__ import annotations

import collections
import dis
import types
from collections.abc import Iterator, Mapping
from typing import Any

_CONTAINERS = (dict, list, set, bytearray, collections.deque)
_WRITE = frozenset(
    (
        "add",
        "append",
        "appendleft",
        "clear",
        "difference_update",
        "discard",
        "extend",
        "extendleft",
        "insert",
        "intersection_update",
        "move_to_end",
        "pop",
        "popitem",
        "popleft",
        "remove",
        "reverse",
        "rotate",
        "setdefault",
        "sort",
        "subtract",
        "symmetric_difference_update",
        "update",
    )
)


def read_globals(code: types.CodeType) -> list[str]:
    """Globals that code reads, also in the functions inside it."""
    names = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= set(read_globals(constant))
    return sorted(names)


def attributes(code: types.CodeType) -> set[str]:
    """Names that code has in it, those of attributes among them, also in the functions inside it."""
    inner = (attributes(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def closed_over(function: types.FunctionType) -> dict[str, Any]:
    """The closure of a function: variable -> value; None for one that is not bound yet."""
    return dict(zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=True))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def written_globals(code: types.CodeType, names: Mapping[str, Any]) -> set[str]:
    """Globals that code stores, and containers among them that it changes; also in the functions inside it.

    Args:
        names: the globals, by name.
    """
    steps = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "EXTENDED_ARG")]
    found = {each.argval for each in steps if each.opname == "STORE_GLOBAL"}
    found |= {name for name in _changed(steps) if isinstance(names.get(name), _CONTAINERS)}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= written_globals(constant, names)
    return found


def _changed(steps: list[dis.Instruction]) -> Iterator[str]:
    """Globals of which an item is set or removed, or a method is called that changes containers."""
    for i, each in enumerate(steps):
        holder = -1
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD") and each.argval in _WRITE:
            holder = i - 1
        elif each.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            holder = _before(steps, i)
        elif each.opname == "COPY" and [step.opname for step in steps[i + 1 : i + 3]] == ["COPY", "BINARY_SUBSCR"]:
            holder = _before(steps, i)  # of `x[key] += 1`
        if holder >= 0 and steps[holder].opname == "LOAD_GLOBAL":
            yield steps[holder].argval


def _before(steps: list[dis.Instruction], end: int) -> int:
    """The step before those that made the uppermost value of the stack at `end`; -1 where there is none."""
    wanted = 1
    for i in range(end - 1, -1, -1):
        each = steps[i]
        argument = each.arg if each.opcode >= dis.HAVE_ARGUMENT else None
        wanted -= dis.stack_effect(each.opcode, argument, jump=False)
        if wanted <= 0:
            return i - 1
    return -1
