"""Single figures of class probabilities, for tests."""

from __future__ import annotations

from typing import Any

from ensemble.combine import find_math
from ensemble.spec.task import CLASSIFICATION

MATH = find_math(CLASSIFICATION)


def accuracy(probabilities: Any, target: Any) -> float:
    return MATH.measure(probabilities, target)["accuracy"]


def nll(probabilities: Any, target: Any) -> float:
    return MATH.measure(probabilities, target)["nll"]
