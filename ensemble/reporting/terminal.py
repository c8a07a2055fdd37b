"""Prints to a terminal text that may come from users' code: without control sequences and markup.

Imports rich: imported where something is about to be shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ensemble.reporting.text import visible


class PlainConsole(Console):
    """A console that takes strings as they are: no markup, no names of emoji, no control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"markup": False, "emoji": False, "highlight": False} | options))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See rich."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

    def render_text(self, renderable: RenderableType) -> str:
        """Returns what it would print, without the blanks at the end of lines."""
        with self.capture() as captured:
            self.print(renderable)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())
