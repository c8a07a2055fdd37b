"""The plot of the pipelines study: one self-contained HTML file, after the figures of the SC18 paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ensemble.bench.rows import Row

COLOURS = {"bare ring": "#8a94a3", "node": "#3b82c4", "independent": "#d97a2b"}
NAMES = {"bare ring": "bare ring (the limit)", "node": "one shared pipeline", "independent": "a pipeline each"}


def figure(rows: Sequence[Row]) -> Any:
    """Samples/s and CPU-seconds per 1,000 consumed samples, over members, by design."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    drawn = make_subplots(
        rows=1, cols=2, subplot_titles=("Samples/s, all members", "CPU-seconds per 1,000 consumed samples")
    )
    for design in dict.fromkeys(row.design for row in rows):
        mine = [row for row in rows if row.design == design]
        members = [row.members for row in mine]
        figures = (
            [row.samples_per_s for row in mine],
            [row.cpu_s / row.samples * 1000 for row in mine],
        )
        for column, values in enumerate(figures, start=1):
            drawn.add_trace(
                go.Scatter(
                    x=members,
                    y=values,
                    name=NAMES[design],
                    legendgroup=design,
                    showlegend=column == 1,
                    mode="lines+markers",
                    line={"color": COLOURS[design], "dash": "dot" if design == "bare ring" else "solid"},
                ),
                row=1,
                col=column,
            )
    drawn.update_xaxes(title_text="members", type="log", tickvals=sorted({row.members for row in rows}))
    drawn.update_yaxes(type="log", row=1, col=1)
    drawn.update_yaxes(type="log", row=1, col=2)
    first = rows[0]
    said = f"{first.prep_workers} preparation worker(s), {first.cores} core(s), batch {first.batch_size}"
    step = f", emulated step {first.step_ms:g} ms" if first.step_ms else ", members only take the batch"
    drawn.update_layout(
        title="Sharing one pipeline<br><sup>" + said + step + "</sup>",
        template="plotly_white",
        legend={"orientation": "h", "y": -0.2},
        height=520,
    )
    return drawn


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Write the figure to a file that opens without a network."""
    figure(rows).write_html(path, include_plotlyjs=True, full_html=True)
