"""Training: learning curves, and when each member ran on which node."""

from __future__ import annotations

from ensemble.reporting import figures
from ensemble.reporting.page import Panel
from ensemble.reporting.sections import Content, ReportData, draw

CURVES = (
    "Learning curves",
    "On the validation split after each epoch. Dotted: loss on the training batches, while members are few.",
)
TIMELINE = (
    "Timeline",
    "Every attempt of every member, by node and cohort. Pale: starting up. Fine lines: ends of epochs.",
)


def compose(data: ReportData) -> Content:
    """Returns the learning curves and the timeline."""
    return [
        Panel("curves", *CURVES, draw(figures.learning_curves, data.state)),
        Panel("timeline", *TIMELINE, draw(figures.timeline, data.state)),
    ]
