"""Compares what members predict for their first batches: what cannot be combined is known before they train on."""

from __future__ import annotations

from typing import Any

import numpy as np

from ensemble.combine.calibrators import load_calibrator
from ensemble.combine.combination import call_function
from ensemble.combine.metrics import CombineError
from ensemble.combine.prediction_matrix import align, widen_alike
from ensemble.combine.tasks import find_math
from ensemble.events import Report
from ensemble.spec import Ensemble
from ensemble.spec.task import LABELS, Task
from ensemble.store import Predictions
from ensemble.store.member import UNCOMBINED


class FirstOutputs:
    """What the first member has predicted, with which the others' predictions are compared."""

    def __init__(self, ensemble: Ensemble) -> None:
        self._function: Any = ensemble.combine if callable(ensemble.combine) else None
        self._is_tried = ensemble.search is None  # of a search the number of members is open
        self._is_stack, self._members = ensemble.combine == "stack", len(ensemble.members or ())
        self._has_collate = getattr(ensemble.recipe, "collate", "of a function") is not None
        self._has_thresholds = ensemble.thresholds is not None
        self._calibrator = ensemble.calibrate if isinstance(ensemble.calibrate, str) else None
        self._first: tuple[str, Predictions] | None = None

    def find_remark(self, event: Report) -> str | None:
        """Why a member would not be combined with the first one, or by the user's function; None if it would."""
        values = np.asarray(event["values"], np.float32)
        own = Predictions(values, np.arange(len(values)), None, Task.from_record(event["task"]))
        try:
            if self._first is None:
                self._first = event["member"], own
                if self._function is not None:
                    if self._is_tried:
                        call_function(self._function, [values] * self._members, own.task)
                elif own.task.kind == "free":
                    find_math(own.task).mix([values], np.ones(1))  # which needs a function
                elif (why := find_math(own.task).no_stack) is not None and self._is_stack:
                    return f"combine='stack' is not for these members: {why}"
            if self._has_thresholds and own.task.kind not in LABELS:
                raise CombineError(f"thresholds are for classes and labels, not for the task {own.task.kind}")
            if self._calibrator is not None:
                load_calibrator(self._calibrator, own.task)
            pair = [self._first[1], own]
            if self._has_collate and pair[0].task == own.task:  # two batches may be of unlike length
                pair = widen_alike(pair)
            align("training", dict(zip((self._first[0], event["member"]), pair, strict=True)))
        except CombineError as error:
            return f"{UNCOMBINED}: {error}"
        return None
