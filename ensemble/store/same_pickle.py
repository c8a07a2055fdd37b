"""Compares two pickles of a declaration, neither of which is loaded.

Two processes pickle one declaration differently: ids that are made anew in each are in it (of pipelines, and of
classes by value), and the texts of a set come in another order. What else differs is another declaration.
"""

from __future__ import annotations

import io
import pickletools
import re
from collections.abc import Collection
from typing import Any

_ID = re.compile(r"[0-9a-f]{32}")
#: Operations that push a value that the pickle has in itself, with its kind.
_VALUES = (
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
)
_GETS, _LAYOUT = ("BINGET", "LONG_BINGET"), ("PROTO", "FRAME")

#: An operation, and its argument.
_Op = tuple[str, Any]


def find_renaming(new: bytes, old: bytes, ids: Collection[str]) -> dict[str, str] | None:
    """What ids of one pickle are called in another that is the same but for them; None where it is not the same.

    Args:
        ids: of `new`; each of 32 hexadecimal digits, as those of `old` are.
    """
    try:
        ours, theirs = _read(new), _read(old)
    except (ValueError, IndexError):
        return None
    renamed: dict[str, str] = {}
    if len(ours) != len(theirs):
        return None
    for (name, value), (other, theirs_value) in zip(ours, theirs, strict=True):
        if name == other == "SHORT_BINUNICODE" and value in ids and _ID.fullmatch(theirs_value):
            if renamed.setdefault(value, theirs_value) != theirs_value:
                return None
        elif (name, value) != (other, theirs_value):
            return None
    return renamed if len(set(renamed.values())) == len(renamed) else None


def rename(content: bytes, renamed: dict[str, str]) -> bytes:
    """A pickle with other ids."""
    known = {old.encode(): new.encode() for old, new in renamed.items()}
    return re.sub(rb"[0-9a-f]{32}", lambda found: known.get(found[0], found[0]), content) if known else content


def _read(content: bytes) -> list[_Op]:
    """The operations of all pickles in a file, with values in the place of references to them.

    Raises:
        ValueError, IndexError: it is none, or of another protocol.
    """
    ops: list[_Op] = []
    memo: list[_Op] = []
    file = io.BytesIO(content)
    while file.tell() < len(content):
        for opcode, value, _ in pickletools.genops(file):
            name = opcode.name
            if name in _LAYOUT:
                continue
            if name == "MEMOIZE":
                is_value = ops[-1][0] in _VALUES
                memo.append(ops[-1] if is_value else ("memo", len(memo)))
                ops += [] if is_value else [(name, None)]
            elif name in _GETS:
                ops.append(memo[int(value or 0)])
            elif "PUT" in name or name == "GET":
                raise ValueError(name)
            else:
                ops.append((name, repr(value) if name == "BINFLOAT" else value))
                if name in ("FROZENSET", "ADDITEMS"):
                    _sort_values(ops)
    return ops


def _sort_values(ops: list[_Op]) -> None:
    """Sort the items of a set, the operation that ends the list, if they are all values."""
    first = len(ops) - 1
    while ops[first - 1][0] in _VALUES:
        first -= 1
    if ops[first - 1][0] == "MARK":
        ops[first:-1] = sorted(ops[first:-1], key=repr)
