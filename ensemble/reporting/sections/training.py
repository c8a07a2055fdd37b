"""What was trained: the search, the quality of the models, learning curves and when each member ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble.reporting import text
from ensemble.reporting.page import Panel
from ensemble.reporting.ranking import cost_origin, front_members
from ensemble.reporting.sections import Content, Line, ReportData, draw
from ensemble.reporting.sections.notices import ESTIMATED

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.store import RunState

HISTORY = ("Trials in order", "The objective each trial reached, and the best known after each finished one.")
FRONT = (
    "Pareto front",
    "Each finished trial by its objective and by what it used. Of those on the line none is beaten in both.",
)
MOST_ON_FRONT = 12  # named in the closing summary
SLICES = ("Hyperparameters against the objective", "One point a trial; open circles ended early or still run.")
CALIBRATION = (
    "Calibration",
    "How often a model is right when it is so sure. On the diagonal it is calibrated, below it too sure; "
    "larger dots hold more samples.",
)
CURVES = (
    "Learning curves",
    "On the validation split after each epoch. Dotted: loss on the training batches, while members are few.",
)
TIMELINE = (
    "Timeline",
    "Every attempt of every member, by node and cohort. Pale: starting up. Fine lines: ends of epochs.",
)


def compose_search(data: ReportData) -> Content:
    """Returns what each trial reached, and the objective by hyperparameter; None where the run is no search."""
    from ensemble.reporting import figures

    state = data.state
    if state.mode != "search":
        return None
    panels = [
        Panel("history", *HISTORY, draw(figures.search_history, state)),
        Panel("slices", *SLICES, draw(figures.search_slices, state)),
    ]
    if state.second_objective is not None:
        heading, reading = FRONT
        estimated = cost_origin(state) == "estimated"
        reading += f" The joules are estimated: {ESTIMATED}." if estimated else ""
        panels.insert(1, Panel("front", heading, reading, draw(figures.search_front, state)))
    return panels


def compose_quality(data: ReportData) -> Content:
    """Returns the members beside the combined model on the same samples, and the reliability curves."""
    from ensemble.reporting import figures

    reading = f"On the same {text.number(data.scores.rows)} samples of the {data.scores.split} split."
    if data.scores.split == "valid":
        reading += " Members were selected on these samples, so the combined figures are optimistic."
    versus = draw(figures.members_and_ensemble, data.scores)
    return [
        Panel("versus", "Combined model and members", reading, versus, "most"),
        Panel("calibration", *CALIBRATION, draw(figures.calibration, data.scores), "rest"),
    ]


def compose_training(data: ReportData) -> Content:
    """Returns the learning curves and the timeline."""
    from ensemble.reporting import figures

    return [
        Panel("curves", *CURVES, draw(figures.learning_curves, data.state)),
        Panel("timeline", *TIMELINE, draw(figures.timeline, data.state)),
    ]


def summarize_search(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns the members on the Pareto front of a search with a second objective, the cheapest first."""
    front = front_members(state)
    if not front:
        return []
    unit = f"joules, {cost_origin(state)}" if state.second_objective == "energy_j" else "CPU-seconds"
    shown = text.joules if state.second_objective == "energy_j" else text.cpu
    second = state.second_objective or ""
    names = [f"{member.id} {shown((member.cost or {})[second])}" for member in front]
    more = [f"and {len(names) - MOST_ON_FRONT} more"] if len(names) > MOST_ON_FRONT else []
    return [("Pareto front", f"{', '.join(names[:MOST_ON_FRONT] + more)} ({state.objective} and {unit})")]


def summarize_quality(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns why there is no combined model, where combining was refused."""
    combined = state.combined or {}
    if not combined.get("reason") or combined.get("metrics"):
        return []
    return [("combined", f"none: {combined['reason']}")]
