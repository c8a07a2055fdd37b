"""Combines the members of a run from their saved predictions, and returns the fields of the `combined` event.

Selection and calibration look at the validation split only; the figures are of the test split. Without one they
are of the validation split, and the result says so, because they are then optimistic: the members, their weights
and the temperature were chosen to look good on just these samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.combine.aligned import Aligned, read_aligned
from ensemble.combine.calibrate import apply_temperature, fit_temperature
from ensemble.combine.classes import explain_missing_classes
from ensemble.combine.combination import Combination, fit
from ensemble.combine.methods import Criterion
from ensemble.combine.metrics import Array, CombineError, all_metrics, check_target, reliability

if TYPE_CHECKING:
    from ensemble.spec import Ensemble
    from ensemble.store import RunDir, RunState

OPTIMISTIC = (
    "reported on the validation split, on which members were selected and calibrated: optimistic; "
    "declare Ensemble.test for figures on samples that took no part"
)

_UNMEASURED = dict.fromkeys(("metrics", "best_member", "best_calibrated", "reliability"))


def combine(run_dir: RunDir, state: RunState, ensemble: Ensemble) -> dict[str, Any]:
    """Combine the finished members by `ensemble.combine` and measure the result.

    Returns:
        The fields of the `combined` event, plain JSON values:

        - `method`: what was done; `reason`: why that, or the metrics, are not what was asked for, else None.
        - `members`, `weights`: ids whose weight is above 0, and their weights.  `temperature`.
        - `split`: what the metrics are of, "test" or "valid"; `note`: what to know about that, else None.
        - `metrics`: accuracy, nll, ece, brier of `ensemble`, of `best` (the one member that is best on the
          validation split by the objective) and `mean` (over all members); None where there is no target.
        - `best_member`: its id; `best_calibrated`: its metrics with a temperature of its own, the fair rival of a
          calibrated ensemble in NLL and ECE (Ashukha et al. 2020); None unless calibrating.
        - `reliability`: the curves of `ensemble` and `best`: [confidence, accuracy, count] of each bin.
        - `left_out`: member -> why it took no part.

        When the outputs are not class probabilities, or nothing finished, there is nothing to combine: `metrics`
        is None, `members` is empty and `reason` says why. That is an answer, not an error.

    Raises:
        CombineError: when members predicted different samples or saw different targets.
    """
    left_out: dict[str, str] = {m.id: m.state for m in state.members.values() if m.state != "finished"}
    finished = [m.id for m in state.members.values() if m.state == "finished"]
    if not finished:
        return _refuse(ensemble.combine, "no member finished", left_out)
    if ensemble.valid is None:
        reason = "there is no validation split to select and calibrate on; declare Ensemble.valid"
        return _refuse(ensemble.combine, reason, left_out)
    valid = read_aligned(run_dir, finished, "valid")
    left_out |= valid.left_out
    if valid.target is None and (valid.members or valid.unsaved):
        why = explain_missing_classes(ensemble, run_dir, state, finished)
        if why is not None:
            return _refuse(ensemble.combine, why, left_out)
    if not valid.members:
        return _refuse(ensemble.combine, _explain_left_out(valid.left_out), left_out)

    report, note = valid, OPTIMISTIC
    if ensemble.test is not None:
        test = read_aligned(run_dir, valid.members, "test")
        if not test.members:
            note = f"no usable test predictions ({_explain_left_out(test.left_out)}); {OPTIMISTIC}"
        elif test.target is None and valid.target is not None:
            note = f"the test split has no target; {OPTIMISTIC}"
        else:
            left_out |= test.left_out
            valid, report, note = valid.select(test.members), test, ""
    for name, split in (("valid", valid), ("test", report)):
        try:
            if split.target is not None:
                check_target(split.probabilities[0].shape, split.target)
        except CombineError as error:
            return _refuse(ensemble.combine, f"the {name} predictions: {error}", left_out)
    try:
        combination = fit(
            ensemble.combine,
            valid.probabilities,
            valid.target,
            objective=choose_criterion(ensemble.objective, ensemble.mode),
            calibrate=ensemble.calibrate,
        )
    except CombineError as error:
        return _refuse(ensemble.combine, str(error), left_out)

    weights = {m: float(w) for m, w in zip(valid.members, combination.weights, strict=True) if w > 0}
    return {
        "method": combination.method,
        "reason": combination.reason,
        "members": list(weights),
        "weights": weights,
        "temperature": combination.temperature,
        "split": "valid" if report is valid else "test",
        "note": note or None,
        **_measure(valid, report, combination, state, ensemble),
        "left_out": left_out,
    }


def choose_criterion(objective: str | None, mode: str | None) -> Criterion:
    """Returns the criterion of greedy selection: the objective where probabilities determine it, else NLL."""
    if objective == "accuracy" and mode == "max":
        return "accuracy"
    if objective == "brier" and mode == "min":
        return "brier"
    return "nll"


def find_best_member(
    members: Sequence[str], reported: Mapping[str, Mapping[str, Any] | None], valid: Aligned, ensemble: Ensemble
) -> str:
    """The member best on validation by the objective (ties: the earlier one).

    The objective as the member itself reported it after its last epoch; where no member did, it is computed from
    the saved predictions, or NLL stands in for it. Members without a value come last.
    """
    sign = -1.0 if ensemble.mode == "max" else 1.0
    values = {m: _as_finite((reported.get(m) or {}).get(str(ensemble.objective))) for m in members}
    if all(value is None for value in values.values()):
        assert valid.target is not None
        name = choose_criterion(ensemble.objective, ensemble.mode)
        sign = -1.0 if name == "accuracy" else 1.0
        values = {m: all_metrics(valid.probabilities[i], valid.target)[name] for i, m in enumerate(members)}
    return min(members, key=lambda m: math.inf if (value := values[m]) is None else sign * value)


def _measure(
    valid: Aligned, report: Aligned, combination: Combination, state: RunState, ensemble: Ensemble
) -> dict[str, Any]:
    if valid.target is None or report.target is None:
        return _UNMEASURED
    target = report.target
    reported = {m.id: m.metrics for m in state.members.values()}
    best = find_best_member(valid.members, reported, valid, ensemble)
    at = valid.members.index(best)
    combined = combination.predict(report.probabilities)
    alone = [all_metrics(p, target) for p in report.probabilities]
    calibrated: dict[str, float] | None = None
    if ensemble.calibrate:
        temperature = fit_temperature(valid.probabilities[at], valid.target)
        calibrated = all_metrics(apply_temperature(report.probabilities[at], temperature), target)
    return {
        "metrics": {
            "ensemble": all_metrics(combined, target),
            "best": alone[at],
            "mean": {name: float(np.mean([one[name] for one in alone])) for name in alone[0]},
        },
        "best_member": best,
        "best_calibrated": calibrated,
        "reliability": {
            "ensemble": _list_reliability(combined, target),
            "best": _list_reliability(report.probabilities[at], target),
        },
    }


def _list_reliability(probabilities: Array, target: Array) -> list[list[float]]:
    return [list(point) for point in reliability(probabilities, target)]


def _refuse(method: str, reason: str, left_out: dict[str, str]) -> dict[str, Any]:
    """The fields of the `combined` event where nothing can be combined."""
    unknown = {"temperature": None, "split": None, "note": None, **_UNMEASURED}
    return {"method": method, "reason": reason, "members": [], "weights": {}, **unknown, "left_out": left_out}


def _explain_left_out(left_out: Mapping[str, str]) -> str:
    """Returns why all members were left out, in one line: the first member's reason."""
    member, why = next(iter(left_out.items()))
    others = f" (and {len(left_out) - 1} more members)" if len(left_out) > 1 else ""
    hint = (
        "; declare Recipe.predict(model, batch) -> probabilities [b, classes]" if "outputs of shape" in why else ""
    )
    return f"{member}{others}: {why}{hint}"


def _as_finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
