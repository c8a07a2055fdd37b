"""Combines the members of a run from their saved predictions, and returns the fields of the `combined` event.

Selection and calibration look at the validation split only; the figures are of the test split. Without one they
are of the validation split, and the result says so, because they are then optimistic: the members, their weights
and the calibration were chosen to look good on just these samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.combine.classes import explain_missing_classes
from ensemble.combine.combination import (
    CALIBRATION_SAMPLES,
    FUNCTION,
    Combination,
    fingerprint_function,
    fit_held_out,
    is_enough,
)
from ensemble.combine.loading import explain_unloadable
from ensemble.combine.measured import UNMEASURED, list_split_metrics, measure
from ensemble.combine.metrics import Array, CombineError
from ensemble.combine.prediction_matrix import PredictionMatrix, explain_left_out, read_prediction_matrix
from ensemble.combine.quantify import Quantified, describe, quantify
from ensemble.combine.shifted_split import describe_change, read_shifted
from ensemble.combine.tasks import TaskMath, find_math
from ensemble.combine.thresholds import measure_decisions, with_thresholds
from ensemble.spec.objectives import infer_mode
from ensemble.spec.split_metrics import list_fields
from ensemble.spec.task import CLASSIFICATION, as_task

if TYPE_CHECKING:
    from ensemble.spec import Ensemble
    from ensemble.store import RunDir, RunState

OPTIMISTIC = (
    "reported on the validation split, on which members were selected and calibrated: optimistic; "
    "declare Ensemble.test for figures on samples that took no part"
)

OUT_OF_FOLD = (
    "cross-validation: reported on the training samples, each predicted by members that have not learnt from it; "
    "weights and calibration were fitted on the same predictions"
)

EPOCHS_CHOSEN = "; optimistic: members chose their epoch on their own fold"

NOT_ASKED = "Ensemble.calibrate is off"
"""Why there is no calibration where one would be possible."""

_UNQUANTIFIED = ("decision", "uncertainty", "conformal", "selective", "shifted", "shifted_metrics")


def combine(run_dir: RunDir, state: RunState, ensemble: Ensemble) -> dict[str, Any]:
    """Combine the finished members by `ensemble.combine` and measure the result: see `combine_samples`."""
    return combine_samples(run_dir, state, ensemble)[0]


def combine_samples(
    run_dir: RunDir, state: RunState, ensemble: Ensemble
) -> tuple[dict[str, Any], list[Quantified]]:
    """Combine the finished members by `ensemble.combine`, measure the result, and how sure it is of each sample.

    Returns:
        The fields of the `combined` event, plain JSON values:

        - `task`: what was predicted, see `Task.as_record`.
        - `method`: what was done, "function" for the user's; `reason`: why that, or the metrics, are not what was
          asked for, else None.
        - `declared`: the method that was asked for; `code`: of a function its fingerprint, else None. The run's
          end adds `failed`: True where an error was in the way that may pass: it is to be combined again.
        - `candidates`: ids of all members that the combination was fitted to.
        - `members`, `weights`: those of them whose weight is above 0, and their weights.
        - `calibration`: {"method": "temperature", "variance_scale" or None, "value": its factor, "reason": why
          there is none}.  `temperature`: the factor of a temperature, else 1.
        - `split`: what the metrics are of, "test" or "valid"; `note`: what to know about that, else None.
        - `metrics`: the task's figures (`TaskMath.measure`) of `ensemble`, of `best` (the one member that is best
          on the validation split by the objective) and `mean` (over all members); None where there is no target.
        - `intervals`: [low, high] of the figures of `ensemble`, `best` and their `difference` (ensemble - best),
          by the bootstrap, not of metrics of the whole split where there are too many predictions to compute
          those again (`bootstrap.Resampled`); `noise`: the figures whose difference may be chance.
        - `best_member`: its id; `best_calibrated`: its metrics with a calibration of its own, the fair rival of a
          calibrated ensemble in NLL and ECE (Ashukha et al. 2020); None unless calibrating.
        - `reliability`: of probabilities the curves of `ensemble` and `best`: [confidence, accuracy, count] of
          each bin.
        - `decision`: with `Ensemble.thresholds` these, `by` which metric they were fitted, and the metrics of what
          is predicted by `thresholds` and as `usual`; else None.
        - `uncertainty`, `conformal`, `selective`, `shifted`: how sure it is, see `quantify.describe`.
        - `shifted_metrics`: how good it and the best member are on shifted samples, see `shifted.measure_change`;
          None without shifted samples, or where `note` says why.
        - `left_out`: member -> why it took no part; `unloadable`: why `load` cannot predict with them, else None.

        When nothing says how the outputs are combined, or nothing finished, there is nothing to combine: `metrics`
        is None, `members` is empty and `reason` says why. That is an answer, not an error.

        And the predictions of all splits with their uncertainty: nothing where there is nothing to combine.

    Raises:
        CombineError: when members predicted different samples or saw different targets.
    """
    asked = describe_method(ensemble.combine)  # a function may change its own state when it is called
    left_out: dict[str, str] = {m.id: m.state for m in state.members.values() if m.state != "finished"}
    finished = [m.id for m in state.members.values() if m.state == "finished"]
    if state.ended is None:  # else the combination is there already, and computed once more
        gone = [m for m in state.members.values() if m.state == "finished" and m.is_checkpoint_removed]
        left_out |= {m.id: m.explain_no_checkpoint() for m in gone}
        finished = [member for member in finished if member not in left_out]
    if not finished:
        return refuse(asked, "no member finished", left_out)
    is_fitted = _is_fitted(ensemble)
    if ensemble.valid is None and not is_fitted:
        reason = "there is no validation split to select and calibrate on; declare Ensemble.valid"
        return refuse(asked, reason, left_out)
    valid = read_prediction_matrix(run_dir, state, finished, "test" if is_fitted else "valid")
    left_out |= valid.left_out
    declared = as_task("Recipe.task", getattr(ensemble.recipe, "task", None))
    is_unclear = valid.target is None and (valid.members or valid.unsaved) and valid.task == CLASSIFICATION
    if is_unclear and declared in (None, CLASSIFICATION):
        why = explain_missing_classes(ensemble, run_dir, state, finished)
        if why is not None:
            return refuse(asked, why, left_out)
    if not valid.members:
        return refuse(asked, explain_left_out(valid.left_out), left_out)

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
    task_math, whole, is_valid = find_math(valid.task), report, report is valid
    if not callable(ensemble.combine):  # a function may look at a sample as a whole
        valid = valid.thin()
        report = valid if is_valid else report.thin()
    for name, split in (("valid", valid), ("test", report)):
        try:
            if split.target is not None:
                task_math.check_target(split.values[0], split.target)
        except CombineError as error:
            return refuse(asked, f"the {name} predictions: {error}", left_out)
    try:
        combination, held_out = fit_held_out(
            ensemble.combine,
            valid.values,
            valid.target,
            task=valid.task,
            objective=task_math.choose_criterion(ensemble.objective, ensemble.mode)
            if task_math.criteria
            else None,
            calibrate=ensemble.calibrate,
            groups=valid.groups,
        )
        combination = with_thresholds(combination, held_out, valid.target, ensemble.thresholds)
        # What is said of the validation split is what a stack says of rows that it was not fitted on.
        best = None
        if valid.target is not None and report.target is not None:
            reported = {m.id: m.metrics for m in state.members.values()}
            best = find_best_member(valid.members, reported, valid, ensemble)
        samples = [replace(quantify("test" if is_fitted else "valid", valid, combination, best), values=held_out)]
        if valid.groups is not None:  # how far the members of a configuration differ is not known out of fold
            samples[0].parts.clear()
        if report is not valid:
            samples.append(quantify("test", report, combination, best))
        if is_valid and combination.stacker is not None:  # the others were not fitted out of fold
            whole = report
        measured, notes = measure(task_math, valid, whole, combination, samples[-1], best, ensemble)
    except CombineError as error:
        return refuse(asked, str(error), left_out)

    decision = _describe_decision(combination, ensemble.thresholds, report, samples[-1].values)
    shifted, why = None, ""
    if ensemble.shifted is not None:
        shifted, why = read_shifted(run_dir, state, valid, combination, best)
    more = [one for one in list_split_metrics(task_math, ensemble) if not list_fields(one)]
    change, why_not = describe_change(shifted, measured["metrics"], more)
    sureness = describe(samples[0], samples[-1], shifted, level=ensemble.coverage)
    if is_fitted:  # it would be calibrated on what it is measured on
        sureness["conformal"] = None
    if shifted is not None:
        samples.append(shifted)
    weights = {m: float(w) for m, w in zip(valid.members, combination.weights, strict=True) if w > 0}
    calibration = _describe_calibration(task_math, combination, valid, ensemble)
    fields = {
        "task": valid.task.as_record(),
        "method": combination.method,
        "reason": combination.reason,
        **asked,
        "candidates": valid.members,
        "members": list(weights),
        "weights": weights,
        "calibration": calibration,
        "temperature": combination.temperature if calibration["method"] == "temperature" else 1.0,
        "out_of_fold": valid.groups is not None,
        "split": "valid" if report is valid and not is_fitted else "test",
        "note": "; ".join(filter(None, (note, report.part or valid.part, *notes, why, why_not))) or None,
        **measured,
        "decision": decision,
        **sureness,
        "shifted_metrics": change,
        "left_out": left_out,
        "unloadable": explain_unloadable(run_dir, state, ensemble.recipe, list(weights)),
    }
    return fields, samples


def _is_fitted(ensemble: Ensemble) -> bool:
    """Whether the members are combined without anything fitted, so that no validation split is needed."""
    is_complete = callable(ensemble.combine) and not ensemble.calibrate and ensemble.thresholds is None
    return is_complete and ensemble.valid is None and ensemble.test is not None


def _describe_folds(state: RunState, members: Sequence[str]) -> str:
    """What figures of out-of-fold predictions are."""
    identities = [state.members[member].identity for member in members]
    is_selected = any(each.get("keep") == "best" or each.get("early_stopping") for each in identities)
    return f"{OUT_OF_FOLD}{EPOCHS_CHOSEN if is_selected else ''}"


def _describe_decision(
    combination: Combination, by: str | None, report: PredictionMatrix, values: Array
) -> dict[str, Any] | None:
    """The field `decision`; None where no thresholds are asked for."""
    if by is None:
        return None
    found = combination.thresholds
    if found is None or report.target is None:
        return {"by": by, "thresholds": None, "reason": "the predictions have no target"}
    metrics = {
        name: measure_decisions(combination.task, values, report.target, at)
        for name, at in (("thresholds", found), ("usual", None))
    }
    return {"by": by, "thresholds": found.tolist(), "metrics": metrics, "reason": None}


def _describe_calibration(
    task_math: TaskMath, combination: Combination, valid: PredictionMatrix, ensemble: Ensemble
) -> dict[str, Any]:
    reason = task_math.no_calibration
    if reason is None and not ensemble.calibrate:
        reason = NOT_ASKED
    elif reason is None and valid.target is None:
        reason = "the validation predictions have no target"
    elif reason is None and valid.target is not None and not is_enough(valid.target):
        reason = f"{valid.target.size} validation samples are fewer than the {CALIBRATION_SAMPLES} that it needs"
    if reason is not None:
        return {"method": None, "value": None, "reason": reason}
    return {"method": task_math.calibration, "value": combination.temperature, "reason": None}


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
        found = {m: math.nan if value is None else value for m, value in values.items()}
        means = [float(np.mean([found[m] for m in valid.list_group(group)])) for group in valid.groups]
        values = {m: _as_finite(mean) for m, mean in zip(valid.members, means, strict=True)}
    if all(value is None for value in values.values()):
        values, sign = _score_members(valid, ensemble)
    return min(members, key=lambda m: math.inf if (value := values[m]) is None else sign * value)


def _score_members(valid: PredictionMatrix, ensemble: Ensemble) -> tuple[dict[str, float | None], float]:
    """The criterion that stands in for an objective that nobody reported, of each member, and the sign by which
    the least is best.
    """
    assert valid.target is not None
    task_math = find_math(valid.task)
    if not task_math.criteria:
        return dict.fromkeys(valid.members), 1.0
    name = task_math.choose_criterion(ensemble.objective, ensemble.mode)
    scores = {
        m: task_math.measure(own, valid.target).get(name)
        for m, own in zip(valid.members, valid.values, strict=True)
    }
    return scores, -1.0 if infer_mode(name) == "max" else 1.0


def refuse(
    asked: Mapping[str, str | None], reason: str, left_out: dict[str, str]
) -> tuple[dict[str, Any], list[Quantified]]:
    """The fields of the `combined` event where nothing is combined, and no predictions.

    Args:
        asked: what was asked for, see `describe_method`.
        left_out: member -> why it took no part.
    """
    unknown = dict.fromkeys(("task", "calibration", "temperature", "split", "note", *UNMEASURED, *_UNQUANTIFIED))
    fields: dict[str, Any] = {
        "method": asked["declared"],
        "reason": reason,
        **asked,
        "candidates": [],
        "members": [],
        "weights": {},
        **unknown,
        "left_out": left_out,
    }
    return fields, []


def describe_method(method: str | Callable[..., Any]) -> dict[str, str | None]:
    """The fields of the `combined` event that say what was asked for."""
    if callable(method):
        return {"declared": FUNCTION, "code": fingerprint_function(method)}
    return {"declared": method, "code": None}


def _as_finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
