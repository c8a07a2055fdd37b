"""Reads what a run's members predicted for shifted samples, and says what of it cannot be measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.combine.metrics import CombineError, find_known
from ensemble.combine.prediction_matrix import PredictionMatrix, explain_left_out, read_prediction_matrix
from ensemble.combine.quantify import Quantified, quantify
from ensemble.combine.shifted import measure_change
from ensemble.combine.tasks import find_math
from ensemble.spec.split_metrics import SplitMetricLike

if TYPE_CHECKING:
    from ensemble.combine.combination import Combination
    from ensemble.store import RunDir, RunState

UNKNOWN_PADDING = (
    "the shifted samples have no targets that say which of their positions take part: all count in their "
    "uncertainty, padding too, which other samples leave out"
)


def read_shifted(
    run_dir: RunDir, state: RunState, valid: PredictionMatrix, combination: Combination, best: str | None
) -> tuple[Quantified | None, str]:
    """The shifted samples, or why they cannot be measured: nothing else depends on them.

    Args:
        valid: of the members that are combined.
        best: the best of them, if known.
    """
    from ensemble.store import DamagedError

    try:
        shifted = read_prediction_matrix(run_dir, state, valid.members, "shifted")
        if not shifted.left_out and shifted.task == valid.task:
            shifted = shifted if combination.function is not None else shifted.thin()
            found = quantify("shifted", shifted, combination, best)
            padded = valid.target is not None and not find_known(valid.target).all()
            return found, UNKNOWN_PADDING if padded and not found.is_known else ""
        why = (
            explain_left_out(shifted.left_out) if shifted.left_out else f"they are of the task {shifted.task.kind}"
        )
    except (CombineError, DamagedError) as error:
        why = str(error)
    return None, f"the shifted samples are not measured: {why}"


def describe_change(
    shifted: Quantified | None, metrics: Mapping[str, Any] | None, more: Sequence[SplitMetricLike]
) -> tuple[dict[str, Any] | None, str]:
    """The field `shifted_metrics` of the `combined` event (`shifted.measure_change`), or why there is none.

    Args:
        shifted: the shifted samples; None: there are none, or they cannot be measured.
        metrics: the field of that name: "ensemble", "best" -> figures on the usual samples.
        more: metrics of the whole split.
    """
    if shifted is None or metrics is None or shifted.best is None:
        return None, ""
    why = "they have no targets of the task"
    if shifted.target is not None:
        models = {"ensemble": shifted.values, "best": shifted.best}
        try:
            return measure_change(find_math(shifted.task), metrics, models, shifted.target, more) or None, ""
        except CombineError as error:
            why = str(error)
    return None, f"how good the model is on the shifted samples is not measured: {why}"
