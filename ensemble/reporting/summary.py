"""What a run came to, on one screen: members ranked, the combined model beside them, what it cost."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ensemble.reporting import text
from ensemble.reporting.sections.exchange import exchange_line
from ensemble.reporting.sections.feeders import bottleneck_lines
from ensemble.reporting.sections.ranking import finite, metric, other_metrics, ranked, varied
from ensemble.reporting.sections.ranking import words as words_of
from ensemble.reporting.sections.turnaround import turnaround_line
from ensemble.reporting.theme import ROLE_WORDS

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Group

    from ensemble.meter import Ledger
    from ensemble.meter.ledger import Total
    from ensemble.store import RunDir, RunState

WIDTH = 110
OTHERS = 3  # metrics besides the objective, for which there is room
QUALITY = (("accuracy", "accuracy"), ("nll", "NLL"), ("ece", "ECE"))


def summary(state: RunState, ledger: Ledger, run_dir: RunDir | Path | None = None, *, members: int = 20) -> Group:
    """The closing summary, for a `PlainConsole`; at most `members` of the best are listed."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [_members(state, ledger, members)]
    if (state.combined or {}).get("metrics"):
        parts.append(_combined(state))
    grid = Table.grid(padding=(0, 2))
    for label, line in costs(state, ledger, run_dir):
        grid.add_row(Text(label, style="bold"), Text(line))
    parts.append(grid)
    return Group(*parts)


def summary_text(
    state: RunState, ledger: Ledger, run_dir: RunDir | Path | None = None, *, members: int = 20
) -> str:
    """The same as plain text without colours, for files and pipes."""
    import io

    from ensemble.reporting.terminal import PlainConsole

    stream = io.StringIO()
    console = PlainConsole(file=stream, width=WIDTH, color_system=None, force_terminal=False)
    console.print(summary(state, ledger, run_dir, members=members))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def costs(state: RunState, ledger: Ledger, run_dir: RunDir | Path | None = None) -> list[tuple[str, str]]:
    """(label, line) of samples, what held them up, CPU time, energy, wall time and where to look further."""
    refused = (state.combined or {}).get("reason")
    lines = [("combined", f"none: {refused}")] if refused and not (state.combined or {}).get("metrics") else []
    lines.append(("samples", reuse_line(ledger)))
    held_up = bottleneck_lines(state)
    lines += [("bottleneck" if number == 0 else "", line) for number, line in enumerate(held_up)]
    exchanged = exchange_line(state)
    if exchanged is not None:
        lines.append(("exchange", exchanged))
    roles = ledger.cpu_by_role()
    if roles:
        split = ", ".join(f"{ROLE_WORDS.get(role, role)} {text.cpu(used)}" for role, used in roles.items())
        lines.append(("CPU time", f"{text.cpu(sum(roles.values()))}: {split}"))
    lines.append(("energy", energy_line(ledger)))
    if state.started is not None:
        lines.append(("wall time", text.duration(state.wall_s)))
    trained = turnaround_line(state)
    if trained is not None:
        lines.append(("models", trained))
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


def reuse_line(ledger: Ledger) -> str:
    """Samples prepared against consumed, in words."""
    reuse = ledger.reuse
    if not reuse.prepared:
        return "none prepared yet"
    line = f"{text.number(reuse.prepared)} prepared, {text.number(reuse.consumed)} consumed"
    line += f": each was used {reuse.factor:.2f} times" if reuse.factor is not None else ""
    if reuse.private:
        line += f" ({text.number(reuse.private)} were prepared by a member for itself)"
    return line + (f"; {text.number(reuse.skipped)} could not be prepared" if reuse.skipped else "")


def energy_line(ledger: Ledger) -> str:
    """Joules of the run with their origin, or that there are none."""
    total = ledger.run
    if total.energy_j is None:
        return "unavailable: no node has a power source that could be read"
    sources = sorted({source for node in ledger.nodes for source in node.sources})
    line = f"{text.joules(total.energy_j)} {total.origin}"
    whole = ledger.total
    if whole.energy_j is not None and whole.energy_j > total.energy_j * 1.001:
        line += f", of {text.joules(whole.energy_j)} {whole.origin} for the whole of the nodes"
    return line + (f" (source: {', '.join(sources)})" if sources else "")


def _members(state: RunState, ledger: Ledger, most: int) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    order = ranked(state)
    others = [name for name in other_metrics(state) if _any(state, name)][:OTHERS]
    told = varied(order)
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
        values += [text.number(member.training_rate), text.number(_tenth(used.cpu_s))]
        values.append(_joules(used, named=joules == "J"))
        params = {name: member.params[name] for name in told if name in member.params}
        again = f" ({member.attempts})" if member.attempts > 1 else ""
        style = "bold" if place == 1 else "dim" if member.state in ("pruned", "failed", "cancelled") else ""
        told_apart = ", ".join(filter(None, [text.hyperparameters(params), words_of(member, order)]))
        row = [str(place), member.id, told_apart, member.state + again, *values]
        grid.add_row(*(Text(cell) for cell in row), style=style)
    if len(order) > most:
        grid.caption = f"and {len(order) - most} more"
    return grid


def _joules(used: Total, named: bool) -> str:
    """Joules, with a word for where they come from unless the column's head says it for all."""
    if used.energy_j is None:
        return text.ABSENT
    return f"{used.energy_j:.0f} {used.origin}" if named else f"{used.energy_j:.0f}"


def _tenth(value: float) -> float | None:
    return round(value, 1) if value else None


def _any(state: RunState, name: str) -> bool:
    return any(metric(member, name) is not None for member in state.members.values())


def _combined(state: RunState) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    assert state.combined is not None
    combined, metrics = state.combined, state.combined["metrics"]
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    grid.add_column(f"on the {combined['split']} split")
    for _, name in QUALITY:
        grid.add_column(name, justify="right")
    best = combined.get("best_member")
    for key, words in (
        ("ensemble", f"combined ({combined['method']}, {text.count(len(combined['members']), 'member')})"),
        ("best", f"best member{f' ({best})' if best else ''}"),
        ("mean", "mean of the members"),
    ):
        row = metrics.get(key) or {}
        values = [text.score(finite(row.get(name))) for name, _ in QUALITY]
        grid.add_row(words, *values, style="bold" if key == "ensemble" else "")
    if combined.get("note"):
        grid.caption = combined["note"]
        grid.caption_justify = "left"
    return grid
