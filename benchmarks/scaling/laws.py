"""How communication grows with the number of workers: two laws, fitted, and the steps that they predict.

**Logarithmic**, as Svyatkovskiy et al. 2019 found it: a + b log2 n, a tree of log2 n rounds. **Ring**: each worker
sends 2 (n - 1) parts of 1/n of the gradients, so that the bytes grow with (n - 1) / n and the rounds with n - 1.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.scaling.workers import REAL, STRONG, WorkerRow
from ensemble.bench.results import group_by

LOGARITHMIC, RING = "a + b log2 n", "a + b (n-1)/n + c (n-1)"
_TERMS: dict[str, Callable[[int], tuple[float, ...]]] = {
    LOGARITHMIC: lambda n: (1.0, math.log2(n)),
    RING: lambda n: (1.0, (n - 1) / n, n - 1.0),
}


@dataclass(frozen=True, kw_only=True)
class FitRow:
    """One law of communication, fitted to measured milliseconds by least squares with coefficients of at least 0.

    Attributes:
        law: its formula, for n of 2 and more.
        a_ms, b_ms, c_ms: its coefficients.
        points: to which it was fitted, the means of what was measured with so many workers.
        residual_ms: the standard error of the fit, which allows for the number of coefficients: the root of
            the sum of squares over (points - coefficients); None where there are too few points.
        workers: the most that were measured.  beyond_ms: what the law says for them when it is fitted to fewer
            workers alone; None where there are too few.  measured_ms: the mean of what was measured for them.
        best: whether it has the least residual; the logarithmic law where that is not known.
    """

    law: str
    a_ms: float
    b_ms: float
    c_ms: float
    points: int
    residual_ms: float | None
    workers: int
    beyond_ms: float | None
    measured_ms: float
    best: bool = False

    def at(self, workers: int) -> float:
        """Milliseconds of communication of so many workers; 0 of one."""
        terms = _TERMS[self.law](workers)
        return sum(a * b for a, b in zip((self.a_ms, self.b_ms, self.c_ms), terms, strict=False)) * (workers > 1)


def fit_laws(points: Sequence[tuple[int, float]]) -> list[FitRow]:
    """Fit both laws to pairs of a number of workers, at least 2, and milliseconds; to no pairs none."""
    if not points:
        return []
    by_count = group_by(points, lambda point: point[0])
    means = [(n, statistics.fmean(value for _, value in own)) for n, own in sorted(by_count.items())]
    fits = [_fit_beyond(law, means) for law in _TERMS]
    best = min(fits, key=lambda fit: math.inf if fit.residual_ms is None else fit.residual_ms)
    return [dataclasses.replace(fit, best=fit is best) for fit in fits]


def _fit_beyond(law: str, points: Sequence[tuple[int, float]]) -> FitRow:
    most = max(n for n, _ in points)
    fewer = [point for point in points if point[0] < most]
    beyond = _fit(law, fewer).at(most) if len(fewer) >= len(_TERMS[law](1)) else None
    return dataclasses.replace(_fit(law, points), beyond_ms=beyond)


def _fit(law: str, points: Sequence[tuple[int, float]]) -> FitRow:
    import numpy as np
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    measured = np.array([value for _, value in points])
    found, norm = nnls(np.array([_TERMS[law](n) for n, _ in points]), measured)
    spare, most = len(points) - len(found), max(n for n, _ in points)
    a, b, c = (*map(float, found), 0.0)[:3]
    return FitRow(
        law=law,
        a_ms=a,
        b_ms=b,
        c_ms=c,
        points=len(points),
        residual_ms=float(norm) / math.sqrt(spare) if spare > 0 else None,
        workers=most,
        beyond_ms=None,
        measured_ms=float(measured[-1]),
    )


def predict_rows(rows: Sequence[WorkerRow]) -> tuple[list[WorkerRow], list[FitRow]]:
    """Fit the laws to the rows' communication, and predict each step from one worker's and the better of them.

    What is communicated does not depend on the scaling and on the computing, so that all rows are points of one
    fit; those whose workers shared cores are left out. A step of n workers is predicted from fits to the other
    numbers of workers, of which there must be two; the ring's law can be the better one from four on.
    """
    own = [row for row in rows if row.workers > 1 and not row.shares_cores]
    points = [(row.workers, row.communication_ms) for row in own]
    alone = {(row.scaling, row.compute): row for row in rows if row.workers == 1}
    predicted = []
    for row in rows:
        others = [point for point in points if point[0] != row.workers]
        if row.workers > 1 and len({n for n, _ in others}) > 1:
            communication_ms = next(fit.at(row.workers) for fit in fit_laws(others) if fit.best)
            step_ms = predict_step(alone[row.scaling, row.compute], communication_ms, row.workers)
            row = dataclasses.replace(row, predicted_ms=step_ms, error_percent=100 * (step_ms / row.step_ms - 1))
        predicted.append(row)
    return predicted, fit_laws(points)


def predict_step(one: WorkerRow, communication_ms: float, workers: int) -> float:
    """The milliseconds of a step by the model: computing, divided by n where scaling is strong, and communication.

    This machine's cores compute the optimizer's part of the step for all workers, and the rest of it unless that
    is emulated; workers beyond them wait for each other.

    Args:
        one: one worker's row.
    """
    waves = max(1.0, workers / one.cores)
    work = (one.step_ms - one.optimizer_ms) / (workers if one.scaling == STRONG else 1)
    return work * (waves if one.compute == REAL else 1) + one.optimizer_ms * waves + communication_ms
