"""Learning curves, and the members' timeline on the nodes."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ensemble.reporting.ranking import finite_or_none, other_metrics, rank_members
from ensemble.reporting.text import clock, duration, hyperparameters, time_unit
from ensemble.reporting.theme import FAINT, MANY, STARTING, STATES, apply_theme, member_colours

if TYPE_CHECKING:
    from ensemble.store import MemberState, RunState, Span

PANELS = 4  # metrics, side by side
TICKS = 1500  # epoch marks on the timeline; more would be a grey smear and a slow page


def learning_curves(state: RunState) -> go.Figure | str:
    """The metrics on the validation split after each epoch, the objective first; dotted: the loss in training."""
    members = [m for m in rank_members(state) if m.history]
    if not members:
        return "No epoch has ended yet."
    members.sort(key=lambda m: m.number)
    best = next(iter(rank_members(state))).id
    colours = member_colours([m.id for m in members], best)
    many = len(members) > MANY
    panels = [state.objective, *other_metrics(state)][:PANELS]
    figure = make_subplots(rows=1, cols=len(panels), horizontal_spacing=0.08)
    for member in sorted(members, key=lambda m: m.id == best):
        epochs = member.history
        for column, metric in enumerate(panels, start=1):
            front = member.id == best or not many
            common = {
                "x": [epoch["epoch"] + 1 for epoch in epochs],
                "mode": "lines+markers",
                "marker": {"size": 5 if front else 3},
                "legendgroup": member.id,
                "legendrank": 1000 + member.number,
            }
            line = {"color": colours[member.id], "width": 2 if front else 1}
            figure.add_trace(
                go.Scatter(
                    **common,
                    y=[finite_or_none(epoch["metrics"].get(metric)) for epoch in epochs],
                    line=line,
                    name=f"{member.id} (best)" if many else member.id,
                    showlegend=column == 1 and front,
                    hovertemplate=f"<b>{member.id}</b><br>{html.escape(hyperparameters(member.params))}<br>"
                    f"epoch %{{x}}, {metric} %{{y:.4f}}<extra></extra>",
                ),
                row=1,
                col=column,
            )
            if metric == "loss" and not many:
                figure.add_trace(
                    go.Scatter(
                        **{**common, "mode": "lines"},
                        y=[finite_or_none(epoch.get("train_loss")) for epoch in epochs],
                        line=line | {"dash": "dot", "width": 1.2},
                        name=f"{member.id}, training",
                        showlegend=False,
                        hovertemplate=f"<b>{member.id}</b><br>epoch %{{x}}, training loss %{{y:.4f}}"
                        "<extra></extra>",
                    ),
                    row=1,
                    col=column,
                )
    for column, metric in enumerate(panels, start=1):
        figure.update_yaxes(title_text=metric, row=1, col=column)
    longest = max(len(m.history) for m in members)  # Plotly would mark half epochs where they are few
    figure.update_xaxes(title_text="epoch", rangemode="normal", dtick=1 if longest <= 12 else None)
    return apply_theme(figure, height=360)


@dataclass(frozen=True)
class _Row:
    """One attempt on the timeline; times in Unix seconds."""

    member: MemberState
    span: Span
    end: float
    outcome: str

    @property
    def label(self) -> tuple[str, str]:
        cohort = "alone" if self.span.cohort is None else f"cohort {self.span.cohort}"
        return f"{self.span.node}, {cohort}", self.member.id


def _rows(state: RunState) -> list[_Row]:
    rows = []
    for member in state.members.values():
        for span in member.spans:
            outcome = span.outcome or "running"
            end = span.ended or state.updated or span.placed
            if outcome == "waiting":  # closed by a resume: the attempt ended at its last event
                epoch_ends = [e["t"] for e in member.history if e["attempt"] == span.attempt and e["t"] < end]
                outcome, end = "interrupted", max([span.started or span.placed, *epoch_ends])
            rows.append(_Row(member, span, end, outcome if outcome in STATES else "interrupted"))
    alone = 1 + max((row.span.cohort or 0 for row in rows), default=0)  # below all cohorts
    cohorts = {id(row): alone if row.span.cohort is None else row.span.cohort for row in rows}
    return sorted(rows, key=lambda row: (row.span.node, cohorts[id(row)], row.span.placed, row.member.number))


def timeline(state: RunState) -> go.Figure | str:
    """A bar for each attempt of each member, in the colour of how it ended; rows are grouped by node and cohort.

    The pale beginning of a bar is its starting up (imports, set-up), the fine lines in it are ends of epochs.
    """
    rows = _rows(state)
    if not rows:
        return "No member has been placed yet."
    begin = state.started or min(row.span.placed for row in rows)
    scale, unit = time_unit(max(row.end for row in rows) - begin)
    names = list(dict.fromkeys(row.label for row in rows))
    where, who = [label[0] for label in names], [label[1] for label in names]
    # Plotly orders rows as they first appear: a trace without extent names them all.
    order = go.Bar(orientation="h", y=(where, who), x=[0.0] * len(names), hoverinfo="skip", showlegend=False)
    figure = go.Figure(order)

    def add_bars(rows: list[_Row], name: str, colour: str, times: list[tuple[float, float]]) -> None:
        hover = [
            f"<b>{row.member.id}</b>, attempt {row.span.attempt + 1}, {row.label[0]}{_devices(row.span)}<br>"
            f"{name}: {clock(start - begin)} to {clock(end - begin)} ({duration(end - start)})"
            for row, (start, end) in zip(rows, times, strict=True)
        ]
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=_labels(rows),
                base=[(start - begin) / scale for start, _ in times],
                x=[(end - start) / scale for start, end in times],
                marker={"color": colour, "line": {"width": 0}},
                name=name,
                hovertext=hover,
                hoverinfo="text",
            )
        )

    waits = [row for row in rows if (row.span.started or row.end) > row.span.placed]
    add_bars(waits, "starting up", STARTING, [(r.span.placed, r.span.started or r.end) for r in waits])
    for outcome, colour in STATES.items():
        ran = [row for row in rows if row.outcome == outcome and row.span.started is not None]
        if ran:
            add_bars(ran, outcome, colour, [(r.span.started or 0.0, r.end) for r in ran])
    ticks = [
        (row, e["t"])
        for row in rows
        for e in row.member.history
        if e["attempt"] == row.span.attempt and row.span.placed <= e["t"] <= row.end
    ]
    if len(ticks) <= TICKS:
        mark = {"symbol": "line-ns", "size": 11, "line": {"width": 1, "color": "rgba(255,255,255,0.75)"}}
        _marks(figure, [row for row, _ in ticks], [(t - begin) / scale for _, t in ticks], mark, None)
    died = [row for row in rows if row.outcome == "failed"]
    cross = {"symbol": "x", "size": 9, "color": STATES["failed"], "line": {"width": 1, "color": "#ffffff"}}
    wrapped = ["<br>".join(textwrap.wrap(html.escape(row.member.error or ""), 70)[:4]) for row in died]
    errors = [f"<b>{row.member.id}</b> failed<br>{why}" for row, why in zip(died, wrapped, strict=True)]
    _marks(figure, died, [(row.end - begin) / scale for row in died], cross, errors)
    figure.update_xaxes(title_text=f"{unit} since the start", rangemode="tozero")
    height = 26 if len(names) <= 20 else 20 if len(names) <= 50 else 14  # a hundred trials still fit two screens
    figure.update_yaxes(
        range=[len(names) - 0.4, -0.6], showgrid=False, showdividers=True, dividercolor=FAINT, dividerwidth=1
    )
    return apply_theme(figure, height=110 + height * len(names), barmode="overlay", bargap=0.3)


def _labels(rows: Sequence[_Row]) -> tuple[list[str], list[str]]:
    """Two levels of row names: where (node and cohort), and who."""
    return [row.label[0] for row in rows], [row.label[1] for row in rows]


def _marks(
    figure: go.Figure, rows: list[_Row], x: list[float], marker: dict[str, Any], text: list[str] | None
) -> None:
    if not rows:
        return
    hover = {"hoverinfo": "skip"} if text is None else {"hoverinfo": "text", "hovertext": text}
    figure.add_trace(go.Scatter(x=x, y=_labels(rows), mode="markers", marker=marker, showlegend=False, **hover))


def _devices(span: Span) -> str:
    devices = [str(device) for device in span.devices if device is not None]
    return f", device {', '.join(devices)}" if devices else ""
