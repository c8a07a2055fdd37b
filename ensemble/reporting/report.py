"""The report of a run: one HTML file that opens without a network, of a run that ended, runs or broke off."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.reporting import text
from ensemble.reporting.page import Page, Tile, escape
from ensemble.reporting.ranking import best_member, finite_or_none, metric
from ensemble.reporting.sections import (
    Content,
    ReportData,
    cost,
    cost_tables,
    exchange,
    explain_failure,
    feeders,
    impact,
    members,
    notices,
    packing,
    training,
)
from ensemble.reporting.sections.notices import start_time
from ensemble.reporting.sections.turnaround import measure_turnaround

if TYPE_CHECKING:
    from pathlib import Path

    from ensemble.meter import Ledger
    from ensemble.store import RunDir, RunState
    from ensemble.store.member import Event


def write_report(run_dir: RunDir, events: Sequence[Event] | None = None) -> Path:
    """Write `report.html` into the run directory, whole or not at all, and return its path.

    Args:
        events: of the run; None: as the log has them.

    Raises:
        StoreError: there is no run, or the file cannot be written.
    """
    from ensemble.meter import ledger
    from ensemble.reporting.scores import read_scores
    from ensemble.store import fold, read_events
    from ensemble.store.files import write_bytes

    events = read_events(run_dir.events) if events is None else events
    state = fold(events)
    data = ReportData(events, state, ledger(events), read_scores(run_dir, state))
    page = compose_page(data)
    write_bytes(run_dir.report, page.render().encode(errors="backslashreplace"))
    return run_dir.report


#: Headings and what composes the section below each, in the order of the page.
SECTIONS: Sequence[tuple[str, Callable[[ReportData], Content]]] = (
    ("What to know", notices.compose),
    ("Search", training.compose_search),
    ("Quality", training.compose_quality),
    ("Training", training.compose_training),
    ("Shared pipeline", feeders.compose),
    ("Cost", cost.compose),
    ("Cost by member and role", cost_tables.compose),
    ("What the energy amounts to", impact.compose),
    ("Members", members.compose),
    ("Where their time went", exchange.compose),
    ("How they were packed", packing.compose),
)


def compose_page(data: ReportData) -> Page:
    """Returns the page, from what is known of the run; pure. A section that fails takes no other with it."""
    state = data.state
    page = Page(
        title=state.name or "run",
        state=_run_state(state),
        lead=_lead(state, data.events),
        tiles=_tiles(state, data.ledger),
        foot=_foot(state),
    )
    for heading, compose in SECTIONS:
        try:
            content = compose(data)
        except Exception as error:
            content = f'<p class="absent">{escape(explain_failure(f"section {heading!r}", error))}</p>'
        if isinstance(content, str):
            page.sections.append((heading, content))
        elif content is not None:
            page.add_figures(heading, content)
    return page


def _run_state(state: RunState) -> tuple[str, str]:
    if state.ended is None:
        return ("running", "soft") if state.started is not None else ("not started", "soft")
    if state.ended["type"] == "run_stopped":
        return "stopped", "warn"
    states = [member.state for member in state.members.values()]
    if "finished" not in states:
        return "failed", "bad"
    return ("finished, with failures", "warn") if "failed" in states else ("finished", "good")


def _lead(state: RunState, events: Sequence[Event]) -> str:
    if not events:
        return "The event log is empty."
    started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(start_time(events)))
    kind = (
        f"search over {text.count(state.declared, 'trial')}"
        if state.mode == "search"
        else text.count(state.declared, "member")
    )
    last_event = time.strftime("%H:%M:%S UTC", time.gmtime(state.updated)) if state.updated else ""
    parts = [
        kind,
        f"up to {text.count(state.epochs, 'epoch')}",
        f"{state.executor} executor",
        text.count(len(state.nodes), "node"),
        f"started {started}",
    ]
    if state.ended is None:
        parts.append(f"last heard of {last_event}")
    return " · ".join(parts)


def _tiles(state: RunState, ledger: Ledger) -> list[Tile]:
    counts: dict[str, int] = {}
    for member in state.members.values():
        counts[member.state] = counts.get(member.state, 0) + 1
    total = max(state.declared or 0, len(state.members))
    others = ", ".join(f"{n} {name}" for name, n in counts.items() if name != "finished")
    tiles = [Tile("Members finished", f"{counts.get('finished', 0)} of {total}", others or "none failed")]
    leader = best_member(state)
    if leader is not None:
        value = text.score(metric(leader, state.objective))
        tiles.append(Tile(f"Best {state.objective} in validation", value, leader.id))
    tiles += _combined_tiles(state)
    reuse = ledger.reuse
    factor = f"{reuse.factor:.2f}×" if reuse.factor is not None else text.ABSENT
    note = f"{text.number(reuse.consumed)} consumed of {text.number(reuse.prepared)} prepared"
    tiles.append(Tile("Reuse of prepared samples", factor, note if reuse.prepared else "nothing prepared yet"))
    run = ledger.run
    per_role = ledger.cpu_by_role()
    share = per_role.get("train", 0.0) / run.cpu_s if run.cpu_s else None
    note = f"{share:.0%} of it training" if share is not None else "not reported yet"
    tiles.append(Tile("CPU time", text.cpu(run.cpu_s) if run.cpu_s else text.ABSENT, note))
    sources = ", ".join(sorted({source for node in ledger.nodes for source in node.sources}))
    note = sources if sources else "no power reading so far"
    tiles.append(Tile(f"Energy ({run.origin})", text.joules(run.energy_j), note))
    starts = (
        f"{state.starts} starts" if state.starts > 1 else "since the start" if state.ended is None else "in all"
    )
    tiles.append(Tile("Wall time", text.duration(state.wall_s), starts))
    found = measure_turnaround(state)
    if found is not None:
        note = f"all {found.models} in {text.duration(found.ttta_s)}, {found.over_median:.2f}× the median model"
        tiles.append(Tile("Models a minute", text.number(found.per_minute), note))
    return tiles


def _combined_tiles(state: RunState) -> list[Tile]:
    combined: dict[str, Any] = state.combined or {}
    metrics = combined.get("metrics") or {}
    if not metrics:
        reason = combined.get("reason")
        return [Tile("Combined", text.ABSENT, str(reason))] if reason else []
    ensemble, alone = metrics["ensemble"], metrics.get("best") or {}
    tiles = []
    for name, label in (("accuracy", "accuracy"), ("nll", "NLL"), ("ece", "ECE")):
        value, other = finite_or_none(ensemble.get(name)), finite_or_none(alone.get(name))
        if value is None:
            continue
        better = other is not None and (value > other if name == "accuracy" else value < other)
        tone = "" if other is None or value == other else "good" if better else "bad"
        note = f"{text.gain(value, other)} to the best member" if other is not None else ""
        tiles.append(Tile(f"Combined {label}", text.score(value), note, tone))
    return tiles


def _foot(state: RunState) -> str:
    versions = state.header.get("versions") or {}
    parts = [f"{name.replace('_', '-')} {version}" for name, version in versions.items() if version]
    parts += [f"revision {state.header['revision']}"] if state.header.get("revision") else []
    parts += [f"run {state.run_id}"] if state.run_id else []
    combined: dict[str, Any] = state.combined or {}
    notes = [str(combined[name]) for name in ("note", "reason") if combined.get(name)]
    return " · ".join([*parts, *notes])
