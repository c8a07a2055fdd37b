"""Renders the report as one HTML file that needs no network, light or dark by the reader's setting.

Plotly's script is inlined once. The figures lie in the page as JSON; their text and grid colours are set by the
style sheet, so that the dark page and the printed one need no second set of figures. A content security policy
forbids every load from elsewhere.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ensemble.reporting import text
from ensemble.reporting.assets import SCRIPT, STYLE

if TYPE_CHECKING:
    import plotly.graph_objects as go

escape = html.escape

TILES = 6  # in a row, at most; more are spread evenly over rows

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True)
class Tile:
    """One of the main figures: what it is, the figure, what to know about it."""

    label: str
    figure: str
    note: str = ""
    tone: str = ""  # of the note: "", "good", "bad"


@dataclass(frozen=True)
class Panel:
    """A figure with its title and how to read it; `figure` is the reason in one line where there is none."""

    id: str
    title: str
    reading: str
    figure: go.Figure | str
    width: str = ""  # "", "half", "most", "rest"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: what is shown (HTML), and what it is sorted by (None: comes last)."""

    shown: str
    key: float | str | None = None

    def render(self, kind: str) -> str:
        """The cell's HTML; `kind` is its column's class."""
        key = "" if self.key is None else escape(str(self.key))
        return f'<td class="{kind}" data-value="{key}">{self.shown}</td>'


@dataclass
class Page:
    """Everything on the page, in order; `sections` pairs a heading with HTML."""

    title: str
    state: tuple[str, str]  # word, class
    lead: str
    tiles: list[Tile] = field(default_factory=list)
    sections: list[tuple[str, str]] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    foot: str = ""

    def add_figures(self, heading: str, panels: Sequence[Panel]) -> None:
        """A section of figures side by side."""
        self.panels += panels
        cards = "\n".join(_card(panel) for panel in panels)
        self.sections.append((heading, f'<div class="grid">\n{cards}\n</div>'))

    def render(self) -> str:
        """The whole file."""
        from plotly.offline import get_plotlyjs

        drawn = {panel.id: panel.figure for panel in self.panels if not isinstance(panel.figure, str)}
        figures = {id: json.loads(figure.to_json()) for id, figure in drawn.items()}
        data = json.dumps(figures).replace("<", "\\u003c")  # it cannot end the script element it lies in
        word, tone = self.state
        lines = -(-len(self.tiles) // TILES) or 1
        per_row = -(-len(self.tiles) // lines)
        tiles = "\n".join(
            f'<div class="tile"><dt>{escape(t.label)}</dt><dd class="figure">{escape(t.figure)}</dd>'
            f'<dd class="note {t.tone}">{escape(t.note)}</dd></div>'
            for t in self.tiles
        )
        sections = "\n".join(f"<section><h2>{escape(head)}</h2>\n{body}</section>" for head, body in self.sections)
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(self.title)} · report</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header>
<div class="title"><h1>{escape(self.title)}</h1><span class="pill {tone}">{escape(word)}</span></div>
<p class="lead">{escape(self.lead)}</p>
<dl class="tiles" style="--tiles: {per_row}">
{tiles}
</dl>
</header>
{sections}
<footer>{escape(self.foot)}</footer>
<noscript><p class="absent">The figures need JavaScript.</p></noscript>
</main>
<script type="application/json" id="figures">{data}</script>
<script>{get_plotlyjs()}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _card(panel: Panel) -> str:
    caption = f"<figcaption><h3>{escape(panel.title)}</h3>"
    kind = panel.width
    if isinstance(panel.figure, str):
        kind += " none"
        body = f'</figcaption><p class="absent">{escape(panel.figure)}</p>'
    else:
        height = panel.figure.layout.height
        body = (
            f"<p>{escape(panel.reading)}</p></figcaption>"
            f'<div class="plot" id="{panel.id}" role="img" aria-label="{escape(panel.title)}" '
            f'style="height:{height}px"></div>'
        )
    return f'<figure class="card {kind}">{caption}{body}</figure>'


def table(head: Sequence[tuple[str, str]], rows: Sequence[Sequence[Cell]], top: int | None = None) -> str:
    """A table that sorts by a click on its head; `head` gives (name, class), row `top` stands out."""
    names = "".join(f'<th class="{kind}" scope="col">{escape(name)}</th>' for name, kind in head)
    body = []
    for number, row in enumerate(rows):
        cells = "".join(cell.render(kind) for cell, (_, kind) in zip(row, head, strict=True))
        body.append(f'<tr class="{"top" if number == top else ""}">{cells}</tr>')
    return (
        f'<div class="card scroll-card"><div class="scroll"><table><thead><tr>{names}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div></div>"
    )


def notice_list(notices: Sequence[tuple[str, str, str]]) -> str:
    """(when, tone, text) as a list."""
    items = "".join(
        f'<li><span class="at">{escape(at)}</span><span class="{tone}">{escape(what)}</span></li>'
        for at, tone, what in notices
    )
    return f'<div class="card"><ul class="notices">{items}</ul></div>'


def paragraph(sentences: str) -> str:
    """What is to be known of the table below it."""
    return f'<p class="soft before">{escape(sentences)}</p>'


def number_cell(value: float | None) -> Cell:
    """A cell with a number; an empty one for None."""
    return Cell("", None) if value is None else Cell(text.number(value), value)
