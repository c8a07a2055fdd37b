"""Compares what a member predicts with how the run is to combine its members, before they are trained."""

from __future__ import annotations

import numpy as np

from ensemble.combine.calibrators import load_calibrator
from ensemble.combine.combination import call_function
from ensemble.combine.metrics import Array, CombineError
from ensemble.combine.tasks import find_math
from ensemble.spec import Ensemble
from ensemble.spec.task import LABELS, Task


def explain_uncombinable(ensemble: Ensemble, task: Task, values: Array) -> str | None:
    """Return why members with predictions like these cannot be combined as declared; None where they can.

    Args:
        task: that the values are laid out by.
        values: [b, ...] of one member.
    """
    math, combine = find_math(task), ensemble.combine
    try:
        if callable(combine):
            if ensemble.search is None:  # of a search the number of members is open
                call_function(combine, [values] * len(ensemble.members or ()), task)
        elif task.kind == "free":
            math.mix([values], np.ones(1))  # which needs a function
        elif combine == "stack" and math.no_stack is not None:
            return f"combine='stack' is not for these members: {math.no_stack}"
        if ensemble.thresholds is not None and task.kind not in LABELS:
            return f"thresholds are for classes and labels, not for the task {task.kind}"
        if isinstance(ensemble.calibrate, str):
            load_calibrator(ensemble.calibrate, task)
    except CombineError as error:
        return str(error)
    return math.explain_invalid(values)
