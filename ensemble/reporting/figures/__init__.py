"""The figures of a run, as pure functions to Plotly figures.

Each returns the figure, or the reason in one line why there is none to draw; never an empty chart. Importing them
loads Plotly: it is done where a report is about to be written.
"""

from ensemble.reporting.figures.cost import cpu_seconds, joules_by_role, power_over_time
from ensemble.reporting.figures.quality import calibration, members_and_ensemble
from ensemble.reporting.figures.search import search_front, search_history, search_slices
from ensemble.reporting.figures.sharing import batches_by_member, feeder_totals, pipeline_reuse, queue_levels
from ensemble.reporting.figures.training import learning_curves, timeline

__all__ = [
    "batches_by_member",
    "calibration",
    "cpu_seconds",
    "feeder_totals",
    "joules_by_role",
    "learning_curves",
    "members_and_ensemble",
    "pipeline_reuse",
    "power_over_time",
    "queue_levels",
    "search_front",
    "search_history",
    "search_slices",
    "timeline",
]
