"""Combines the members of a run from their saved predictions, and returns the fields of the `combined` event.

Selection and calibration look at the validation split only; the figures are of the test split. Without one they
are of the validation split, and the result says so, because they are then optimistic: the members, their weights
and the calibration were chosen to look good on just these samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.combine.combination import (
    CALIBRATION_SAMPLES,
    FUNCTION,
    Combination,
    fit_declared,
    is_enough,
)
from ensemble.combine.loading import explain_unloadable
from ensemble.combine.measured import UNMEASURED, measure
from ensemble.combine.metrics import CombineError
from ensemble.combine.prediction_matrix import PredictionMatrix, explain_left_out, read_prediction_matrix
from ensemble.combine.tasks import find_math
from ensemble.combine.uncertainty import Quantified, average, quantify
from ensemble.spec.objectives import infer_mode
from ensemble.user_code.fingerprint import fingerprint_function
from pipelines.providers import import_object

if TYPE_CHECKING:
    from ensemble.spec import Ensemble
    from ensemble.store import RunDir, RunState

OPTIMISTIC = (
    "measured on the validation split, on which members were also selected and calibrated, so optimistic; declare "
    "Ensemble.test for figures on samples that were used for neither"
)

OUT_OF_FOLD = (
    "cross-validation: measured on the training samples, each predicted by members that did not train on it; "
    "weights and calibration were fitted on the same predictions"
)

EPOCHS_CHOSEN = "; optimistic: members chose their epoch on their own fold"

NOT_ASKED = "Ensemble.calibrate is off"
"""Why there is no calibration where one would be possible."""

NO_VALID = "there is no validation split to select and calibrate on; declare Ensemble.valid"
NO_PIPELINE = "members that train without a pipeline have no predictions to combine"
INFEASIBLE = "no finished member keeps the constraints of the search"

_EMPTY = (
    "task",
    "calibration",
    "temperature",
    "split",
    "note",
    *UNMEASURED,
    "decision",
    "uncertainty",
    "conformal",
)


class NotCombined(CombineError):
    """There is nothing to combine: an answer, whose message is the `reason` of the `combined` event."""


def combine(run_dir: RunDir, state: RunState, ensemble: Ensemble) -> dict[str, Any]:
    """Combine the finished members by `ensemble.combine` and measure the result: see `combine_samples`."""
    return combine_samples(run_dir, state, ensemble)[0]


def combine_samples(
    run_dir: RunDir, state: RunState, ensemble: Ensemble
) -> tuple[dict[str, Any], Quantified | None]:
    """Combine the finished members by `ensemble.combine` and measure the result.

    Returns:
        The fields of the event `ensemble.events.Combined`, and the predictions on the split that the figures are
        of. Where nothing finished, or nothing says how the outputs are combined, `reason` says so, `members` is
        empty and there are no predictions: that is an answer, not an error.

    Raises:
        CombineError: when members predicted different samples or saw different targets.
    """
    declared = describe_method(ensemble.combine)  # a function may change its own state when it is called
    left_out: dict[str, str] = {}
    try:
        splits = _read_splits(run_dir, state, ensemble, left_out)
    except NotCombined as error:
        return refuse(declared, str(error), left_out)
    try:
        fields, report = _fit_and_measure(splits, state, ensemble)
    except CombineError as error:
        return refuse(declared, str(error), left_out)
    unloadable = explain_unloadable(run_dir, state, ensemble.recipe, fields["members"])
    return {**fields, **declared, "left_out": left_out, "unloadable": unloadable}, report


@dataclass(frozen=True)
class _Splits:
    """What members are combined on.

    Attributes:
        valid: what the combination is fitted to.
        report: what the figures are of; `valid` itself where there is no usable test split.
        whole: `report` with all of its positions.
        note: what to know about the figures.
        is_fitted: whether nothing is to be fitted: `valid` is the test split then.
    """

    valid: PredictionMatrix
    report: PredictionMatrix
    whole: PredictionMatrix
    note: str
    is_fitted: bool


def _read_splits(run_dir: RunDir, state: RunState, ensemble: Ensemble, left_out: dict[str, str]) -> _Splits:
    """Read what the finished members predicted, of the same samples; the other members are added to `left_out`."""
    is_complete = callable(ensemble.combine) and not ensemble.calibrate and ensemble.thresholds is None
    is_fitted = is_complete and ensemble.valid is None and ensemble.test is not None
    if ensemble.valid is None and not is_fitted:
        raise NotCombined(NO_VALID if ensemble.train is not None else NO_PIPELINE)
    left_out |= {m.id: m.state for m in state.members.values() if m.state != "finished"}
    infeasible = state.list_infeasible()
    left_out |= {name: why for name, why in infeasible.items() if name not in left_out}
    if state.ended is None:  # else the combination is there already, and computed once more
        gone = [m for m in state.members.values() if m.state == "finished" and m.is_checkpoint_removed]
        left_out |= {m.id: m.explain_no_checkpoint() for m in gone}
    finished = [member for member in state.members if member not in left_out]
    if not finished:
        raise NotCombined(INFEASIBLE if infeasible else "no member finished")
    valid = read_prediction_matrix(run_dir, state, finished, "test" if is_fitted else "valid")
    left_out |= valid.left_out
    if not valid.members:
        raise NotCombined(explain_left_out(valid.left_out))
    report, note = valid, OPTIMISTIC if valid.groups is None else _describe_folds(state, valid.members)
    if is_fitted:
        note = ""
    elif ensemble.test is not None:
        test = read_prediction_matrix(run_dir, state, valid.members, "test")
        if not test.members:
            note = f"no usable test predictions ({explain_left_out(test.left_out)}); {note}"
        elif test.target is None and valid.target is not None:
            note = f"the test split has no target; {note}"
        elif test.holds_same_samples(valid):
            note = f"the test split has the samples of the validation split; {note}"
        else:
            left_out |= test.left_out
            valid, report, note = valid.select(test.members), test, ""
    whole, is_valid = report, report is valid
    if not callable(ensemble.combine):  # a function may look at a sample as a whole
        valid = valid.thin()
        report = valid if is_valid else report.thin()
    for name, split in (("valid", valid), ("test", report)):
        try:
            if split.target is not None:
                find_math(valid.task).check_target(split.values[0], split.target)
        except CombineError as error:
            raise NotCombined(f"the {name} predictions: {error}") from error
    return _Splits(valid, report, whole, note, is_fitted)


def _fit_and_measure(splits: _Splits, state: RunState, ensemble: Ensemble) -> tuple[dict[str, Any], Quantified]:
    """Fit the combination; returns fields of `combined`, and the predictions that the figures are of."""
    valid, report, task_math = splits.valid, splits.report, find_math(splits.valid.task)
    is_valid = report is valid
    combination, held_out = fit_declared(ensemble, valid)
    best = None
    if valid.target is not None and report.target is not None:
        reported = {m.id: m.metrics for m in state.members.values()}
        best = find_best_member(valid.members, reported, valid, ensemble)
    # What is said of the validation split is what a stack says of rows that it was not fitted on.
    own = replace(quantify("test" if splits.is_fitted else "valid", valid, combination, best), values=held_out)
    if valid.groups is not None:  # how far the members of a configuration differ is not known out of fold
        own.parts.clear()
    shown = own if is_valid else quantify("test", report, combination, best)
    # Of a stack, only the rows that it was fitted on are known out of fold.
    whole = report if is_valid and combination.stack is not None else splits.whole
    measured, notes = measure(task_math, valid, whole, combination, shown, best, ensemble)
    if best is not None and len(set(valid.groups or (0, 1))) == 1:  # one configuration: nothing to be better than
        measured = {**measured, "best_member": None, "best_calibrated": None, "noise": None}
        for name in ("metrics", "intervals", "reliability"):
            kept = {of: own for of, own in (measured[name] or {}).items() if of == "ensemble"}
            measured[name] = kept or None
    weights = {m: float(w) for m, w in zip(valid.members, combination.weights, strict=True) if w > 0}
    calibration = _describe_calibration(combination, valid, ensemble)
    conformal = decision = None
    # What is calibrated on the test split is not measured on it.
    if own.target is not None and shown.target is not None and not splits.is_fitted:
        describe = import_object("ensemble.combine.conformal:describe")
        both = (own.values, own.target), (shown.values, shown.target)
        conformal = describe(valid.task, *both, level=ensemble.coverage, is_same=shown is own)
    if ensemble.thresholds is not None:
        describe = import_object("ensemble.combine.thresholds:describe")
        decision = describe(valid.task, combination.thresholds, ensemble.thresholds, shown.values, report.target)
    fields = {
        "task": valid.task.as_record(),
        "method": combination.method,
        "reason": combination.reason,
        "candidates": valid.members,
        "members": list(weights),
        "weights": weights,
        "calibration": calibration,
        "temperature": combination.calibration if calibration["method"] == "temperature" else 1.0,
        "out_of_fold": valid.groups is not None,
        "folds": _measure_folds(state, valid, ensemble) if valid.groups is not None else [],
        "split": "valid" if is_valid and not splits.is_fitted else "test",
        "note": "; ".join(filter(None, (splits.note, report.part or valid.part, *notes))) or None,
        **measured,
        "decision": decision,
        "uncertainty": average(shown.parts) or None,
        "conformal": conformal,
    }
    return fields, shown


def _measure_folds(state: RunState, valid: PredictionMatrix, ensemble: Ensemble) -> list[dict[str, Any]]:
    """Of each configuration the objective that its members reported, each of its own fold: mean and spread."""
    rows = []
    for group in dict.fromkeys(valid.groups or ()):
        members = valid.list_group(group)
        found = [_as_finite(state.members[one].metrics.get(str(ensemble.objective))) for one in members]
        values = [value for value in found if value is not None]
        if len(values) > 1:
            row = {"members": members, "metric": ensemble.objective, "folds": len(values)}
            rows.append({**row, "mean": float(np.mean(values)), "std": float(np.std(values, ddof=1))})
    return sorted(rows, key=lambda row: row["mean"], reverse=ensemble.mode == "max")


def _describe_folds(state: RunState, members: Sequence[str]) -> str:
    """What figures of out-of-fold predictions are."""
    identities = [state.members[member].identity for member in members]
    is_selected = any(identity.get("keep") == "best" or identity.get("early_stopping") for identity in identities)
    return f"{OUT_OF_FOLD}{EPOCHS_CHOSEN if is_selected else ''}"


def _describe_calibration(combination: Combination, valid: PredictionMatrix, ensemble: Ensemble) -> dict[str, Any]:
    task_math, target = find_math(valid.task), valid.target
    name = ensemble.calibrate if isinstance(ensemble.calibrate, str) else task_math.calibrator
    reason = task_math.no_calibration
    if name is not None:
        reason = None if ensemble.calibrate else NOT_ASKED
        if reason is None and target is None:
            reason = "the validation predictions have no target"
        elif reason is None and target is not None and not is_enough(target):
            reason = f"it needs {CALIBRATION_SAMPLES} validation samples, there are {target.size}"
    if reason is not None:
        return {"method": None, "value": None, "reason": reason}
    return {"method": name, "value": combination.calibration, "reason": None}


def find_best_member(
    members: Sequence[str],
    reported: Mapping[str, Mapping[str, Any] | None],
    valid: PredictionMatrix,
    ensemble: Ensemble,
) -> str:
    """The member best on validation by the objective (ties: the earlier one).

    The objective as the member itself reported it after its last epoch; where no member did, it is computed from
    the saved predictions, or NLL stands in for it. Members without a value come last.
    """
    sign = -1.0 if ensemble.mode == "max" else 1.0
    values = {m: _as_finite((reported.get(m) or {}).get(str(ensemble.objective))) for m in members}
    if valid.groups is not None:  # each value is of another fold: the mean of its configuration's counts
        numbers = {m: math.nan if value is None else value for m, value in values.items()}
        means = [float(np.mean([numbers[m] for m in valid.list_group(group)])) for group in valid.groups]
        values = {m: _as_finite(mean) for m, mean in zip(valid.members, means, strict=True)}
    task_math = find_math(valid.task)
    if all(value is None for value in values.values()) and task_math.criteria:
        assert valid.target is not None
        name = task_math.choose_criterion(ensemble.objective, ensemble.mode)
        each_member = zip(valid.members, valid.values, strict=True)
        values = {member: task_math.measure(own, valid.target).get(name) for member, own in each_member}
        sign = -1.0 if infer_mode(name) == "max" else 1.0
    return min(members, key=lambda m: math.inf if (value := values[m]) is None else sign * value)


def refuse(
    declared: Mapping[str, str | None], reason: str, left_out: dict[str, str]
) -> tuple[dict[str, Any], None]:
    """The fields of the `combined` event where nothing is combined, and no predictions.

    Args:
        declared: what was asked for, see `describe_method`.
        left_out: member -> why it took no part.
    """
    fields: dict[str, Any] = {
        "method": declared["declared"],
        "reason": reason,
        **declared,
        "candidates": [],
        "members": [],
        "weights": {},
        **dict.fromkeys(_EMPTY),
        "left_out": left_out,
    }
    return fields, None


def describe_method(method: str | Callable[..., Any]) -> dict[str, str | None]:
    """The fields of the `combined` event that say what was asked for."""
    if callable(method):
        return {"declared": FUNCTION, "code": fingerprint_function(method)}
    return {"declared": method, "code": None}


def _as_finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None
