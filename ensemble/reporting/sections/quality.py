"""What the combined model is worth: its figures beside the best member, what of them is noise, how sure it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED, Combined, RunStopped
from ensemble.reporting import text
from ensemble.reporting.model_figures import JUDGED_BY, Ranking, compare, read_task
from ensemble.reporting.ranking import finite_or_none
from ensemble.reporting.sections import Line, Table, scored
from ensemble.spec.splits import describe_overlap

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.spec.task import Task
    from ensemble.store import RunState

#: Where combining has not helped.
ADVICE = "vary the members more"
#: In a line of figures.
MOST_FIGURES = 3
#: What the parts of the uncertainty mean.
PARTS = {
    "total": "of the combined prediction",
    "aleatoric": "in the data: more members do not reduce it",
    "epistemic": "between the members: more data or members reduce it",
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
        f"{comparison.figure.heading} {text.score(comparison.value)}"
        + (f" ({comparison.describe_difference()})" if comparison.best is not None else "")
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
    sign = 1 if comparison.figure.better == "higher" else -1
    gain, is_worse = sign * (comparison.value - comparison.best), comparison.is_better is False
    how = "worse" if gain < 0 else "better"
    sentence = f"{chosen}: their {comparison.figure.label} is {text.score(abs(gain))} {how} than the best member's"
    if comparison.difference is not None:
        low, high = sorted((sign if gain >= 0 else -sign) * bound for bound in comparison.difference)
        sentence += f" (95 % interval: {text.score(low)} to {text.score(high)})"
    if combined.split == "valid" and not combined.out_of_fold:
        return f"{sentence}, on the samples that it was chosen by: only a test split can show a gain", ""
    if comparison.is_better is None:
        return f"{sentence}, which may be chance; {ADVICE}", ""
    calibrated = finite_or_none((combined.best_calibrated or {}).get(comparison.figure.name))
    alone = 0.0 if calibrated is None or is_worse else sign * (calibrated - comparison.best)
    if calibrated is not None and not is_worse and alone >= gain:
        return f"{sentence}, but calibration alone gains {text.score(alone)}; {ADVICE}", ""
    part = f"; {text.score(alone)} of it is calibration" if alone > 0 else ""
    return f"{sentence}, more than chance{part}", comparison.tone


def describe_quality(state: RunState, ledger: Ledger | None = None) -> list[Line]:
    """Returns why there is no combined model, or whether it helps and how sure it is: calibration, uncertainty,
    conformal sets.
    """
    combined = state.combined or NOT_COMBINED
    if combined.reason and not combined.members:
        return [("combined", f"none: {combined.reason}")]
    if (why := _explain_unfinished(state)) is not None:
        return [("combined", f"none: {why}")]
    benefit, _ = describe_benefit(combined, (state.objective, state.direction))
    how = combined.reason or ("" if benefit else text.count(len(combined.members), "member"))
    by = f"by {combined.method}: {how}" if how and combined.members else ""
    lines = ["; ".join(filter(None, [*describe_folds(combined)[:MOST_FIGURES], benefit])), by]
    lines += [describe_overlap(row) for row in state.header.overlap or ()]
    lines += [*_describe_calibration(combined), *_describe_decision(combined)]
    lines += _describe_uncertainty(combined)
    for name, figures in list_conformal(combined):
        words = [f"{_word(key)} {text.score(value)}" for key, value in figures.items()]
        record = (combined.conformal or {})[name]
        if None in (record.get("threshold", 0), *(record.get("thresholds") or ())):
            words.append("too few samples to calibrate on: everything is predicted")
        lines.append(f"conformal, {_word(name)}: {', '.join(words)}")
    return [("" if at else "combined", line) for at, line in enumerate(filter(None, lines))]


def describe_folds(combined: Combined) -> list[str]:
    """Returns of each configuration of a cross-validation its objective and the spread of that over folds."""
    return [
        f"out of fold: {row['metric']} {text.score(row['mean'])} ± {text.score(row['std'])} over "
        f"{text.count(row['folds'], 'fold')} ({text.names(row['members'], 3)})"
        for row in combined.folds
    ]


def _explain_unfinished(state: RunState) -> str | None:
    """Why an ended run has no finished member; None where it has one, or goes on."""
    states = Counter(member.state for member in state.members.values())
    if state.ended is None or not states or any(member.has_result for member in state.members.values()):
        return None
    why = [f"no member finished ({', '.join(f'{many} {name}' for name, many in states.items())})"]
    if states["pruned"] and not isinstance(state.ended, RunStopped):
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
    yield f"decides by thresholds for {by} (in brackets: by the largest probability): {shown}"
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
    if combined.folds:
        reading = "Each member is measured on the fold that it leaves out; means over folds of a configuration."
        head = [("configuration", "text"), ("metric", "text"), ("mean", ""), ("deviation", ""), ("folds", "")]
        rows = [
            [text.names(row["members"], 3), row["metric"], scored(row["mean"]), scored(row["std"]), row["folds"]]
            for row in combined.folds
        ]
        tables.append(Table("folds", "Cross-validation", reading, head, rows))
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
    return WORDS.get(name, name.replace("_", " "))


def list_conformal(combined: Combined) -> list[tuple[str, dict[str, float]]]:
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
