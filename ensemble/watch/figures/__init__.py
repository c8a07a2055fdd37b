"""The figures of a run, as pure functions to Plotly figures.

Each returns the figure, or the reason in one line why there is none to draw; never an empty chart.
"""

from ensemble.watch.figures.cost import cpu_seconds, power_over_time
from ensemble.watch.figures.quality import calibration, members_and_ensemble
from ensemble.watch.figures.search import search_history, search_slices
from ensemble.watch.figures.sharing import batches_by_member, pipeline_reuse, queue_levels
from ensemble.watch.figures.training import learning_curves, timeline

__all__ = [
    "batches_by_member",
    "calibration",
    "cpu_seconds",
    "learning_curves",
    "members_and_ensemble",
    "pipeline_reuse",
    "power_over_time",
    "queue_levels",
    "search_history",
    "search_slices",
    "timeline",
]
