"""Describes the instructions of a function, and finds the globals that it reads and those that it writes."""

from __future__ import annotations

import collections
import dis
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

#: Instructions that depend on line numbers or on the build of Python.
_OMITTED = ("NOP", "CACHE", "RESUME", "EXTENDED_ARG", "PRECALL")
_CONTAINERS = (dict, list, set, bytearray, collections.deque)
_MUTATORS = frozenset(
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


def describe_instructions(code: types.CodeType, describe: Callable[[Any], Any]) -> list[Any]:
    """Describe the instructions of a function as JSON: jumps by instruction number, constants by `describe`."""
    steps = [each for each in dis.get_instructions(code) if each.opname not in _OMITTED]
    number = {each.offset: i for i, each in enumerate(steps)}
    offsets = sorted(number)
    described: list[Any] = []
    for i, each in enumerate(steps):
        if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            target = next((number[offset] for offset in offsets if offset >= each.argval), len(steps))
            described.append([each.opname, target])
        elif each.opcode in dis.hasconst:
            hidden = i + 1 < len(steps) and steps[i + 1].argval in ("__doc__", "__firstlineno__")
            described.append([each.opname, None if hidden else describe(each.argval)])
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


def find_read_globals(code: types.CodeType) -> list[str]:
    """Returns the names of the globals that code reads, also in the functions inside it."""
    names = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= set(find_read_globals(constant))
    return sorted(names)


def find_names(code: types.CodeType) -> set[str]:
    """Returns the names that code contains, those of attributes included, also in the functions inside it."""
    inner = (find_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def get_closure(function: types.FunctionType) -> dict[str, Any]:
    """Returns the closure of a function: variable -> value; None for one that is not bound yet."""
    return dict(zip(function.__code__.co_freevars, map(_read_cell, function.__closure__ or ()), strict=True))


def _read_cell(cell: types.CellType) -> Any:
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
