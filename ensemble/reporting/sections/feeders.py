"""The shared pipeline: samples prepared and consumed, what limited each cohort's stream, designs, memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ensemble.events import Feeder
from ensemble.meter.shared_cost_allocation import BY_SAMPLES
from ensemble.reporting import text
from ensemble.reporting.sections import Cell, Line, Table
from ensemble.reporting.sections.notices import describe

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.store import RunState

IDLE = 0.5  # workers busy for less than this share of the time do not limit the stream


def summarize(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns what sharing has saved, and what held the streams up."""
    hits = count_hits(state.feeders.values())
    lines = [("sharing", _describe_reuse(ledger, hits, has_ended=state.ended is not None))] * state.has_data
    return lines + [("" if number else "bottleneck", line) for number, line in enumerate(bottleneck_lines(state))]


def count_hits(feeders: Iterable[Feeder]) -> int:
    """Of the samples that these feeders count as prepared, those that they read from a cache."""
    hits = 0
    for feeder in feeders:
        hits += (feeder.cache or {}).get("hits", 0)
    return hits


def _describe_reuse(ledger: Ledger, hits: int, *, has_ended: bool) -> str:
    """Returns the samples prepared and those that members used as a sentence, with the CPU time for the former,
    and for the latter if each member prepared its own. Feeding and comparing samples is part of the sharing.
    """
    reuse = ledger.reuse
    if not reuse.prepared:
        return "no samples were prepared" if has_ended else "no samples are prepared yet"
    if reuse.private == reuse.prepared:
        return f"none: members prepared their own samples ({text.number(reuse.prepared)})"
    many = f"{text.number(reuse.prepared - hits)} samples were prepared"
    many += f" and {text.number(hits)} read from the cache" if hits else ""
    line = f"{many}, {text.number(reuse.consumed)} were used: nothing was saved"
    if reuse.consumed > reuse.prepared:
        line = f"{many} instead of {text.number(reuse.consumed)}"
        shared = [row for row in ledger.rows if row.member is None and row.role in (*BY_SAMPLES, "verify")]
        used_s = sum(row.cpu_s for row in shared)
        prepare_s = sum(row.cpu_s for row in shared if row.role in ("prepare", "batch"))
        alone_s = prepare_s * (reuse.consumed - reuse.private)
        alone_s /= reuse.prepared - reuse.private
        if alone_s >= 0.1:
            alone = f"about {alone_s:,.1f}"
            alone = f" instead of {alone}" if used_s < alone_s else f", no fewer than without sharing ({alone})"
            line += f", in {used_s:,.1f} CPU-seconds{alone}"
    if reuse.private:
        line += f" ({text.number(reuse.private)} were prepared by a member for itself)"
    return line + (f"; {text.number(reuse.skipped)} could not be prepared" if reuse.skipped else "")


def bottlenecks(state: RunState) -> dict[int, tuple[str, str]]:
    """Returns what limits the stream of each cohort ("members", "links" or "preparation"), and the same with the
    evidence and what would help, in words.
    """
    from pipelines.feeder.statistics import bottleneck

    limits = []
    for cohort in sorted({cohort for _, cohort in state.feeders}):
        reported = {node: e for (node, c), e in state.feeders.items() if c == cohort and e.fullness}
        names = dict.fromkeys(name for event in reported.values() for name in event.fullness)
        levels = {
            name: sum(event.fullness.get(name, 0.0) for event in reported.values()) / len(reported)
            for name in names
        }
        if (what := bottleneck(levels)) is not None:
            limits.append((cohort, what, levels, reported))
    lines = {}
    for cohort, what, levels, reported in limits:
        where = "" if len(limits) == 1 else f" in stream group {cohort}"
        waited = f"a member waited {levels.get('waiting', 0.0):.0%} of the time"
        if what == "members":
            line = f"the members{where} ({waited})"
        elif what == "links":
            used = f"links were used {levels.get('link', 0.0):.0%}"
            line = f"the links between nodes{where} ({waited}, {used}): try sharing='node'"
        else:
            advice = _advise(state, cohort, levels.get("workers", 0.0), reported)
            line = f"preparation{where} ({waited}): {advice}"
        lines[cohort] = what, line
    return lines


def bottleneck_lines(state: RunState, most: int = 3) -> list[str]:
    """Returns what limits the streams of the newest cohorts, a line each."""
    lines = [line for _, line in bottlenecks(state).values()]
    left_out = len(lines) - most
    return lines[-most:] + ([f"and of {text.count(left_out, 'earlier stream group')}"] if left_out > 0 else [])


def _advise(state: RunState, cohort: int, busy: float, feeders: Mapping[str, Feeder]) -> str:
    """Returns what would make the feeders of a cohort, by node, prepare faster; `busy`: share of their workers."""
    if hits := count_hits(feeders.values()):
        prepared = sum(event.prepared for event in feeders.values())
        return f"{text.number(hits)} of {text.number(prepared)} samples came from the cache"
    # The time that records took which ended or hung a worker is part of the levels.
    bad = sum(event.cohort == cohort for event in state.bad_records.values())
    if bad:
        return f"this includes the time lost on {text.count(bad, 'bad record')}, repair or remove these first"
    if busy < IDLE:
        return f"its workers had work only {busy:.0%} of the time, try a larger capacity"
    infos = (state.nodes[node].info for node in feeders if node in state.nodes)
    cpus = min((info.cpus for info in infos if info is not None), default=None)
    workers = max(int(event.workers or 1) for event in feeders.values())
    if cpus is None or workers + 1 <= cpus:
        return f"try prep_workers={2 * workers if cpus is None else min(2 * workers, int(cpus))}"
    return f"{text.count(workers, 'worker')} on {cpus:g} cores, lighter stages or more cores would help"


def pipeline_lines(state: RunState, most: int = 3) -> list[str]:
    """Returns lines on feeders that ended and were not replaced, on records that ended or hung the process that
    prepared them, and on members whose shared samples were not those of their own pipeline; so many of each.
    """
    lines = list[str]()
    for events, what, end in (
        (state.unshared, "more feeder", " lost"),
        (state.bad_records, "more such record", ""),
        (state.differences, "more such difference", ""),
    ):
        lines += map(describe, list(events.values())[:most])
        lines += [f"and {text.count(len(events) - most, what)}{end}"] if len(events) > most else []
    return lines


def tabulate(state: RunState, ledger: Ledger) -> list[Table]:
    """Returns a table with a row for each feeder; none where nothing is shared."""
    if not state.feeders:
        return []
    counts = ("prepared", "from cache", "used", "reuse", "busy", "ring", "links", "waited", "sent", "bad")
    head = [("node", "text"), ("stream group", ""), ("workers", ""), ("members", "")]
    rows: list[list[Cell]] = []
    for (node, cohort), event in sorted(state.feeders.items(), key=lambda item: item[0][::-1]):
        levels = [event.fullness.get(name) for name in ("workers", "ring", "link", "waiting")]
        is_lost, has_ended = (node, cohort) in state.unshared, state.ended is not None
        rows.append(
            [
                *(node, cohort, event.workers, event.members),
                *(event.prepared - count_hits([event]), count_hits([event]) or None, event.consumed),
                event.consumed / event.prepared if event.prepared else None,
                *(None if level is None else (f"{level:.0%}", level) for level in levels),
                (text.memory(event.sent_bytes), event.sent_bytes) if event.sent_bytes else None,
                event.skipped or None,
                "lost" if is_lost else "ended" if has_ended else "feeding",
            ]
        )
    about = (
        "Samples by the last feeder of each node and stream group. Shares of the time: its workers were busy, its "
        "ring was full, its links were used, a member waited."
    )
    columns = [*head, *((name, "") for name in counts), ("state", "text")]
    return [Table("feeders", "Feeders", about, columns, rows)]
