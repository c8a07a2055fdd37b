"""Quality: the members and the combined model on the same samples, and their calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble.reporting import figures, text
from ensemble.reporting.page import Panel
from ensemble.reporting.sections import Content, Line, ReportData, draw

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.reporting.scores import Scores
    from ensemble.store import RunState

CALIBRATION = (
    "Calibration",
    "How often a model is right when it is so sure. On the diagonal it is calibrated, below it too sure; "
    "larger dots hold more samples.",
)


def compose(data: ReportData) -> Content:
    """Returns the members beside the combined model, and the reliability curves."""
    versus = draw(figures.members_and_ensemble, data.scores)
    return [
        Panel("versus", *_describe_comparison(data.scores), versus, "most"),
        Panel("calibration", *CALIBRATION, draw(figures.calibration, data.scores), "rest"),
    ]


def summarize(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns why there is no combined model, where combining was refused."""
    combined = state.combined or {}
    if not combined.get("reason") or combined.get("metrics"):
        return []
    return [("combined", f"none: {combined['reason']}")]


def _describe_comparison(scores: Scores) -> tuple[str, str]:
    """Returns a title and how to read the figure."""
    reading = f"On the same {text.number(scores.rows)} samples of the {scores.split} split."
    if scores.split == "valid":
        reading += " Members were selected on these samples, so the combined figures are optimistic."
    return "Combined model and members", reading
