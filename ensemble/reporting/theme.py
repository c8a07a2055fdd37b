"""Defines the palette and the layout of all figures.

Marks have colours of middle lightness that read on white and on near-black alike; paper and plot are
transparent, and text and grid take their colours from the page's style sheet, so one figure serves the light
page, the dark page and print.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go

ACCENT = "#3b82c4"
HIGHLIGHT = "#d97a2b"
NEUTRAL = "#8a94a3"
FAINT = "rgba(138,148,163,0.45)"
GRID = "rgba(138,148,163,0.22)"

SERIES = (
    "#3b82c4",
    "#d97a2b",
    "#2f9e77",
    "#c2558f",
    "#8a6fd1",
    "#b08f1e",
    "#24a0b3",
    "#cc4f4f",
    "#7a9a3a",
    "#a3714a",
)
STARTING = "#c3cad4"
STATES = {
    "waiting": "#b4bcc8",
    "placed": "#b4bcc8",
    "running": "#3b82c4",
    "moved": "#8fbbdf",
    "finished": "#2f9e77",
    "pruned": "#c9992a",
    "paused": "#8a94a3",
    "stopped": "#8a94a3",
    "interrupted": "#8a94a3",
    "cancelled": "#8a6fd1",
    "failed": "#cc4f4f",
}
ROLES = {
    "startup": "#9aa5b4",
    "prepare": "#d97a2b",
    "feed": "#c9992a",
    "train": "#3b82c4",
    "profile": "#4f9d9d",
    "orchestrate": "#8a6fd1",
    "ray": "#24a0b3",
    "idle": "#b3a68c",
    "other": "#6d7683",
}
ROLE_WORDS = {
    "startup": "starting up",
    "prepare": "preparing samples",
    "feed": "feeding",
    "train": "training",
    "profile": "measuring members",
    "orchestrate": "orchestrating",
    "ray": "Ray",
    "idle": "idle, reserved by nobody",
    "other": "other processes",
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Liberation Sans', sans-serif"
MANY = len(SERIES)


def member_colours(members: list[str], best: str | None) -> dict[str, str]:
    """A colour for each member: its own while they can be told apart, else neutral with the best one marked."""
    if len(members) <= MANY:
        return {member: SERIES[i] for i, member in enumerate(members)}
    return {member: HIGHLIGHT if member == best else FAINT for member in members}


def make_translucent(colour: str, alpha: float) -> str:
    """`#rrggbb` with an opacity."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def apply_theme(figure: go.Figure, *, height: int, **layout: Any) -> go.Figure:
    """The house's layout on a figure; `layout` overrides."""
    figure.update_layout(
        template=None,
        height=height,
        font={"family": FONT, "size": 12, "color": "#6b7480"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 8, "r": 14, "t": 34, "b": 8},
        colorway=SERIES,
        legend={
            "orientation": "h",
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "font": {"size": 11.5},
            "itemwidth": 30,
            "traceorder": "normal",
        },
        hoverlabel={
            "bgcolor": "#1d232b",
            "bordercolor": "#1d232b",
            "font": {"family": FONT, "size": 12, "color": "#f3f5f7"},
            "align": "left",
        },
        hovermode="closest",
        bargap=0.32,
    )
    axis = {
        "automargin": True,
        "gridcolor": GRID,
        "linecolor": GRID,
        "zeroline": False,
        "ticklabelstandoff": 4,
        "showline": False,
        "ticks": "",
        "title": {"font": {"size": 12}, "standoff": 8},
    }
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    figure.update_layout(**layout)
    return figure
