"""Writes the closing summary of a run: its members, best first, the combined model, and what the run cost."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED, RunFinished, RunStopped
from ensemble.reporting import text
from ensemble.reporting.model_figures import ModelComparison, compare
from ensemble.reporting.ranking import (
    describe_options,
    finite_or_none,
    metric,
    other_metrics,
    rank_members,
    varied_parameters,
)
from ensemble.reporting.sections import Line, cost, exchange, feeders, quality, time_to_solution, training
from ensemble.reporting.status import ATTEMPTS
from ensemble.store.files import format_command

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, ConsoleOptions, Group

    from ensemble.meter import Ledger
    from ensemble.store import MemberState, RunDir, RunState

OTHERS = 3  # metrics besides the objective
WRAPPED = 20  # columns for hyperparameters, which wrap where there is no room for more
GAP = 3  # columns between two of the table
UNFINISHED = ("pruned", "failed", "cancelled")
#: What writes the lines below the table, in their order.
SUMMARIES = (
    training.summarize_failures,
    training.summarize_search,
    quality.summarize,
    feeders.summarize,
    exchange.summarize,
    cost.summarize,
    time_to_solution.summarize,
)
MOST_QUALITY = 5  # figures of the combined model
NEEDED_QUALITY = 3  # of them, for whose sake intervals are left out
EDGES = 2  # columns beside a table
INTERVALS = (2, 4)  # cells of a figure of the combined model


def summary(state: RunState, ledger: Ledger, run_dir: RunDir | Path | None = None, *, members: int = 20) -> Group:
    """The closing summary, for a `PlainConsole`; at most `members` of the best are listed."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [_MemberTable(state, ledger, members)]
    if (state.combined or NOT_COMBINED).metrics and _compare_figures(state):
        parts.append(_CombinedTable(state))
    grid = Table.grid(padding=(0, 2))
    for label, line in summary_lines(state, ledger, run_dir):
        grid.add_row(Text(label, style="bold"), Text(line))
    parts.append(grid)
    return Group(*parts)


def summary_text(run_dir: RunDir, *, members: int = 20, width: int = 120) -> str:
    """The closing summary of a run as plain text without escape sequences, `width` columns wide."""
    import io

    from ensemble.meter import ledger
    from ensemble.reporting.terminal import PlainConsole
    from ensemble.store import fold, read_events

    events = read_events(run_dir.events)
    stream = io.StringIO()
    console = PlainConsole(width=width, file=stream, force_terminal=False, force_jupyter=False, color_system=None)
    return console.render_text(summary(fold(events), ledger(events), run_dir, members=members)).strip("\n")


def summary_lines(state: RunState, ledger: Ledger, run_dir: RunDir | Path | None = None) -> list[Line]:
    """Returns the lines of all sections, and where to look further."""
    lines: list[Line] = []
    if any(member.attempts > 1 for member in state.members.values()):
        lines.append(("state", ATTEMPTS))
    lines += [line for summarize in SUMMARIES for line in summarize(state, ledger)]
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
    if state.ended is not None and isinstance(state.ended, RunStopped):
        reason = state.ended.reason or "no reason given"
        lines.append(
            ("stopped", reason if where is None else f"{reason}; {format_command('resume', where)} goes on")
        )
    return lines


def _next_steps(state: RunState, where: str) -> Iterator[Line]:
    """Where the model of a run that has ended lies, and what can be done next."""
    if state.ended is None or not isinstance(state.ended, RunFinished):
        return
    if (state.combined or NOT_COMBINED).members:
        load = f'`ensemble.load("{where}")` in Python gives the combined model'
        export = f"{format_command('export', where, 'OUT')} exports it"
        yield "model", f"in {os.path.join(where, 'members')}; {load}, {export}"
    states = {member.state for member in state.members.values()}
    page = f"{format_command('dashboard', where)} shows the run in a browser"
    if "failed" in states:
        yield "next", f"{format_command('resume', where)} tries what failed again"
        yield "", page
    elif "finished" in states:
        yield (
            "next",
            f"{format_command('resume', where, '--epochs', 'N')} trains the members on, to N epochs in all",
        )
        yield "", page
    else:
        yield "next", page


class _MemberTable:
    """The members, best first, with as many figures of each as have room beside its hyperparameters."""

    def __init__(self, state: RunState, ledger: Ledger, most: int) -> None:
        self._state, self._ledger, self._most = state, ledger, most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        yield _member_table(self._state, self._ledger, self._most, options.max_width)


def _member_table(state: RunState, ledger: Ledger, most: int, width: int) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    order = rank_members(state)
    shown = order[:most]
    texts: dict[str, list[str]] = {
        "": [str(place) for place, _ in enumerate(shown, start=1)],
        "member": [member.id for member in shown],
        "hyperparameters": _describe_members(shown, order),
        "state": [m.state + (f" ({m.attempts})" if m.attempts > 1 else "") for m in shown],
    }
    columns = _fit(texts, _figures(state, ledger, order, shown), width)
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in columns:
        justify: Any = "left" if name in texts and name else "right"
        grid.add_column(name, justify=justify, no_wrap=name != "hyperparameters")
    for place, row in enumerate(zip(*columns.values(), strict=True)):
        style = "bold" if place == 0 else "dim" if shown[place].state in UNFINISHED else ""
        grid.add_row(*(Text(cell) for cell in row), style=style)
    if len(order) > most:
        grid.caption = f"and {len(order) - most} more"
    return grid


def _figures(
    state: RunState, ledger: Ledger, order: Sequence[MemberState], shown: Sequence[MemberState]
) -> dict[str, tuple[int, list[str]]]:
    """Columns of figures in their order: how needless each is, the least first, and its cells."""
    others = [name for name in other_metrics(state) if any(metric(m, name) is not None for m in order)][:OTHERS]
    used, full = ([ledger.member(m.id, full) for m in shown] for full in (False, True))
    views = ([(total.energy_j, total.origin) for total in view] for view in (used, full))
    figures = {state.objective: (0, [text.score(metric(m, state.objective)) for m in shown])}
    figures |= {name: (5 + i, [text.score(metric(m, name)) for m in shown]) for i, name in enumerate(others)}
    figures["samples/s"] = (2, [text.number(member.training_rate) for member in shown])
    figures["CPU-s"] = (1, [text.number(round(t.cpu_s, 1) if t.cpu_s else None) for t in used])
    joules = text.joules_columns(*views)
    figures |= {name: (needless, joules[name]) for name, needless in zip(joules, (0, 3), strict=False)}
    if any(total.mean_w is not None for total in used):
        figures["mean W"] = (4, [text.number(total.mean_w) for total in used])
    return figures


def _fit(
    texts: Mapping[str, list[str]], figures: Mapping[str, tuple[int, list[str]]], width: int
) -> dict[str, list[str]]:
    """The columns for which there is room, in their order: of figures, the needed ones always; hyperparameters,
    unless even these do not leave them `WRAPPED`.
    """
    sizes = {name: GAP + max(map(len, (name, *cells))) for name, cells in texts.items()}
    sizes |= {name: GAP + max(map(len, (name, *cells))) for name, (_, cells) in figures.items()}
    sizes["hyperparameters"] = min(sizes["hyperparameters"], GAP + WRAPPED)
    left = width + 1 - sum(sizes[name] for name in texts)
    chosen = set(texts)
    for name, (needless, _) in sorted(figures.items(), key=lambda item: item[1][0]):
        left -= sizes[name]
        if needless and left < 0:
            break
        chosen.add(name)
        if left < 0:
            chosen.discard("hyperparameters")
    cells = {**texts, **{name: cells for name, (_, cells) in figures.items()}}
    return {name: column for name, column in cells.items() if name in chosen}


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


class _CombinedTable:
    """The figures of the combined model beside its best member's, as many as have room."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        yield _combined_table(self._state, options.max_width)


def _combined_table(state: RunState, width: int) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

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
    names = [f"on the {combined.split} split", *(name for name, _ in rows)]
    described = [_describe_figure(each, combined.metrics or {}) for each in _compare_figures(state)]
    room = width - EDGES - max(map(len, names))
    if _count_fitting(described, room) < min(NEEDED_QUALITY, len(described)):
        described = [["" if at in INTERVALS else cell for at, cell in enumerate(cells)] for cells in described]
    columns = [names, *described[: max(1, _count_fitting(described, room))]]
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for at, (head, *_) in enumerate(columns):
        grid.add_column(head, justify="right" if at else "left", no_wrap=True)
    for at, (_, style) in enumerate(rows, start=1):
        cells = [column[at] for column in columns]
        if any(cells[1:]):
            grid.add_row(*cells, style=style)
    if combined.note:
        grid.caption = combined.note
        grid.caption_justify = "left"
    return grid


def _compare_figures(state: RunState) -> list[ModelComparison]:
    """The figures of the combined model that are shown; none in a task without figures."""
    assert state.combined is not None
    return compare(state.combined, (state.objective, state.direction))[:MOST_QUALITY]


def _count_fitting(columns: Sequence[Sequence[str]], room: int) -> int:
    """How many of the first columns have room."""
    ends = itertools.accumulate(GAP + max(map(len, cells)) for cells in columns)
    return sum(end <= room for end in ends)


def _describe_figure(given: ModelComparison, metrics: Mapping[str, Any]) -> list[str]:
    """A column of the table: its head, the combined model and the best member with intervals, mean, difference."""
    best, mean = (finite_or_none((metrics.get(of) or {}).get(given.figure.name)) for of in ("best", "mean"))
    return [
        given.figure.heading,
        text.score(given.value),
        "" if given.interval is None else text.interval(given.interval),
        text.score(best),
        "" if given.best_interval is None else text.interval(given.best_interval),
        text.score(mean),
        text.gain(given.value, given.best) + (" (noise)" if given.is_noise else ""),
    ]
