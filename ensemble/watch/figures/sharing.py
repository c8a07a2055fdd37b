"""How far the pipeline was shared: samples prepared against samples consumed, and every member's batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ensemble.watch.notices import Event
from ensemble.watch.text import number
from ensemble.watch.theme import HIGHLIGHT, NEUTRAL, ROLES, SERIES, styled

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ensemble.store import RunState


def feeder_totals(events: Sequence[Event]) -> dict[tuple[str, int], dict[str, int]]:
    """Samples by (node, cohort), summed over the feeders that served it one after the other.

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
        total = totals.setdefault(key, {"prepared": 0, "consumed": 0, "skipped": 0})
        for name in total:
            total[name] += event.get(name, 0) - (0 if fresh or before is None else before.get(name, 0))
        last[key] = event
    return totals


def pipeline_reuse(events: Sequence[Event]) -> go.Figure | str:
    """Samples that each cohort's feeder prepared, beside those its members consumed."""
    totals = {key: t for key, t in feeder_totals(events).items() if t["prepared"] or t["consumed"]}
    if not totals:
        return "No feeder has reported: every member prepared its own samples, or none has yet."
    import plotly.graph_objects as go

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
    return styled(figure, height=130 + 58 * len(keys), bargroupgap=0.08)


def _count(total: dict[str, int], what: str) -> str:
    text = number(total[what])
    if what == "consumed" and total["prepared"]:
        text += f"  ({total['consumed'] / total['prepared']:.2f}× prepared)"
    return text


def batches_by_member(state: RunState) -> go.Figure | str:
    """Batches that each member took from the shared stream, and those that it prepared by itself."""
    members = sorted((m for m in state.members.values() if m.history), key=lambda m: m.number)
    counts = {
        m.id: [sum(e.get(name) or 0 for e in m.history) for name in ("shared_batches", "private_batches")]
        for m in members
    }
    if not any(sum(pair) for pair in counts.values()):
        return "No member has reported batches yet."
    import plotly.graph_objects as go

    figure = go.Figure()
    for i, (what, colour) in enumerate((("shared", SERIES[0]), ("private", HIGHLIGHT))):
        figure.add_trace(
            go.Bar(
                x=list(counts),
                y=[pair[i] for pair in counts.values()],
                name=what,
                marker={"color": colour},
                hovertemplate="%{x}<br>%{y:,} " + what + " batches<extra></extra>",
            )
        )
    waited = [sum(e.get("waited_s") or 0.0 for e in m.history) for m in members]
    figure.add_trace(
        go.Scatter(
            x=list(counts),
            y=waited,
            name="waited for data (s, right)",
            yaxis="y2",
            mode="markers",
            marker={"symbol": "diamond", "size": 8, "color": NEUTRAL},
            hovertemplate="%{x}<br>waited %{y:.2f} s for data<extra></extra>",
        )
    )
    styled(figure, height=300, barmode="stack")
    figure.update_xaxes(showgrid=False, type="category")
    figure.update_layout(
        yaxis={"title": {"text": "batches"}, "rangemode": "tozero"},
        yaxis2={
            "title": {"text": "s"},
            "overlaying": "y",
            "side": "right",
            "rangemode": "tozero",
            "showgrid": False,
            "zeroline": False,
        },
    )
    return figure
