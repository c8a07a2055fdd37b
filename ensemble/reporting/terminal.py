"""Prints to a terminal text that may come from users' code: without control sequences and markup.

Imports rich: imported where something is about to be shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from ensemble.reporting.text import visible


class PlainConsole(Console):
    """A console that takes strings as they are: no markup, no names of emoji, no control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"markup": False, "emoji": False, "highlight": False} | options))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See rich."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


class LiveLines:
    """Lines at the end of a terminal that are drawn again in their place, only by `draw`."""

    def __init__(self, stream: TextIO) -> None:
        self.console = PlainConsole(file=stream)
        self._live = Live(console=self.console, auto_refresh=False, transient=False)
        self._size = self.console.size

    def draw(self, lines: Iterable[tuple[str, str]]) -> None:
        """Draw lines, each with its style as rich names it; what is longer than the terminal is cut off."""
        self.begin()
        shown = (Text(line, style, overflow="ellipsis", no_wrap=True) for line, style in lines)
        self._live.update(Group(*shown), refresh=True)

    def begin(self) -> None:
        """Start, or clear a terminal whose size has changed: the lines of the last drawing may be broken."""
        if not self._live.is_started:
            self._live.start()
        if self.console.size != self._size:
            self._size = self.console.size
            self.console.clear()

    def print(self, line: str, style: str) -> None:
        """Print a line that stays above the others."""
        self.console.print(Text(line, style=style))

    def close(self) -> None:
        """Leave the last drawing as it is."""
        self._live.stop()

    def __enter__(self) -> LiveLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
