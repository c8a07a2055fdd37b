"""Charts of the studies: panels of lines or bars in one self-contained HTML file.

A study describes its plot as `Panel`s, plain data that a test can examine; `write` draws them with Plotly. A
predicted series is dashed, an interval is an error bar, a mark points at where two lines cross.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ensemble.store.user_files import PAGE_END

PALETTE = ("#3b82c4", "#d97a2b", "#2f9e77", "#c2558f", "#8a6fd1", "#b08f1e", "#24a0b3", "#cc4f4f", "#7a9a3a")
NEUTRAL = "#8a94a3"
Scale = Literal["linear", "log", "category", "hidden"]
PREDICTED = "dash"
_PANEL_PX, _ACROSS = 330, 2


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a panel, or its bars of one colour.

    Attributes:
        name: series of the same name, in all panels, have one colour and one entry in the legend.
        xs, ys: its points; a y of None is a gap.
        colour: None assigns the next colour of the palette.
        dash: of the line: "solid", `PREDICTED` or "dot"; predicted bars are pale and hatched.
        low, high: the ends of an interval about each y.
        points: whether the line's points are marked.
    """

    name: str
    xs: Sequence[Any]
    ys: Sequence[float | None]
    colour: str | None = None
    dash: str = "solid"
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    points: bool = True


@dataclass(frozen=True)
class Mark:
    """A text at a point of a panel, such as at a crossover."""

    x: Any
    y: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One diagram.

    Attributes:
        title: its heading.  at: in small letters below it, what all its series have in common.
        x, y: the axes' titles.
        bars: bars instead of lines.
        x_scale: of bars "category", or "hidden" where the legend names them.
        log_y: a logarithmic scale; a linear one begins at 0, or at the least value where that is below 0.
        x_text: labels of values on the x axis, such as {4096: "4 KiB"}; None shows the values.
    """

    title: str
    series: Sequence[Series]
    at: str = ""
    x: str = ""
    y: str = ""
    bars: bool = False
    x_scale: Scale = "linear"
    log_y: bool = False
    marks: Sequence[Mark] = ()
    x_text: dict[Any, str] | None = None


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour of the palette for each name, in their order."""
    return {name: PALETTE[number % len(PALETTE)] for number, name in enumerate(dict.fromkeys(names))}


def bar_panel(title: str, series: Sequence[Series], **more: Any) -> Panel:
    """A panel of bars beside one another, one group for each x."""
    return Panel(title=title, series=series, bars=True, x_scale="category", **more)


def is_plotly_installed() -> bool:
    """Whether figures can be drawn; the extra `bench` installs what draws them."""
    return importlib.util.find_spec("plotly") is not None


def figure(title: str, notes: Sequence[str], panels: Sequence[Panel]) -> Any:
    """The panels, two in a row, as a Plotly figure; `notes` are the line below the title."""
    from plotly.subplots import make_subplots

    height = -(-len(panels) // _ACROSS)
    drawn = make_subplots(
        rows=height,
        cols=_ACROSS,
        subplot_titles=[f"<b>{p.title}</b><br><span style='font-size:12px'>{p.at}</span>" for p in panels],
        vertical_spacing=0.34 / max(height, 2),
        horizontal_spacing=0.09,
    )
    drawn.update_annotations(font_size=14)
    colour = colours([s.name for panel in panels for s in panel.series if s.colour is None])
    known: set[str] = set()
    for number, panel in enumerate(panels):
        where = {"row": number // _ACROSS + 1, "col": number % _ACROSS + 1}
        for series in panel.series:
            _add_series(
                drawn, panel, series, series.colour or colour[series.name], series.name not in known, where
            )
            known.add(series.name)
        for mark in panel.marks:
            _add_mark(drawn, panel, mark, where)
        _set_axes(drawn, panel, where)
    drawn.update_layout(
        title={
            "text": f"<b>{title}</b><br><span style='font-size:13px'>" + " · ".join(notes) + "</span>",
            "x": 0.02,
        },
        template="plotly_white",
        legend={"tracegroupgap": 4, "yanchor": "top", "y": 1},
        margin={"t": 150, "b": 60, "l": 70, "r": 30},
        height=170 + _PANEL_PX * height,
    )
    return drawn


def write(title: str, notes: Sequence[str], panels: Sequence[Panel], path: Path) -> None:
    """Write a figure to an HTML file that opens without a network."""
    page = figure(title, notes, panels).to_html(include_plotlyjs=True, full_html=True)
    path.write_text(f"{page}\n{PAGE_END}\n", encoding="utf-8")


def _add_series(drawn: Any, panel: Panel, series: Series, colour: str, first: bool, where: dict[str, int]) -> None:
    import plotly.graph_objects as go

    look: dict[str, Any] = {"name": series.name, "legendgroup": series.name, "showlegend": first}
    if series.low is not None and series.high is not None:
        ends = list(zip(series.ys, series.low, series.high, strict=True))
        above = [0.0 if y is None else high - y for y, _, high in ends]
        below = [0.0 if y is None else y - low for y, low, _ in ends]
        look["error_y"] = {"array": above, "arrayminus": below, "thickness": 1.2, "width": 3}
    if panel.bars:
        text = ["" if y is None else f"{y:,.3g}" if y < 1000 else f"{y:,.0f}" for y in series.ys]
        marker: dict[str, Any] = {"color": colour}
        if series.dash == PREDICTED:
            marker |= {"opacity": 0.45, "pattern": {"shape": "/", "size": 5}}
        more = {"text": text, "textposition": "outside", "cliponaxis": False, "marker": marker}
        drawn.add_trace(go.Bar(x=list(series.xs), y=list(series.ys), **more, **look), **where)
        return
    style = {"color": colour, "dash": series.dash, "width": 1.5 if series.dash == PREDICTED else 2.5}
    mode = "lines+markers" if series.points else "lines"
    drawn.add_trace(go.Scatter(x=list(series.xs), y=list(series.ys), mode=mode, line=style, **look), **where)


def _add_mark(drawn: Any, panel: Panel, mark: Mark, where: dict[str, int]) -> None:
    # Unlike a trace, an annotation on a logarithmic axis is placed by the logarithm.
    x = math.log10(mark.x) if panel.x_scale == "log" else mark.x
    y = math.log10(mark.y) if panel.log_y else mark.y
    look = {"showarrow": True, "arrowhead": 2, "arrowsize": 0.9, "ax": 0, "ay": -32, "font": {"size": 11.5}}
    drawn.add_annotation(x=x, y=y, text=mark.text, bgcolor="rgba(255,255,255,0.8)", **look, **where)


def _set_axes(drawn: Any, panel: Panel, where: dict[str, int]) -> None:
    drawn.update_xaxes(title_text=panel.x or None, title_standoff=6, **where)
    if panel.x_scale == "hidden":
        drawn.update_xaxes(showticklabels=False, **where)
    elif panel.x_scale == "category":
        drawn.update_xaxes(type="category", **where)
    else:
        values = sorted({x for series in panel.series for x in series.xs})
        text = [panel.x_text.get(x, "") for x in values] if panel.x_text is not None else None
        drawn.update_xaxes(type=panel.x_scale, tickvals=values, ticktext=text, **where)
    drawn.update_yaxes(title_text=panel.y or None, title_standoff=6, tickformat=",", **where)
    drawn_ys = [y for series in panel.series for y in (*series.ys, *(series.low or ()), *(series.high or ()))]
    values = [y for y in drawn_ys if y is not None and (y > 0 or not panel.log_y)]
    least, most = min(values, default=1.0), max(values, default=1.0)
    if panel.log_y:
        drawn.update_yaxes(type="log", range=[math.log10(least / 1.25), math.log10(most * 1.25)], **where)
    else:
        drawn.update_yaxes(range=[min(0.0, 1.15 * least), max(0.0, 1.15 * most)], **where)
