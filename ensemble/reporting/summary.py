"""Writes the closing summary of a run: its members, best first, the combined model, and what the run cost."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED, RunFinished
from ensemble.reporting import text
from ensemble.reporting.columns import list_columns
from ensemble.reporting.model_figures import ModelComparison, compare
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
from ensemble.reporting.tables import Column, fit, lay_out
from ensemble.store.files import format_command

if TYPE_CHECKING:
    from pathlib import Path

    from ensemble.store import MemberState, RunDir, RunState

OTHERS = 3  # metrics besides the objective
WRAPPED = 20  # columns for hyperparameters, which wrap where there is no room for more
UNFINISHED = ("pruned", "failed", "cancelled")
#: What writes the lines below the table, in their order.
SUMMARIES = (
    training.summarize_failures,
    training.summarize_search,
    training.summarize_budget,
    quality.summarize,
    feeders.summarize,
    training.summarize_exchange,
    cost.summarize,
)
MOST_QUALITY = 5  # figures of the combined model
NEEDED_QUALITY = 3  # of them, for whose sake intervals are left out
INTERVALS = (2, 4)  # cells of a figure of the combined model


def summary(
    run: RunProjection, run_dir: RunDir | Path | None = None, *, members: int = 20, width: int | None = None
) -> list[tuple[str, str]]:
    """The closing summary: texts of one or several lines, each with its style on a terminal, as rich names it.

    Args:
        members: how many of the best are listed, at most.
        width: columns of the terminal; None: as many as it needs.
    """
    state = run.state
    parts = [_list_members(run, members, width)]
    if (state.combined or NOT_COMBINED).metrics and _compare_figures(state):
        parts.append(_describe_combined(state, width))
    lines = summary_lines(run, run_dir)
    labels = Column("", [label for label, _ in lines])
    texts = Column("", [line for _, line in lines], folds_to=WRAPPED)
    parts.append([(line, "") for line in lay_out([labels, texts], width)[1:]])
    return [line for part in parts for line in (*part, ("", ""))][:-1]


def summary_text(run_dir: RunDir, *, members: int = 20, width: int | None = 120) -> str:
    """The closing summary of a run as plain text without escape sequences, `width` columns wide."""
    from ensemble.store import read_events

    run = RunProjection.from_events(read_events(run_dir.events))
    return "\n".join(line for line, _ in summary(run, run_dir, members=members, width=width))


def summary_lines(run: RunProjection, run_dir: RunDir | Path | None = None) -> list[Line]:
    """Returns the lines of all sections, and where to look further."""
    state, lines = run.state, list[Line]()
    if any(member.attempts > 1 for member in state.members.values()):
        lines.append(("state", ATTEMPTS))
    lines += [("notice", remark) for remark in describe_remarks(state)]
    lines += [line for summarize in SUMMARIES for line in summarize(state, run.ledger)]
    where = None if run_dir is None else os.fspath(run_dir)
    if where is not None:
        lines.append(("run", where))
        report = os.path.join(where, "report.html")
        if os.path.exists(report):
            lines.append(("report", report))
        failed = next((member.id for member in state.members.values() if member.state == "failed"), None)
        if failed is not None:
            lines.append(("log", f"{format_command('logs', where, failed)} shows where it failed"))
        lines += _next_steps(state, where)
    if run.reason is not None:
        hint = "" if where is None else f"; {format_command('resume', where)} goes on"
        lines.append(("stopped", run.reason + hint))
    return lines


def _next_steps(state: RunState, where: str) -> Iterator[Line]:
    """Where the model of a run that has ended lies, and what can be done next."""
    if state.ended is None or not isinstance(state.ended, RunFinished):
        return
    combined = state.combined or NOT_COMBINED
    if combined.members:
        load = f'`ensemble.load("{where}")` in Python gives the combined model'
        usage = f"{load}, {format_command('export', where, 'OUT')} exports it"
        if combined.unloadable is not None:
            usage = f"it cannot be loaded as one model: {combined.unloadable}"
        yield "model", f"in {os.path.join(where, 'members')}; {usage}"
    states = {member.state for member in state.members.values()}
    page = f"{format_command('dashboard', where)} shows the run in a browser"
    if "failed" in states:
        yield "next", f"{format_command('resume', where)} tries what failed again"
        yield "", page
    elif "finished" in states and not any(m.identity.get("population") for m in state.members.values()):
        yield (
            "next",
            f"{format_command('resume', where, '--epochs', 'N')} trains the members on, to N epochs in all",
        )
        yield "", page
    else:
        yield "next", page


def _list_members(run: RunProjection, most: int, width: int | None) -> list[tuple[str, str]]:
    """The members, best first, with as many figures of each as have room beside its hyperparameters."""
    order = rank_members(run.state)
    shown = order[:most]
    columns = [
        Column("", [str(place) for place, _ in enumerate(shown, start=1)], is_number=True),
        *list_columns(run, shown, {"member": 0, "seed": 0}),
        Column("hyperparameters", _describe_members(shown, order), folds_to=WRAPPED, spare=1),
        *list_columns(run, shown, {"state": 0}),
        *_figures(run, order, shown),
    ]
    styles = ["dim", *("dim" if member.state in UNFINISHED else "" for member in shown)]
    styles[1:2] = ["bold"] * bool(shown)
    omitted = [(f"and {len(order) - most} more", "dim")] if len(order) > most else []
    return [*zip(lay_out(columns, width), styles, strict=True), *omitted]


def _figures(run: RunProjection, order: Sequence[MemberState], shown: Sequence[MemberState]) -> Iterator[Column]:
    """Columns of figures; joules in both views and the rate go last where there is no room."""
    others = [name for name in other_metrics(run.state) if any(metric(m, name) is not None for m in order)]
    chosen = {"metric": 0, **{f"metric {name}": 6 + at for at, name in enumerate(others[:OTHERS])}}
    chosen |= {"samples_per_s": 3, "cpu_s": 2, "energy_j": 0, "full_energy_j": 4, "mean_w": 5}
    return list_columns(run, shown, chosen)


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


def _describe_combined(state: RunState, width: int | None) -> list[tuple[str, str]]:
    """The figures of the combined model beside its best member's, as many as have room."""
    assert state.combined is not None
    combined = state.combined
    best = combined.best_member
    members = f"{used[0]} alone" if len(used := combined.members) == 1 else text.count(len(used), "member")
    rows = [
        (f"combined ({combined.method}, {members})", "bold"),
        ("  95 % interval", "dim"),
        (f"best member{f' ({best})' if best else ''}", ""),
        ("  95 % interval", "dim"),
        ("mean of the members", ""),
        ("combined − best", ""),
    ]
    names = Column(f"on the {combined.measured_on}", [name for name, _ in rows])
    described = [_describe_figure(comparison, combined.metrics or {}) for comparison in _compare_figures(state)]

    def list_columns() -> list[Column]:
        return [names, *(Column(head, cells, True, spare=at) for at, (head, *cells) in enumerate(described))]

    if len(fit(list_columns(), width)) <= min(NEEDED_QUALITY, len(described)):  # figures before their intervals
        described = [["" if at in INTERVALS else cell for at, cell in enumerate(cells)] for cells in described]
    lines = zip(lay_out(list_columns(), width), ["dim", *(style for _, style in rows)], strict=True)
    has_figures = [True, *(any(cells) for cells in zip(*(cells[1:] for cells in described), strict=True))]
    note = lay_out([Column("", [combined.note] if combined.note else [], folds_to=WRAPPED)], width)[1:]
    return [*itertools.compress(lines, has_figures), *((line, "") for line in note)]


def _compare_figures(state: RunState) -> list[ModelComparison]:
    """The figures of the combined model that are shown; none in a task without figures."""
    assert state.combined is not None
    return compare(state.combined, (state.objective, state.direction))[:MOST_QUALITY]


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
