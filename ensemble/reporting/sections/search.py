"""The search: what each trial reached, and the objective against each hyperparameter."""

from __future__ import annotations

from ensemble.reporting import figures
from ensemble.reporting.page import Panel
from ensemble.reporting.sections import Content, ReportData, draw

HISTORY = ("Trials in order", "The objective each trial reached, and the best known after each finished one.")
SLICES = ("Hyperparameters against the objective", "One point a trial; open circles ended early or still run.")


def compose(data: ReportData) -> Content:
    """Returns two figures; None where the run is no search."""
    if data.state.mode != "search":
        return None
    return [
        Panel("history", *HISTORY, draw(figures.search_history, data.state)),
        Panel("slices", *SLICES, draw(figures.search_slices, data.state)),
    ]
