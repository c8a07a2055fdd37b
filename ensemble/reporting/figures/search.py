"""A hyperparameter search: how the best value grew, what it cost, each hyperparameter against the objective."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ensemble.reporting import text
from ensemble.reporting.ranking import (
    cost_origin,
    finite_or_none,
    front_members,
    judged_members,
    varied_parameters,
)
from ensemble.reporting.text import hyperparameters, value
from ensemble.reporting.theme import HIGHLIGHT, STATES, apply_theme

if TYPE_CHECKING:
    from ensemble.store import MemberState, RunState

COLUMNS = 3  # panels in a row


def _members_with_value(state: RunState) -> list[tuple[MemberState, float]]:
    """The members that reported the objective, by number, each with its last value."""
    members = sorted((m for m in state.members.values() if m.history), key=lambda m: m.number)
    found = ((m, finite_or_none(m.history[-1]["metrics"].get(state.objective))) for m in members)
    return [(member, v) for member, v in found if v is not None]


def search_history(state: RunState) -> go.Figure | str:
    """The objective of every trial in order, and the best that was known after each finished one."""
    trials = _members_with_value(state)
    if not trials:
        return "No trial has reported the objective yet."
    figure = go.Figure()
    for outcome, colour in STATES.items():
        chosen = [(m, v) for m, v in trials if m.state == outcome]
        if chosen:
            figure.add_trace(_points([m.number for m, _ in chosen], chosen, outcome, colour))
    better = max if state.direction == "max" else min
    numbers: list[int] = []
    best: list[float] = []
    for member, v in trials:
        if member.state == "finished":
            numbers.append(member.number)
            best.append(better(best[-1], v) if best else v)
    if best:
        numbers.append(max(m.number for m, _ in trials))
        best.append(best[-1])
        line = {"shape": "hv", "color": HIGHLIGHT, "width": 2}
        figure.add_trace(
            go.Scatter(x=numbers, y=best, mode="lines", line=line, name="best so far", hoverinfo="skip")
        )
    figure.update_xaxes(title_text="trial")
    figure.update_yaxes(title_text=state.objective)
    return apply_theme(figure, height=320)


def search_slices(state: RunState) -> go.Figure | str:
    """One panel a hyperparameter: its value against the objective, one point a trial, coloured by outcome."""
    trials = _members_with_value(state)
    if not trials:
        return "No trial has reported the objective yet."
    names = varied_parameters(m for m, _ in trials)
    if not names:
        return "All trials so far have the same hyperparameters."
    rows = -(-len(names) // COLUMNS)
    columns = min(len(names), COLUMNS)
    figure = make_subplots(
        rows=rows, cols=columns, shared_yaxes=True, horizontal_spacing=0.03, vertical_spacing=min(0.2, 0.5 / rows)
    )
    for i, name in enumerate(names):
        row, column = i // COLUMNS + 1, i % COLUMNS + 1
        having = [(m, v) for m, v in trials if name in m.params]
        kind = _axis_type([m.params[name] for m, _ in having])
        for outcome, colour in STATES.items():
            chosen = [(m, v) for m, v in having if m.state == outcome]
            if chosen:
                at = [m.params[name] if kind != "category" else value(m.params[name]) for m, _ in chosen]
                points = _points(at, chosen, outcome, colour)
                points.update(legendgroup=outcome, showlegend=i == 0)
                figure.add_trace(points, row=row, col=column)
        figure.update_xaxes(title_text=name, type=kind, row=row, col=column)
        if kind == "log":
            figure.update_xaxes(dtick=1, exponentformat="power", row=row, col=column)
        if kind == "category":
            order = sorted({m.params[name] for m, _ in having}, key=_sortable)
            labels = [value(v) for v in order]
            figure.update_xaxes(categoryorder="array", categoryarray=labels, row=row, col=column)
        if column == 1:
            figure.update_yaxes(title_text=state.objective, row=row, col=column)
    return apply_theme(figure, height=60 + 250 * rows)


def search_front(state: RunState) -> go.Figure | str:
    """The objective against what is minimized beside it, one point a finished trial, and the Pareto front."""
    judged = judged_members(state)
    if not judged:
        return "No trial has finished with both objectives yet."
    energy = state.second_objective == "energy_j"
    unit = f"joules ({cost_origin(state)})" if energy else "CPU-seconds (measured)"
    front = {member.id: i for i, member in enumerate(front_members(state))}
    on = sorted((each for each in judged if each[0].id in front), key=lambda each: front[each[0].id])
    off = [each for each in judged if each[0].id not in front]
    figure = go.Figure()
    for name, chosen, colour in (("other trials", off, STATES["finished"]), ("Pareto front", on, HIGHLIGHT)):
        if not chosen:
            continue
        points = _points([cost for *_, cost in chosen], [(m, v) for m, v, _ in chosen], name, colour)
        shown = [text.joules(cost) if energy else text.cpu(cost) for *_, cost in chosen]
        points.hovertext = [f"{known}, {cost}" for known, cost in zip(points.hovertext, shown, strict=True)]
        figure.add_trace(points)
    figure.update_traces(marker={"symbol": "circle"})
    # Steps: at a cost between those of two members of the front, the cheaper one is the best that is known.
    figure.update_traces(
        selector={"name": "Pareto front"},
        mode="lines+markers+text",
        line={"shape": "hv", "color": HIGHLIGHT, "width": 1.5},
        text=[member.id for member, *_ in on],
        textposition="top center",
    )
    figure.update_xaxes(title_text=unit)
    figure.update_yaxes(title_text=state.objective)
    return apply_theme(figure, height=340)


def _points(x: list[Any], chosen: list[tuple[MemberState, float]], outcome: str, colour: str) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=[v for _, v in chosen],
        mode="markers",
        name=outcome,
        marker={
            "color": colour,
            "size": 8,
            "opacity": 0.85,
            "symbol": "circle" if outcome == "finished" else "circle-open",
            "line": {"width": 1.5 if outcome != "finished" else 0, "color": colour},
        },
        hovertext=[
            f"<b>{m.id}</b>, {m.state} after {len(m.history)} epochs<br>"
            f"{html.escape(hyperparameters(m.params))}<br>{v:.4f}"
            for m, v in chosen
        ],
        hoverinfo="text",
    )


def _axis_type(values: list[Any]) -> str:
    """Logarithmic where positive values span decades; words, and a choice of few numbers, are categories."""
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
        return "category"
    if 2 * len(set(values)) <= len(values):
        return "category"
    low, high = min(values), max(values)
    return "log" if low > 0 and math.log10(high / low) >= 1.5 else "linear"


def _sortable(given: Any) -> tuple[bool, float, str]:
    """Numbers by size, then words, then None: what a `choice` may mix."""
    numeric = isinstance(given, (int, float))
    return (not numeric, float(given) if numeric else 0.0, str(given))
