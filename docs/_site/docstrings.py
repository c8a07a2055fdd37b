"""An extension of griffe, which reads the docstrings: two habits of this project that it does not know.

`Example:` is the section that griffe calls `Examples:`. An entry `rank, world: text` of a section describes each
of its names, and becomes one entry for each.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"^    (?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n     .*|\n(?=\n     ))*)", re.MULTILINE)


def mend(text: str) -> str:
    """A docstring as griffe knows it."""
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    return ENTRY.sub(_divide, text)


def _divide(entry: re.Match[str]) -> str:
    return "\n".join(f"    {name}: {entry['text']}" for name in entry["names"].split(", "))


class Docstrings(griffe.Extension):
    """Mends each docstring when it is found."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = mend(obj.docstring.value)
