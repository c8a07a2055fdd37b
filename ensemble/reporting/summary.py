"""Writes the end of a run: in short, what most people ask, or everything: members, combined model, costs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED, RunFinished
from ensemble.reporting import text
from ensemble.reporting.columns import list_columns
from ensemble.reporting.model_figures import JUDGED_BY, ModelComparison, compare, read_task
from ensemble.reporting.progress import describe_state
from ensemble.reporting.ranking import (
    describe_options,
    finite_or_none,
    metric,
    other_metrics,
    rank_members,
    varied_parameters,
)
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.sections import Line, cost, feeders, quality, training
from ensemble.reporting.sections.notices import describe_remarks
from ensemble.reporting.status import ATTEMPTS
from ensemble.reporting.tables import NARROWEST, Column, lay_out
from ensemble.store.files import format_command

if TYPE_CHECKING:
    from pathlib import Path

    from ensemble.store import MemberState, RunDir, RunState

MOST_LINES, MOST_COLUMNS = 24, 100  # of the short form; more lines where notices need them
BEST, LEAST = 5, 3  # members that it lists; at least, where other lines can be left out for them
#: Labels of its lines, the most important first.
SHORT = ["combined", "stopped", "notice", "failed", "sharing", "cost", "more", "next", "model", "report", "log"]
SHORT += ["Pareto front", "budget", "price", "emissions"]
WHOLE = 7  # of these labels are always there
OTHERS = 3  # metrics besides the objective
WRAPPED = 20  # columns for hyperparameters, which wrap where there is no room for more
UNFINISHED = ("pruned", "failed", "cancelled")
#: What writes the lines below the tables, in their order.
SUMMARIES = (
    quality.describe_quality,
    training.summarize_failures,
    training.summarize_search,
    training.summarize_budget,
    feeders.summarize,
    training.summarize_exchange,
    training.summarize_base,
    cost.summarize,
)
MOST_QUALITY = 5  # figures of the combined model


def summary(
    run: RunProjection, run_dir: RunDir | Path | None = None, everything: bool = False, width: int | None = None
) -> list[Line]:
    """The end of a run: texts of one or several lines, each with its style on a terminal, as rich names it.

    Args:
        everything: all members and figures; else at most 24 lines of 100 columns, notices apart.
        width: columns of the terminal; None: as many as it needs.
    """
    lines = summary_lines(run, run_dir)
    order = rank_members(run.state)
    if everything:
        below = _lay_out_lines([line for line in lines if line[0] != "more"], width)
        return _join([_list_members(run, order, order, width), _describe_combined(run.state, width), below])
    width = min(width or MOST_COLUMNS, MOST_COLUMNS)
    figures, labels = _describe_combined(run.state, width, is_short=True), list(SHORT)
    while True:
        below = _lay_out_lines([line for line in lines if line[0] in labels], width)
        room = MOST_LINES - len([*figures, *below]) - 5 - bool(figures)
        if room >= min(LEAST, len(order)) or len(labels) == WHOLE:
            break
        labels.pop()
    room = max(room, min(LEAST, len(order)))
    head = [Column("", [text]) for text in (run.state.name or "run", " · ".join(describe_state(run.state, None)))]
    members = _list_members(run, order[: min(BEST, room)], order, width, is_short=True)
    return _join([[(lay_out(_cut(head), width)[1], "bold")], members, figures, below])


def summary_text(run_dir: RunDir, *, everything: bool = False, width: int | None = MOST_COLUMNS) -> str:
    """The end of a run as plain text without escape sequences, `width` columns wide."""
    from ensemble.store import read_events

    run = RunProjection.from_events(read_events(run_dir.events))
    return "\n".join(line for line, _ in summary(run, run_dir, everything=everything, width=width))


def _join(parts: Iterable[list[Line]]) -> list[Line]:
    """The lines of these parts, with an empty one between two that have any."""
    return [line for part in parts if part for line in (*part, ("", ""))][:-1]


def _lay_out_lines(lines: Sequence[Line], width: int | None) -> list[Line]:
    labels = Column("", [label for label, _ in lines])
    texts = Column("", [line for _, line in lines], folds_to=WRAPPED)
    return [(line, "") for entry in lay_out([labels, texts], width)[1:] for line in entry.split("\n")]


def summary_lines(run: RunProjection, run_dir: RunDir | Path | None = None) -> list[Line]:
    """Returns the lines of all sections, and what to do next."""
    state, lines = run.state, list[Line]()
    for summarize in SUMMARIES:
        lines += summarize(state, run.ledger)
    lines += [("notice", remark) for remark in describe_remarks(state)]
    if any(member.attempts > 1 for member in state.members.values()):
        lines.append(("state", ATTEMPTS))
    if run.reason is not None:
        lines.append(("stopped", run.reason))
    return lines if run_dir is None else [*lines, *_next_steps(run, os.fspath(run_dir))]


def _next_steps(run: RunProjection, where: str) -> Iterator[Line]:
    """Where the results of a run lie, and what can be done next."""
    state, relative = run.state, os.path.relpath(where)
    where = where if relative.startswith("..") else relative
    combined, is_finished = state.combined or NOT_COMBINED, isinstance(state.ended, RunFinished)
    if combined.unloadable is not None and is_finished:
        yield "model", f"it cannot be loaded as one model: {combined.unloadable}"
    elif combined.members and is_finished:
        yield "model", f'`ensemble.load("{where}")` in Python'
        yield "", f"{format_command('export', where, 'OUT')} writes it to a folder"
    report = os.path.join(where, "report.html")
    if os.path.exists(report):
        yield "report", report
    yield "more", f"{format_command('summary', where, '--all')} shows all numbers"
    is_population = any(member.identity.get("population") for member in state.members.values())
    resume, epochs = (format_command("resume", where, *options) for options in ((), ("--epochs", "N")))
    failed = next((member.id for member in state.members.values() if member.state == "failed"), None)
    if failed is not None:
        yield "log", f"{format_command('logs', where, failed)} shows where it failed"
    if run.reason is not None:
        yield "next", f"{resume} goes on"
    elif is_finished and failed is not None:
        yield "next", f"{resume} tries failed members again"
    elif is_finished and run.counts["finished"] and not is_population:
        yield "next", f"{epochs} continues the training to N epochs in all"


def _list_members(
    run: RunProjection, shown: Sequence[MemberState], order: Sequence[MemberState], width: int | None,
    is_short: bool = False,
) -> list[Line]:  # fmt: skip
    """The first members of an order, with as many figures of each as have room beside its hyperparameters."""
    columns = [
        Column("", [str(place) for place, _ in enumerate(shown, start=1)], is_number=True),
        *list_columns(run, shown, {"member": 0, "seed": 0}),
        Column("hyperparameters", _describe_members(shown, order), folds_to=WRAPPED, spare=1),
    ]
    if not is_short:  # where there is no room, further metrics, watts and joules in both views are left out
        others = [name for name in other_metrics(run.state) if any(metric(m, name) is not None for m in order)]
        chosen = {"state": 0, "metric": 0, **{f"metric {name}": 6 + at for at, name in enumerate(others[:OTHERS])}}
        chosen |= {"samples_per_s": 3, "cpu_s": 2, "energy_j": 0, "full_energy_j": 4, "mean_w": 5}
        columns += list_columns(run, shown, chosen)
    else:
        if any(member.state != "finished" for member in shown):
            columns.append(Column("state", [run.member_word(member) for member in shown]))
        combined = run.state.combined or NOT_COMBINED
        split = "fold left out" if combined.out_of_fold else "validation"
        split = f" ({split})" if combined.split == "test" else ""
        figures = [one for one in list_columns(run, shown, {"metric": 0}) if {*one.cells} != {text.ABSENT}]
        columns = _cut([*columns, *(replace(column, head=column.head + split) for column in figures)])
    styles = ["dim", *("dim" if member.state in UNFINISHED else "" for member in shown)]
    styles[1:2] = ["bold"] * bool(shown)
    omitted = [(f"and {len(order) - len(shown)} more", "dim")] if len(order) > len(shown) else []
    return [*zip(lay_out(columns, width), styles, strict=True), *omitted]


def _cut(columns: Iterable[Column]) -> list[Column]:
    """The columns with one line for each cell, whose end is cut off where there is no room."""
    return [replace(column, folds_to=NARROWEST, spare=0, most_lines=1) for column in columns]


def _describe_members(shown: Sequence[MemberState], order: Sequence[MemberState]) -> list[str]:
    """Hyperparameters and options in which each differs from others; all hyperparameters where none differ."""
    varied = varied_parameters(order)
    differing = [
        ", ".join(filter(None, [_describe_parameters(member, varied), describe_options(member, order)]))
        for member in shown
    ]
    return differing if any(differing) else [_describe_parameters(member, list(member.params)) for member in shown]


def _describe_parameters(member: MemberState, names: Sequence[str]) -> str:
    return text.hyperparameters({name: member.params[name] for name in names if name in member.params})


def _describe_combined(state: RunState, width: int | None, *, is_short: bool = False) -> list[Line]:
    """The figures of the combined model beside its best member's, as many as have room."""
    combined = state.combined or NOT_COMBINED
    comparisons = compare(combined, (state.objective, state.direction))
    if not comparisons:
        return []
    best, used = combined.best_member, combined.members
    members = f"{used[0]} alone" if len(used) == 1 else text.count(len(used), "member")
    rows = [
        (f"combined ({members})" if is_short else f"combined ({combined.method}, {members})", "bold"),
        ("  95 % interval", "dim"),
        (f"best member{f' ({best})' if best else ''}", ""),
        ("  95 % interval", "dim"),
        ("mean of the members", ""),
        ("combined − best", ""),
    ]
    if is_short:
        chosen = (comparisons[0].figure.name, JUDGED_BY.get(read_task(combined).kind), state.objective)
        comparisons = [comparison for comparison in comparisons if comparison.figure.name in chosen]
    described = [_describe_figure(one, combined.metrics or {}) for one in comparisons[:MOST_QUALITY]]
    columns = [
        Column(f"on the {combined.measured_on}", [name for name, _ in rows]),
        *(Column(head, cells, True, spare=at) for at, (head, *cells) in enumerate(described)),
    ]
    texts = lay_out(_cut(columns) if is_short else columns, width)
    lines = zip(texts, ["dim", *(style for _, style in rows)], strict=True)
    has_figures = [
        True,
        *(bool({*row} - {"", text.ABSENT}) for row in zip(*(cells[1:] for cells in described), strict=True)),
    ]
    note = lay_out([Column("", [combined.note] if combined.note else [], folds_to=WRAPPED)], width)[1:]
    if is_short:
        has_figures, note = [True, True, False, has_figures[3]], []
    return [*itertools.compress(lines, has_figures), *((line, "") for line in note)]


def _describe_figure(comparison: ModelComparison, metrics: Mapping[str, Any]) -> list[str]:
    """A column of the table: its head, the combined model and the best member with intervals, mean, difference."""
    best, mean = (finite_or_none((metrics.get(of) or {}).get(comparison.figure.name)) for of in ("best", "mean"))
    return [
        comparison.figure.heading,
        text.score(comparison.value),
        "" if comparison.interval is None else text.interval(comparison.interval),
        text.score(best),
        "" if comparison.best_interval is None else text.interval(comparison.best_interval),
        text.score(mean),
        text.gain(comparison.value, comparison.best) + (" (noise)" if comparison.is_noise else ""),
    ]
