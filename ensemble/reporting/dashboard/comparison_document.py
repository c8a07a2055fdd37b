"""The document of several runs side by side: what the page draws of a comparison, all of it made here.

Runs are ranked against others of the same objective and direction alone: each has charts of its own. A difference
of two runs is that of `ensemble compare`: of the same samples, with its interval, or there is none and the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ensemble.events import NOT_COMBINED
from ensemble.reporting import text
from ensemble.reporting.comparison.compare import explain_differences, make_rows
from ensemble.reporting.comparison.declarations import Declared, list_differences
from ensemble.reporting.dashboard.plots import draw_axis, draw_plot, draw_reference, draw_series
from ensemble.reporting.model_figures import ModelComparison, compare, describe_figure
from ensemble.reporting.ranking import finite_or_none, pareto_front
from ensemble.reporting.sections import Cell, Table

Document = dict[str, Any]
#: The intervals of the differences of a pair of runs, by figure; or why there are none.
Pair = Mapping[str, Any] | str

COSTS = {"cpu_s": "CPU-seconds", "energy_j": "joules", "wall_s": "seconds of the run"}
#: States of runs that have ended: what they cost is known.
ENDED = ("finished", "finished, with failures", "failed", "stopped")
LONGEST = 120  # letters of a declared value
LOG_SPAN = 30.0  # from which ratio of costs on their axis is logarithmic
MOST_NOTES = 4  # above the charts
MOST_PARAMS = 12  # of a member, that are written out


@dataclass
class Compared:
    """One run of a comparison.

    Attributes:
        key: in addresses.  name: unique among the runs.  word, tone: how it stands.
        declared: None while it has not been read.  missing: why it cannot be.
    """

    key: str
    name: str
    word: str
    tone: str
    declared: Declared | None = None
    missing: str | None = None


@dataclass
class _Group:
    """The runs that can be ranked: their places among all, by which they are coloured, and what ranks them."""

    objective: str
    direction: str
    runs: list[tuple[int, Compared, Declared]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.objective}, {'higher' if self.direction == 'max' else 'lower'} is better"


def describe_comparison(runs: Sequence[Compared], pairs: Mapping[str, Pair | None]) -> Document:
    """Returns the document.

    Args:
        runs: in the order in which they were asked for; the others are compared with the first.
        pairs: of each run but the first, by its key: how its combined model differs from that of the first; None:
            it is still to be computed.

    Returns:
        - `runs`: `key`, `name`, `state`; series name runs by their places here.
        - `notes`: what is not compared, and why; `pending`: how many runs and pairs are still to be read.
        - `plots`: charts as `task_plots` has them, with runs for models; `tables`: as of the document `tables`.
    """
    known = [(at, run, run.declared) for at, run in enumerate(runs) if run.declared is not None]
    groups: dict[tuple[str, str], _Group] = {}
    for at, run, one in known:
        ranking = (one.state.objective, one.state.direction)
        groups.setdefault(ranking, _Group(*ranking)).runs.append((at, run, one))
    names, declared = [run.name for _, run, _ in known], [one for *_, one in known]
    notes = [f"{run.name} cannot be read: {run.missing}" for run in runs if run.missing is not None]
    if len(groups) > 1:
        parts = "; ".join(
            f"{group}: {', '.join(run.name for _, run, _ in group.runs)}" for group in groups.values()
        )
        notes.append(f"Runs of different objectives are not ranked against each other ({parts}).")
    if len(known) > 1:
        notes += explain_differences(declared, names)
    unread = sum(run.declared is None and run.missing is None for run in runs)
    is_pair = len(known) > 1 and runs[0].declared is not None
    tables = [_tabulate_runs(known), *_tabulate_models(known)]
    tables += _tabulate_pairs(runs[0], known[1:], pairs) if is_pair else ()
    tables += [_tabulate_best(known), *(_tabulate_declarations(declared, names) if known else ())]
    pending = unread + sum(found is None for found in pairs.values())
    if len(notes) > MOST_NOTES:
        rest = [[note] for note in notes[MOST_NOTES:]]
        tables.append(Table("notes", "Notes", "What else is not compared, and why.", [("", "text long")], rest))
        notes = [*notes[:MOST_NOTES], f"{text.count(len(rest), 'more note')} below."]
    return {
        "runs": [
            {"key": run.key, "name": run.name, "state": {"word": run.word, "tone": run.tone}} for run in runs
        ],
        "notes": [*([f"{pending} of what is compared is still being read …"] if pending else ()), *notes],
        "pending": pending,
        "plots": [plot for group in groups.values() for plot in _plot_group(group, many=len(groups) > 1)],
        "tables": [table.as_dict() for table in tables if table.rows],
    }


# -- charts -------------------------------------------------------------------------------------------------------


def _plot_group(group: _Group, *, many: bool) -> Iterator[Document]:
    """The charts of the runs of one objective."""
    of = f": {group}" if many else ""
    y = describe_figure(group.objective, ranking=(group.objective, group.direction)).title
    best = [_draw_curve(at, one.record["curves"]["best"]) for at, _, one in group.runs]
    reading = "The objective on the validation split after each epoch of the best member."
    yield _plot(f"Best member of each run{of}", reading, draw_axis("epoch"), y, best)
    quartiles = [
        _draw_curve(at, [[row[0], row[k]] for row in one.record["curves"]["quartiles"]], name)
        for at, _, one in group.runs
        for k, name in ((2, "50 %"), (1, "25 %"), (3, "75 %"))
    ]
    reading = "The same of all members that came so far: the median, dashed the quartiles."
    yield _plot(f"Median of the members{of}", reading, draw_axis("epoch"), y, quartiles)
    for name, what in COSTS.items() if len(group.runs) > 1 else ():
        yield from _plot_cost(group, name, what, of)


def _plot(title: str, reading: str, x: Document, y: str, series: Sequence[Document]) -> Document:
    return draw_plot(title, title, reading, x, draw_axis(y), [each for each in series if each["points"]])


def _draw_curve(at: int, points: Sequence[Sequence[Any]], name: str | None = None) -> Document:
    return draw_series(at, points, shape=None, line=True, name=name)


def _plot_cost(group: _Group, name: str, what: str, of: str) -> Iterator[Document]:
    """Quality over what it cost: a point for each run, and the runs that no other beats in both."""
    standings = [one.record["standing"] for *_, one in group.runs]
    splits = {each["split"] for each in standings}
    is_combined = (
        len(splits) == 1 and None not in splits and all(each["combined"] is not None for each in standings)
    )
    quality, split = ("combined", splits.pop()) if is_combined else ("best", "valid")
    shown = [
        (at, run, one, x, y)
        for at, run, one in group.runs
        if (x := finite_or_none(one.record["standing"][name])) is not None
        and (y := finite_or_none(one.record["standing"][quality])) is not None
    ]
    if not shown:
        return
    origins = {one.record["standing"]["energy_origin"] for _, _, one, *_ in shown}
    origins = origins if name == "energy_j" else {"measured"}
    ended = [each for each in shown if each[2].record["standing"]["state"] in ENDED]
    why = _explain_unranked([one for _, _, one, *_ in ended], split)
    why = "how the joules are known differs" if len(origins) > 1 else why
    sign = -1.0 if group.direction == "max" else 1.0
    front = [ended[i] for i in pareto_front([(x, sign * y) for *_, x, y in ended])] if why is None else []
    model = f"the combined model on the {split} split" if is_combined else "the best member in validation"
    reading = [f"{group.objective} of {model}."]
    if why is not None:
        reading.append(f"No Pareto front is drawn: {why}.")
    else:
        reading.append("The dashed line joins the Pareto front: than these no other is better and costs less.")
    if why is None and len(ended) < len(shown):
        reading.append("Runs that have not ended take no part in it: their costs grow.")
    xs = [x for *_, x, _ in shown]
    kind = "log" if min(xs) > 0 and max(xs) > LOG_SPAN * min(xs) else "linear"
    title = f"{what} ({' + '.join(sorted(origins))})" if name == "energy_j" else what
    series = [
        draw_series(at, [(x, y, {"size": 6.5 if each in front else 4.5, "text": _say(run.name, title, x, y)})])
        for each in shown
        for at, run, _, x, y in [each]
    ]
    series.append(draw_reference([(x, y) for *_, x, y in front]))
    reading += [text.ESTIMATED] if "estimated" in origins else []
    yield _plot(
        f"Quality over {what}{of}", " ".join(reading), draw_axis(title, kind=kind), group.objective, series
    )


def _explain_unranked(runs: Sequence[Declared], split: str) -> str | None:
    """Why the figures of runs on a split do not rank them; None where they do."""
    if not runs:
        return "no run has ended yet, and until then what it costs grows"
    if len({one.task for one in runs if one.state.combined is not None}) > 1:
        return "the runs predict different tasks"
    samples = {tuple((one.record["data"].get("splits") or {}).get(split) or (0, None)) for one in runs}
    if len(runs) > 1 and (len(samples) > 1 or any(fingerprint is None for _, fingerprint in samples)):
        return f"the {split} samples of the runs are not known to be the same"
    return None


def _say(run: str, cost: str, x: float, y: float) -> str:
    return f"{run}\n{text.number(x)} {cost}\n{text.score(y)}"


# -- tables -------------------------------------------------------------------------------------------------------

_Known = Sequence[tuple[int, Compared, Declared]]


def _tabulate_runs(known: _Known) -> Table:
    rows = list[list[Cell]]()
    for _, run, one in known:
        each = one.record["standing"]
        origin = "" if each["energy_j"] is None else f" ({each['energy_origin']})"
        rows.append(
            [
                run.name,
                run.word,
                f"{each['finished']}/{each['members']}",
                f"{each['objective']}, {each['direction']}",
                (text.score(each["best"]), each["best"]),
                text.score(each["combined"]) + (f" ({each['split']})" if each["combined"] is not None else ""),
                text.cpu(each["cpu_s"]),
                text.joules(each["energy_j"]) + origin,
                text.duration(each["wall_s"]),
            ]
        )
    head = [("run", "text"), ("state", "text"), ("finished", ""), ("objective", "text"), ("best member", "")]
    head += [("combined", ""), ("CPU time", ""), ("energy", ""), ("took", "")]
    about = (
        "The best member as it reported, on the validation split; the combined model on the split that is named."
    )
    return Table("runs", "Runs", about, head, rows)


def _tabulate_best(known: _Known) -> Table:
    rows = [
        [run.name if place == 0 else "", member, text.score(value), _write_params(params)]
        for _, run, one in known
        for place, (member, value, params) in enumerate(one.record["best"])
    ]
    head = [("run", "text"), ("member", "text"), ("objective", ""), ("hyperparameters", "text")]
    return Table("best", "Best members", "By the run's own objective, on its validation split.", head, rows)


def _tabulate_models(known: _Known) -> Iterator[Table]:
    """The figures of the combined models and the best members, one table for each split and kind of task."""
    apart: dict[tuple[str, str], list[tuple[Compared, Declared]]] = {}
    for _, run, one in known:
        if (one.state.combined or NOT_COMBINED).metrics:
            apart.setdefault((one.split, one.task.kind), []).append((run, one))
    for (split, kind), runs in apart.items():
        found = {
            run.key: {
                each.figure.name: each
                for each in compare(one.state.combined, (one.state.objective, one.state.direction))
            }
            for run, one in runs
        }
        headings = {name: each.figure.heading for figures in found.values() for name, each in figures.items()}
        rows = []
        for run, one in runs:
            figures = found[run.key]
            combined = one.state.combined or NOT_COMBINED
            for model in (f"combined, {len(combined.weights)} of them", f"best, {combined.best_member}"):
                is_best = model.startswith("best")
                values = [_write_figure(figures.get(name), is_best=is_best) for name in headings]
                rows.append(["" if is_best else run.name, model, *values])
        head = [("run", "text"), ("model", "text"), *((heading, "") for heading in headings.values())]
        title = f"Models on the {split} split" + (f" ({kind})" if len(apart) > 1 else "")
        about = "Each run's own samples, with 95 % intervals (bootstrap). Whether two runs differ is told below."
        yield Table(f"models {split} {kind}", title, about, head, rows)


def _tabulate_pairs(first: Compared, others: _Known, pairs: Mapping[str, Pair | None]) -> Iterator[Table]:
    """By what the combined models of the others are better or worse than the first's, and who is not compared."""
    assert first.declared is not None
    rows, apart = [], []
    for _, run, one in others:
        found = pairs.get(run.key)
        if isinstance(found, str):
            apart.append([run.name, found])
        if found is None or isinstance(found, str):
            continue
        for row in make_rows("combined", [first.declared, one], [found]):
            (against,) = row["against"]
            if against["difference"] is None:
                continue
            ranking = (first.declared.state.objective, first.declared.state.direction)
            is_better = describe_figure(row["metric"], first.declared.task, ranking).is_better(
                *row["values"][::-1]
            )
            words = {True: "within noise", False: {True: "better", False: "worse", None: ""}[is_better], None: ""}
            said = words[against["within_noise"]]
            low_high = against["interval"]
            between = "" if low_high is None else f"{low_high[0]:+.4g} … {low_high[1]:+.4g}"
            values = [text.score(value) for value in row["values"]]
            rows.append([run.name, row["metric"], *values, f"{against['difference']:+.4g}", between, said])
    head = [("run", "text"), ("figure", "text"), (first.name, ""), ("run itself", ""), ("difference", "")]
    head += [("95 % interval", ""), ("", "text")]
    about = (
        f"The combined model of each run less that of {first.name}, on the same samples, drawn in pairs "
        "(bootstrap). An interval that holds 0 is within noise; without one nothing is called better."
    )
    yield Table("pairs", f"Differences to {first.name}", about, head, rows)
    about = f"Why the combined model of a run is not compared with that of {first.name}."
    yield Table("apart", "Not compared", about, [("run", "text"), ("why", "text long")], apart)


def _tabulate_declarations(declared: Sequence[Declared], names: Sequence[str]) -> Iterator[Table]:
    differing = list_differences(declared)
    rows: list[list[Any]] = [[row["what"], *map(_write_value, row["values"])] for row in differing]
    head = [("", "text"), *((name, "text long") for name in names)]
    yield Table(
        "declared", "Declared otherwise", "What differs between the declarations, data and code.", head, rows
    )
    apart = {row["what"] for row in differing}
    alike = [
        [name, _write_value(value)]
        for name, value in declared[0].record["declaration"].items()
        if name not in apart
    ]
    alike = [row for row in alike if row[1]]
    yield Table("alike", "Declared alike", "", [("", "text"), ("all runs", "text long")], alike)


def _write_params(params: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{name} {_write_value(value)}" for name, value in list(params.items())[:MOST_PARAMS])
    return shown + (" …" if len(params) > MOST_PARAMS else "")


def _write_value(value: Any) -> str:
    if value is None:
        return ""
    said = value if isinstance(value, str) else json.dumps(value)
    return said if len(said) <= LONGEST else said[: LONGEST - 1] + "…"


def _write_figure(figure: ModelComparison | None, *, is_best: bool) -> str:
    """A figure of a run's combined model, or of its best member, with its interval."""
    value = figure and (figure.best if is_best else figure.value)
    interval = figure and (figure.best_interval if is_best else figure.interval)
    if not isinstance(value, float):
        return ""
    low_high = f" ({text.score(interval[0])} … {text.score(interval[1])})" if isinstance(interval, tuple) else ""
    return text.score(value) + low_high
