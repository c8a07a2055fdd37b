"""Writes the closing summary of a run: its members, best first, the combined model, and what the run cost."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ensemble.reporting import text
from ensemble.reporting.ranking import (
    describe_options,
    finite_or_none,
    metric,
    other_metrics,
    rank_members,
    varied_parameters,
)
from ensemble.reporting.sections import Line, cost, exchange, feeders, training, turnaround

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Group

    from ensemble.meter import Ledger
    from ensemble.store import RunDir, RunState

OTHERS = 3  # metrics besides the objective, for which there is room
#: What writes the lines below the table, in their order.
SUMMARIES = (
    training.summarize_search,
    training.summarize_quality,
    feeders.summarize,
    exchange.summarize,
    cost.summarize,
    turnaround.summarize,
)
QUALITY = (("accuracy", "accuracy"), ("nll", "NLL"), ("ece", "ECE"))


def summary(state: RunState, ledger: Ledger, run_dir: RunDir | Path | None = None, *, members: int = 20) -> Group:
    """The closing summary, for a `PlainConsole`; at most `members` of the best are listed."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [_member_table(state, ledger, members)]
    if (state.combined or {}).get("metrics"):
        parts.append(_combined_table(state))
    grid = Table.grid(padding=(0, 2))
    for label, line in summary_lines(state, ledger, run_dir):
        grid.add_row(Text(label, style="bold"), Text(line))
    parts.append(grid)
    return Group(*parts)


def summary_lines(state: RunState, ledger: Ledger, run_dir: RunDir | Path | None = None) -> list[Line]:
    """Returns the lines of all sections, and where to look further."""
    lines = [line for summarize in SUMMARIES for line in summarize(state, ledger)]
    where = None if run_dir is None else os.fspath(run_dir)
    if where is not None:
        lines.append(("run", where))
        report = os.path.join(where, "report.html")
        if os.path.exists(report):
            lines.append(("report", report))
    if state.ended is not None and state.ended["type"] == "run_stopped":
        reason = state.ended.get("reason") or "no reason given"
        lines.append(("stopped", reason if where is None else f"{reason}; `ensemble resume {where}` goes on"))
    return lines


def _member_table(state: RunState, ledger: Ledger, most: int) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    order = rank_members(state)
    others = [name for name in other_metrics(state) if any(metric(m, name) is not None for m in order)][:OTHERS]
    varied = varied_parameters(order)
    joules = text.joules_head(ledger.member(member.id).origin for member in order)
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    grid.add_column("", justify="right", no_wrap=True)
    grid.add_column("member", no_wrap=True)
    grid.add_column("hyperparameters")
    grid.add_column("state", no_wrap=True)
    for name in (state.objective, *others, "samples/s", "CPU-s", joules):
        grid.add_column(name, justify="right", no_wrap=True)
    for place, member in enumerate(order[:most], start=1):
        used = ledger.member(member.id)
        values = [text.score(metric(member, name)) for name in (state.objective, *others)]
        values += [text.number(member.training_rate), text.number(round(used.cpu_s, 1) if used.cpu_s else None)]
        origin = f" {used.origin}" if joules == "J" else ""
        values.append(text.ABSENT if used.energy_j is None else f"{used.energy_j:.0f}{origin}")
        params = {name: member.params[name] for name in varied if name in member.params}
        again = f" ({member.attempts})" if member.attempts > 1 else ""
        style = "bold" if place == 1 else "dim" if member.state in ("pruned", "failed", "cancelled") else ""
        differences = ", ".join(filter(None, [text.hyperparameters(params), describe_options(member, order)]))
        row = [str(place), member.id, differences, member.state + again, *values]
        grid.add_row(*(Text(cell) for cell in row), style=style)
    if len(order) > most:
        grid.caption = f"and {len(order) - most} more"
    return grid


def _combined_table(state: RunState) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    assert state.combined is not None
    combined, metrics = state.combined, state.combined["metrics"]
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    grid.add_column(f"on the {combined['split']} split")
    for _, name in QUALITY:
        grid.add_column(name, justify="right")
    best = combined.get("best_member")
    for key, label in (
        ("ensemble", f"combined ({combined['method']}, {text.count(len(combined['members']), 'member')})"),
        ("best", f"best member{f' ({best})' if best else ''}"),
        ("mean", "mean of the members"),
    ):
        row = metrics.get(key) or {}
        values = [text.score(finite_or_none(row.get(name))) for name, _ in QUALITY]
        grid.add_row(label, *values, style="bold" if key == "ensemble" else "")
    if combined.get("note"):
        grid.caption = combined["note"]
        grid.caption_justify = "left"
    return grid
