"""The combined model against its members, and how well calibrated both are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ensemble.reporting.theme import ACCENT, HIGHLIGHT, NEUTRAL, apply_theme

if TYPE_CHECKING:
    from ensemble.reporting.scores import Scores

SHOWN = 30  # members beside the combined model; of more, the best by accuracy
PANELS = (("accuracy", "accuracy (higher is better)"), ("nll", "NLL in nats (lower is better)"))


def members_and_ensemble(scores: Scores) -> go.Figure | str:
    """Accuracy and NLL of every member and of the combined model on the same rows; the combined one stands out."""
    if scores.missing:
        return scores.missing
    members = sorted(scores.members, key=lambda m: -scores.members[m]["accuracy"])[:SHOWN]
    rows = {m: scores.members[m] for m in members}
    names = list(rows)
    if scores.combined is not None:
        rows = {"combined": scores.combined} | rows
        names = ["combined", *names]
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.04)
    for column, (metric, title) in enumerate(PANELS, start=1):
        values = [rows[name].get(metric) for name in names]
        known = [v for v in values if v is not None]
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=names,
                x=values,
                marker={"color": [_colour(name, scores.best) for name in names]},
                text=[f"{v:.4f}" if v is not None else "" for v in values],
                textposition="inside",
                insidetextanchor="end",
                insidetextfont={"color": "#10151b"},
                hovertemplate="<b>%{y}</b><br>" + metric + " %{x:.4f}<extra></extra>",
                showlegend=False,
            ),
            row=1,
            col=column,
        )
        top = max(known) * 1.02 if known else 1
        figure.update_xaxes(title_text=title, range=[0, top], nticks=6, row=1, col=column)
    figure.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=4)
    return apply_theme(
        figure, height=max(380, 90 + 27 * len(names)), bargap=0.28, margin={"l": 8, "r": 14, "t": 8, "b": 8}
    )


def _colour(name: str, best: str | None) -> str:
    if name == "combined":
        return HIGHLIGHT
    return ACCENT if name == best else "#a9b4c2"


def calibration(scores: Scores) -> go.Figure | str:
    """The reliability diagram: of the samples a model is 80 % sure about, 80 % should be right.

    Dots lie on the diagonal where a model is calibrated, below it where it is too sure; their area tells how many
    samples the bin holds.
    """
    if scores.missing:
        return scores.missing
    figure = go.Figure(
        go.Scatter(
            x=[0, 1],
            y=[0, 1],
            mode="lines",
            line={"color": NEUTRAL, "width": 1, "dash": "dash"},
            hoverinfo="skip",
            name="calibrated",
        )
    )
    for who, curve in scores.curves.items():
        combined = who == "combined"
        name = who if combined else f"best member ({scores.best})"
        metrics = scores.combined if combined else scores.members.get(scores.best or "")
        label = f"{name}, ECE {metrics['ece']:.4f}" if metrics and "ece" in metrics else name
        figure.add_trace(
            go.Scatter(
                x=[confidence for confidence, _, _ in curve],
                y=[right for _, right, _ in curve],
                customdata=[count for _, _, count in curve],
                mode="lines+markers",
                line={"color": HIGHLIGHT if combined else ACCENT, "width": 1.5},
                cliponaxis=False,
                marker={
                    "line": {"width": 0},
                    "size": [5 + 15 * (count / scores.rows) ** 0.5 for _, _, count in curve],
                    "opacity": 0.9,
                },
                name=label,
                hovertemplate="confidence %{x:.3f}<br>accuracy %{y:.3f}<br>%{customdata:,} samples"
                f"<extra>{name}</extra>",
            )
        )
    low = min(min(c, a) for curve in scores.curves.values() for c, a, _ in curve)
    span = [max(0.0, min(low - 0.05, 0.5)), 1.02]
    figure.update_xaxes(title_text="confidence", range=span)
    figure.update_yaxes(title_text="accuracy", range=span)
    return apply_theme(figure, height=380)
