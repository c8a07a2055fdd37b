"""Looks at runs before they start and after they have ended: costs in advance, lists, comparisons, predictions."""

from ensemble.inspection.dry_run import dry_run
from ensemble.inspection.dry_run_result import DryRun
from ensemble.inspection.nodes import describe_nodes
from ensemble.inspection.run_list import list_runs
from ensemble.inspection.saved_predictions import SavedPredictions, load_predictions
from ensemble.inspection.usage import sum_usage
from ensemble.reporting.comparison.compare import compare
from ensemble.reporting.comparison.result import Comparison

__all__ = [
    "Comparison",
    "DryRun",
    "SavedPredictions",
    "compare",
    "describe_nodes",
    "dry_run",
    "list_runs",
    "load_predictions",
    "sum_usage",
]
