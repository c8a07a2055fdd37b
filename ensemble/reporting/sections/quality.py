"""What the combined model is worth: its figures beside the best member, what of them is noise, how sure it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED, Combined
from ensemble.reporting import text
from ensemble.reporting.model_figures import (
    JUDGED_BY,
    ModelComparison,
    Ranking,
    compare,
    read_task,
)
from ensemble.reporting.ranking import finite_or_none
from ensemble.reporting.sections import Line, Table, scored
from ensemble.spec.splits import describe_overlap

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.spec.task import Task
    from ensemble.store import RunState

#: In a line of figures.
MOST_FIGURES = 3
#: What the parts of the uncertainty mean.
PARTS = {
    "total": "of the combined prediction",
    "aleatoric": "in the data, as the members see it: no further member removes it",
    "epistemic": "between the members: more data or members would lower it",
    "disagreement": "the probability that two members name different classes",
}
#: Of the parts of the uncertainty but the disagreement, which is a probability.
UNITS = {
    "classification": "nats",
    "multilabel": "nats",
    "gaussian": "(unit of the target)²",
    "regression": "(unit of the target)²",
    "quantiles": "(unit of the target)",
}
#: Of a record of conformal prediction, which numbers are figures.
SHOWN = ("level", "coverage", "size", "empty")
#: What methods and fields of conformal prediction are called.
WORDS = {
    "size": "mean size",
    "empty": "share of empty sets",
    "thr": "sets of the most probable classes (THR)",
    "aps": "adaptive sets (APS)",
    "absolute": "intervals of one width (absolute residual)",
    "normalised": "intervals in standard deviations (normalised residual)",
    "cqr": "intervals from quantiles (CQR)",
}


def summarize(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns lines for the closing summary, which has the figures as a table."""
    return describe_quality(state)


def describe_failed_combination(state: RunState) -> str | None:
    """Why members that finished could not be combined, by an error or by what they predict; None where they were,
    or where a run asks for no combination that is possible (it has no validation split, they predict nothing).
    """
    combined = state.combined or NOT_COMBINED
    is_asked = combined.declared == "function" or bool(combined.left_out)
    is_failed = combined.failed or (is_asked and not combined.members)
    return f"there is no combined model: {combined.reason}" if is_failed else None


def describe_figures(state: RunState) -> list[Line]:
    """Returns the first figures of the combined model in a line; none where there is none."""
    combined = state.combined or NOT_COMBINED
    shown = compare(combined, (state.objective, state.direction))[:MOST_FIGURES]
    if not shown:
        return []
    figures = ", ".join(
        f"{comparison.figure.heading} {text.score(comparison.value)} ({comparison.describe_difference()})"
        for comparison in shown
    )
    used = [member for member, weight in (combined.weights or {}).items() if weight > 0]
    alone = f"; it is {used[0]} alone" if len(used) == 1 else ""
    return [("combined", f"{figures}; on the {combined.measured_on}{alone}")]


def describe_benefit(combined: Combined | None, ranking: Ranking) -> tuple[str, str]:
    """Returns whether combining the members has helped, in a sentence, and its tone: "good", "bad" or "".

    Judged by the figure that says most of the whole prediction (`JUDGED_BY`), with the paired 95 % interval of the
    difference to the best member; where the combination is calibrated, the best member calibrated alike counts as
    well. On the samples that the members were chosen by nothing is claimed. The sentence is empty where nothing
    was combined, there was nothing to choose from, or nothing can be compared.
    """
    combined = combined or NOT_COMBINED
    shown = compare(combined, ranking)
    judged = JUDGED_BY.get(read_task(combined).kind, ranking[0])
    comparison = next(
        (comparison for comparison in shown if comparison.figure.name == judged), shown[0] if shown else None
    )
    used = [member for member, weight in (combined.weights or {}).items() if weight > 0]
    of = len(combined.candidates or used)
    if (
        comparison is None
        or comparison.best is None
        or comparison.figure.better not in ("higher", "lower")
        or not used
        or of < 2
    ):
        return "", ""
    if len(used) == 1:
        return f"1 of {of} members was chosen: no gain from combining", ""
    chosen = f"all {of} members were combined" if len(used) == of else f"{len(used)} of {of} members were chosen"
    gain = _describe_gain(comparison.value, comparison.best, comparison)
    sentence = f"{chosen}: {comparison.figure.label} {gain} than the best member"
    calibrated = finite_or_none((combined.best_calibrated or {}).get(comparison.figure.name))
    alike = calibrated is None or comparison.figure.is_better(comparison.value, calibrated)
    if calibrated is not None:
        sentence += f", {_describe_gain(comparison.value, calibrated, comparison, None)} than it calibrated alike"
    if combined.split == "valid" and not combined.out_of_fold:
        return f"{sentence}; these are the samples it was chosen by: a test= would tell", ""
    if comparison.is_noise or comparison.is_better is None:
        return f"{sentence}; within noise: no gain is shown{_advise(combined)}", ""
    if comparison.is_better and not alike:
        return f"{sentence}: the gain is that of calibration{_advise(combined)}", ""
    return f"{sentence}; beyond noise", comparison.tone


def _describe_gain(value: float, rival: float, comparison: ModelComparison, of: str | None = "difference") -> str:
    """`0.0782 better (95 %: 0.0279 … 0.1268)`, with the interval of the comparison unless `of` is None."""
    sign = 1 if comparison.figure.better == "higher" else -1
    gain = sign * (value - rival)
    flip = sign if gain >= 0 else -sign
    bounds = sorted(flip * bound for bound in comparison.difference) if of and comparison.difference else None
    interval = "" if bounds is None else f" (95 %: {text.interval((bounds[0], bounds[1]))})"
    return f"{text.score(abs(gain))} {'worse' if gain < 0 else 'better'}{interval}"


def _advise(combined: Combined) -> str:
    """What to change where members are too alike."""
    apart = finite_or_none((combined.uncertainty or {}).get("disagreement"))
    if apart is None or read_task(combined).kind != "classification":
        return "; members that differ more in architecture or data may add more"
    return (
        f"; two members name different classes for {100 * apart:.2g} % of the samples: vary architecture or data"
    )


def describe_quality(state: RunState) -> list[Line]:
    """Returns why there is no combined model, or whether it helps and how sure it is: calibration, uncertainty,
    conformal sets.
    """
    combined = state.combined or NOT_COMBINED
    if combined.reason and not combined.members:
        return [("combined", f"none: {combined.reason}")]
    if (why := _explain_unfinished(state)) is not None:
        return [("combined", f"none: {why}")]
    benefit, _ = describe_benefit(combined, (state.objective, state.direction))
    reason = [f"by {combined.method}: {combined.reason}"] if combined.reason else []
    shared = [describe_overlap(row) for row in state.header.overlap or ()]
    lines = [benefit, *reason, *shared, *_describe_calibration(combined), *_describe_decision(combined)]
    lines += _describe_uncertainty(combined)
    for name, figures in list_conformal(combined):
        words = [f"{_word(key)} {text.score(value)}" for key, value in figures.items()]
        record = (combined.conformal or {})[name]
        if None in (record.get("threshold", 0), *(record.get("thresholds") or ())):
            words.append("too few samples to calibrate on: everything is predicted")
        lines.append(f"conformal, {_word(name)}: {', '.join(words)}")
    return [("" if at else "combined", line) for at, line in enumerate(filter(None, lines))]


def _explain_unfinished(state: RunState) -> str | None:
    """Why an ended run has no finished member; None where it has one, or goes on."""
    states = Counter(member.state for member in state.members.values())
    if state.ended is None or not states or states["finished"]:
        return None
    why = [f"no member finished ({', '.join(f'{many} {name}' for name, many in states.items())})"]
    if states["pruned"]:
        why.append("the search's pruner, or its stop=, ended them: pruner='none' or more epochs lets them finish")
    return "; ".join(why)


def _describe_calibration(combined: Combined) -> Iterator[str]:
    calibration = combined.calibration or {}
    if calibration.get("method") is None and calibration.get("reason"):
        yield f"not calibrated: {calibration['reason']}"
    elif calibration.get("method") == "variance_scale":
        yield f"calibrated: variances times {calibration['value']:.3g}"
    elif calibration.get("method") not in (None, "temperature"):
        yield f"calibrated by {calibration['method']}"


def _describe_decision(combined: Combined) -> Iterator[str]:
    decision = combined.decision
    if decision is None:
        return
    by, of = decision["by"], decision["thresholds"]
    if of is None:
        yield f"no thresholds for {by}: {decision['reason']}"
        return
    shown = ", ".join(
        f"{_word(name)} {text.score(value)} ({text.score(decision['metrics']['usual'].get(name))})"
        for name, value in decision["metrics"]["thresholds"].items()
    )
    yield f"decides by thresholds for {by}, in brackets by what is most probable: {shown}"
    names = combined.classes or range(len(of))
    pairs = [f"{name} {text.score(value)}" for name, value in zip(names, of, strict=True)]
    yield f"thresholds: {', '.join(pairs[:20])}{', ...' if len(pairs) > 20 else ''}"


def _describe_uncertainty(combined: Combined) -> Iterator[str]:
    parts = dict(_read_numbers(combined.uncertainty))
    with_unit = [f"{name} {text.score(value)}" for name, value in parts.items() if name != "disagreement"]
    if with_unit:
        pure = f", disagreement {text.score(parts['disagreement'])}" if "disagreement" in parts else ""
        yield f"uncertainty: {', '.join(with_unit)}{_unit(read_task(combined), '')}{pure}, means of the samples"


def tabulate(state: RunState) -> list[Table]:
    """Returns the tables of the view "Ensemble": uncertainty and conformal figures."""
    combined = state.combined or NOT_COMBINED
    tables = []
    uncertainty = list(_read_numbers(combined.uncertainty))
    if uncertainty:
        reading = "Means of the samples; `ensemble predict RUN_DIR --split test --uncertainty` has each sample's."
        head = [("part", "text"), ("mean", ""), ("unit", "text"), ("", "text")]
        task = read_task(combined)
        rows = [[name, scored(v), _unit(task, name).removeprefix(" "), PARTS[name]] for name, v in uncertainty]
        tables.append(Table("uncertainty", "Uncertainty", reading, head, rows))
    methods = list_conformal(combined)
    if keys := [key for key in SHOWN if any(key in figures for _, figures in methods)]:
        reading = (
            "Sets and intervals that hold the true value with a guaranteed probability, if the samples of both "
            "splits are exchangeable; calibrated on the validation split"
            + (", measured on the test split." if combined.split == "test" else ".")
        )
        columns = [(f"{_word(key)} (lower is better)" if key == "size" else _word(key), "") for key in keys]
        rows = [[_word(name), *map(scored, map(figures.get, keys))] for name, figures in methods]
        tables.append(Table("conformal", "Conformal prediction", reading, [("method", "text"), *columns], rows))
    return tables


def _word(name: str) -> str:
    """What a field is called."""
    return WORDS.get(name, name.replace("_", " "))


def list_conformal(combined: Combined) -> list[tuple[str, dict[str, float]]]:
    """Returns the figures of each method of conformal prediction."""
    return [
        (name, {key: value for key, value in _read_numbers(record) if key in SHOWN})
        for name, record in (combined.conformal or {}).items()
    ]


def _read_numbers(record: Mapping[str, Any] | None) -> Iterator[tuple[str, float]]:
    for name, value in (record or {}).items():
        if (finite := finite_or_none(value)) is not None:
            yield name, finite


def _unit(task: Task, part: str) -> str:
    return "" if part == "disagreement" or task.kind not in UNITS else f" {UNITS[task.kind]}"
