"""Lays out tables of texts that may come from users' code.

A run may have ten thousand members, of which a table of rich would take seconds.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ensemble.reporting.text import visible

GAP = 2  # blanks between columns
NARROWEST = 8  # of a column of texts that may be folded


@dataclass(frozen=True)
class Column:
    """A column of texts.

    Attributes:
        is_number: whether it is aligned on the right.
        folds_to: width down to which its texts are folded where there is no room; None: they stay in one line.
        spare: columns with a larger number are left out first where there is no room; 0: never.
        most_lines: that a folded text has; the end of a longer one is cut off. None: as many as it needs.
    """

    head: str
    cells: Sequence[str]
    is_number: bool = False
    folds_to: int | None = None
    spare: int = 0
    most_lines: int | None = None

    @cached_property
    def texts(self) -> list[str]:
        """The head and the cells, each a line without control characters."""
        return [visible(cell).replace("\n", "\\n") for cell in (self.head, *self.cells)]

    @cached_property
    def size(self) -> int:
        """The width of the widest of them."""
        return max(map(_measure, self.texts))

    def list_lines(self, size: int) -> list[list[str]]:
        """The lines of each text, folded and filled up to this width."""
        folded = ([text] if size >= self.size else _fold(text, size, self.most_lines) for text in self.texts)
        return [[self._fill(line, size) for line in lines] for lines in folded]

    def _fill(self, line: str, size: int) -> str:
        characters = size - _measure(line) + len(line)
        return line.rjust(characters) if self.is_number else line.ljust(characters)


def fit(columns: Sequence[Column], width: int | None = None) -> list[Column]:
    """Returns the columns for which there is room, in their order; see `lay_out`."""
    shown = list(columns)
    for column in sorted(
        (candidate for candidate in columns if candidate.spare), key=lambda candidate: -candidate.spare
    ):
        least = (min(candidate.size, candidate.folds_to or candidate.size) for candidate in shown)
        if width is not None and sum(least) + GAP * (len(shown) - 1) > width:
            shown.remove(column)
    return shown


def lay_out(columns: Sequence[Column], width: int | None = None) -> list[str]:
    """Returns the head and the rows, each as one text, of several lines where texts are folded.

    Args:
        width: columns of the terminal; None: as many as it needs. What cannot be folded or left out is wider.
    """
    shown = fit(columns, width)
    sizes = [column.size for column in shown]
    if width is not None:
        _fold_widest(sizes, shown, width - GAP * (len(shown) - 1))
    rows = zip(*(column.list_lines(size) for column, size in zip(shown, sizes, strict=True)), strict=True)
    blanks = [" " * size for size in sizes]
    return ["\n".join(_join(row, blanks)) for row in rows]


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """A table of texts, the columns aligned on the left; a text is one line, unless it is folded.

    Args:
        width: columns that it has at most, for which long texts are folded; None: as many as it needs.
    """
    columns = zip(head, *rows, strict=True)
    return "\n".join(lay_out([Column(name, cells, folds_to=NARROWEST) for name, *cells in columns], width))


def _join(row: Sequence[Sequence[str]], blanks: Sequence[str]) -> list[str]:
    """The lines of a row; texts that have fewer are filled up with blanks."""
    lines = (zip(line, blanks, strict=True) for line in itertools.zip_longest(*row))
    return [(" " * GAP).join(cell or blank for cell, blank in line).rstrip() for line in lines]


def _fold_widest(sizes: list[int], columns: Sequence[Column], room: int) -> None:
    """Makes the widest columns narrower, one after another, until there is room or none can be."""
    while (excess := sum(sizes) - room) > 0:
        able = [at for at, column in enumerate(columns) if column.folds_to and sizes[at] > column.folds_to]
        if not able:
            return
        widest, *others = sorted(able, key=lambda at: -sizes[at])
        following = sizes[others[0]] if others else 0
        least = max(columns[widest].folds_to or 0, sizes[widest] - excess)
        sizes[widest] = max(least, min(following, sizes[widest] - 1))


def _fold(text: str, size: int, most: int | None = None) -> list[str]:
    """The lines of a text, each of at most `size` columns: between words, and within those that are longer.

    Of more than `most` lines, the last one ends with an ellipsis.
    """
    lines, line = list[str](), ""
    for word in text.split(" "):
        while _measure(f"{line} {word}".lstrip()) > size:
            if line:
                lines, line = [*lines, line], ""
            else:
                at = next(at for at in range(len(word), 0, -1) if at == 1 or _measure(word[:at]) <= size)
                lines, word = [*lines, word[:at]], word[at:]
        line = f"{line} {word}".lstrip()
    lines = [*lines, line]
    if most is None or len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"{_fold(lines[most - 1], size - 1)[0]}…"]


def _measure(text: str) -> int:
    return len(text) + (
        0 if text.isascii() else sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    )
