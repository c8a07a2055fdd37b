"""How far the pipeline was shared: samples prepared against samples consumed, and every member's batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ensemble.reporting.text import number
from ensemble.reporting.theme import HIGHLIGHT, NEUTRAL, ROLES, SERIES, apply_theme

if TYPE_CHECKING:
    from ensemble.store import RunState
    from ensemble.store.member import Event

LABELS = 24  # members named on an axis, side by side


def feeder_totals(events: Sequence[Event]) -> dict[tuple[str, int], dict[str, int]]:
    """Samples, and bytes sent to other nodes, by (node, cohort), over all feeders that served it in turn.

    A feeder counts from zero: a count that falls, or a new start of the run, means a new feeder.
    """
    totals: dict[tuple[str, int], dict[str, int]] = {}
    last: dict[tuple[str, int], Event] = {}
    for event in events:
        if event["type"] == "run_started":
            last.clear()
        if event["type"] != "feeder":
            continue
        key = (str(event["node"]), int(event.get("cohort") or 0))
        before = last.get(key)
        fresh = before is None or event.get("prepared", 0) < before.get("prepared", 0)
        total = totals.setdefault(key, {"prepared": 0, "consumed": 0, "skipped": 0, "sent_bytes": 0})
        for name in total:
            total[name] += event.get(name, 0) - (0 if fresh or before is None else before.get(name, 0))
        last[key] = event
    return totals


def pipeline_reuse(events: Sequence[Event]) -> go.Figure | str:
    """Samples that each cohort's feeder prepared, beside those its members consumed."""
    totals = {key: t for key, t in feeder_totals(events).items() if t["prepared"] or t["consumed"]}
    if not totals:
        return "No feeder has reported: every member prepared its own samples, or none has yet."
    keys = sorted(totals)
    names = [f"{node}, cohort {cohort}" for node, cohort in keys]
    figure = go.Figure()
    for what, colour in (("prepared", ROLES["prepare"]), ("consumed", ROLES["train"])):
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=names,
                x=[totals[key][what] for key in keys],
                name=what,
                marker={"color": colour},
                text=[_count(totals[key], what) for key in keys],
                textposition="auto",
                insidetextfont={"color": "#ffffff"},
                constraintext="none",
                hovertemplate="%{y}<br>%{x:,} samples " + what + "<extra></extra>",
            )
        )
    figure.update_xaxes(title_text="samples", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return apply_theme(figure, height=max(250, 130 + 58 * len(keys)), bargroupgap=0.08)


def _count(total: dict[str, int], what: str) -> str:
    text = number(total[what])
    if what == "consumed" and total["prepared"]:
        text += f"  ({total['consumed'] / total['prepared']:.2f}× prepared)"
    return text


LEVELS = (
    ("waiting", "a member waited", HIGHLIGHT, "of the time"),
    ("workers", "workers had work", ROLES["feed"], "of them"),
    ("link", "links were used", ROLES["ray"], "of the transfers that may be under way"),
    ("ring", "the ring was full", SERIES[0], "of its samples"),
)


def queue_levels(state: RunState) -> go.Figure | str:
    """Mean levels of the queues of each cohort's feeders, which name the bottleneck."""
    feeders = sorted(state.feeders.items(), key=lambda item: (item[0][1], item[0][0]))  # by cohort and node
    reported = {key: event for key, event in feeders if event.get("fullness")}
    if not reported:
        return "No feeder has reported levels: every member prepared its own samples, or none has been read yet."
    names = [f"{node}, cohort {cohort}" for node, cohort in reported]
    shown = [level for level in LEVELS if any(level[0] in event["fullness"] for event in reported.values())]
    figure = go.Figure()
    for name, label, colour, of in shown:
        values = [event["fullness"].get(name) for event in reported.values()]
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=names,
                x=values,
                name=label,
                marker={"color": colour},
                text=["" if value is None else f"{value:.0%}" for value in values],
                textposition="outside",
                cliponaxis=False,
                hovertemplate=f"%{{y}}<br>{label}: %{{x:.0%}} {of}<extra></extra>",
            )
        )
    figure.update_xaxes(range=[0, 1], tickformat=".0%", nticks=6)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return apply_theme(figure, height=80 + 22 * len(shown) * len(names), bargroupgap=0.12, bargap=0.24)


def batches_by_member(state: RunState) -> go.Figure | str:
    """Batches that each member took from the shared stream, and those that it prepared by itself."""
    members = sorted((m for m in state.members.values() if m.history), key=lambda m: m.number)
    counts = {
        m.id: [sum(e.get(name) or 0 for e in m.history) for name in ("shared_batches", "private_batches")]
        for m in members
    }
    if not any(sum(pair) for pair in counts.values()):
        return "No member has reported batches yet."
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.68, 0.32], vertical_spacing=0.08)
    for i, (what, colour) in enumerate((("shared", SERIES[0]), ("private", HIGHLIGHT))):
        bars = go.Bar(
            x=list(counts),
            y=[pair[i] for pair in counts.values()],
            name=f"{what} batches",
            marker={"color": colour},
            hovertemplate="%{x}<br>%{y:,} " + what + " batches<extra></extra>",
        )
        figure.add_trace(bars, row=1, col=1)
    waited = go.Bar(
        x=list(counts),
        y=[sum(e.get("waited_s") or 0.0 for e in m.history) for m in members],
        name="seconds waited for data",
        marker={"color": NEUTRAL},
        hovertemplate="%{x}<br>waited %{y:.2f} s for data<extra></extra>",
    )
    figure.add_trace(waited, row=2, col=1)
    named = [m.id for m in members][:: -(-len(members) // LABELS)]
    short = [name.removeprefix("member-") for name in named]
    figure.update_xaxes(showgrid=False, type="category", tickvals=named, ticktext=short, tickangle=0)
    figure.update_xaxes(title_text="member", row=2, col=1)
    figure.update_yaxes(title_text="batches", row=1, col=1)
    figure.update_yaxes(title_text="s", nticks=4, row=2, col=1)
    figure.update_yaxes(rangemode="tozero")
    return apply_theme(figure, height=320, barmode="stack")
