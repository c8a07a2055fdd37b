"""The report of a run: one HTML file that opens without a network, of a run that ended, runs or broke off."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from ensemble.reporting import text
from ensemble.reporting.page import Cell, Page, Panel, Tile, escape, notice_list, table
from ensemble.reporting.sections import exchange
from ensemble.reporting.sections.feeders import bottleneck_lines, nodes_line, ring_line
from ensemble.reporting.sections.notices import Event, notices, started_at
from ensemble.reporting.sections.packing import packing
from ensemble.reporting.sections.ranking import best, finite, metric, other_metrics, ranked
from ensemble.reporting.sections.turnaround import turnaround
from ensemble.reporting.summary import reuse_line
from ensemble.reporting.theme import STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import plotly.graph_objects as go

    from ensemble.meter import Ledger
    from ensemble.reporting.sections.scores import Scores
    from ensemble.store import MemberState, RunDir, RunState

log = logging.getLogger(__name__)

TONES = {"error": "bad", "warning": "warn", "info": ""}
NOTICES = 60


def write_report(run_dir: RunDir, events: Sequence[Event] | None = None) -> Path:
    """Write `report.html` into the run directory, whole or not at all, and return its path.

    Args:
        events: of the run; None: as the log has them.

    Raises:
        StoreError: there is no run, or the file cannot be written.
    """
    from ensemble.meter import ledger
    from ensemble.reporting.sections.scores import scores
    from ensemble.store import fold, read_events
    from ensemble.store.files import write_bytes

    events = read_events(run_dir.events) if events is None else events
    state = fold(events)
    page = compose(events, state, ledger(events), scores(run_dir, state))
    write_bytes(run_dir.report, page.render().encode(errors="backslashreplace"))
    return run_dir.report


def compose(events: Sequence[Event], state: RunState, ledger: Ledger, scores: Scores) -> Page:
    """The page, from what is known of the run; pure."""
    from ensemble.reporting import figures

    page = Page(
        title=state.name or "run",
        state=_run_state(state),
        lead=_lead(state, events),
        tiles=_tiles(state, ledger),
        foot=_foot(state),
    )
    told = notices(events)
    if told:
        shown = [(text.clock(n.at_s), TONES[n.level], n.text) for n in told[:NOTICES]]
        if len(told) > NOTICES:
            shown.append(("", "", f"and {len(told) - NOTICES} more: see events.jsonl"))
        page.sections.append(("What to know", notice_list(shown)))
    if state.mode == "search":
        history, slices = _drawn(figures.search_history, state), _drawn(figures.search_slices, state)
        page.add_figures("Search", [Panel("history", *HISTORY, history), Panel("slices", *SLICES, slices)])
    page.add_figures(
        "Quality",
        [
            Panel("versus", *_versus_words(scores), _drawn(figures.members_and_ensemble, scores), "most"),
            Panel("calibration", *CALIBRATION, _drawn(figures.calibration, scores), "rest"),
        ],
    )
    page.add_figures(
        "Training",
        [
            Panel("curves", *CURVES, _drawn(figures.learning_curves, state)),
            Panel("timeline", *TIMELINE, _drawn(figures.timeline, state)),
        ],
    )
    page.add_figures(
        "Shared pipeline",
        [
            Panel(
                "reuse",
                "Samples prepared and consumed",
                _reuse_words(events, state, ledger),
                _drawn(figures.pipeline_reuse, events),
                "half",
            ),
            Panel("batches", *BATCHES, _drawn(figures.batches_by_member, state), "half"),
            Panel("levels", "Bottleneck", _levels_words(state), _drawn(figures.queue_levels, state)),
        ],
    )
    page.add_figures(
        "Cost",
        [
            Panel("cpu", *CPU, _drawn(figures.cpu_seconds, ledger)),
            Panel("power", *_power_words(ledger), _drawn(figures.power_over_time, ledger, started_at(events))),
        ],
    )
    page.sections.append(("Members", _told(_member_table, state, ledger, scores)))
    if any(member.history for member in state.members.values()):
        page.sections.append(("Where their time went", _told(_training_table, state)))
    packed = packing(state)
    if packed is not None:
        page.sections.append(("How they were packed", packed))
    return page


def _drawn(draw: Callable[..., go.Figure | str], *given: Any) -> go.Figure | str:
    """The figure, or why there is none: one that fails takes no other with it."""
    try:
        return draw(*given)
    except Exception as error:
        return _failed(draw, error)


def _told(write: Callable[..., str], *given: Any) -> str:
    """The same for a section of HTML."""
    try:
        return write(*given)
    except Exception as error:
        return f'<p class="absent">{escape(_failed(write, error))}</p>'


def _failed(make: Callable[..., object], error: Exception) -> str:
    detail = error if log.isEnabledFor(logging.DEBUG) else None
    log.warning("the report's %s failed: %s: %s", make.__name__, type(error).__name__, error, exc_info=detail)
    return f"It cannot be shown: {type(error).__name__}: {error}."


HISTORY = ("Trials in order", "The objective each trial reached, and the best known after each finished one.")
SLICES = ("Hyperparameters against the objective", "One point a trial; open circles ended early or still run.")
CALIBRATION = (
    "Calibration",
    "How often a model is right when it is so sure. On the diagonal it is calibrated, below it too sure; "
    "larger dots hold more samples.",
)
CURVES = (
    "Learning curves",
    "On the validation split after each epoch. Dotted: loss on the training batches, while members are few.",
)
TIMELINE = (
    "Timeline",
    "Every attempt of every member, by node and cohort. Pale: starting up. Fine lines: ends of epochs.",
)
BATCHES = (
    "Batches by member",
    "Taken from the shared stream, or prepared by the member for itself; and how long it waited for data.",
)
CPU = (
    "CPU time",
    "What processor time went into. Work that serves all members alike is a row of its own, not divided.",
)


def _versus_words(scores: Scores) -> tuple[str, str]:
    words = f"On the same {text.number(scores.rows)} samples of the {scores.split} split."
    if scores.split == "valid":
        words += " Members were selected on these samples, so the combined figures are optimistic."
    return "Combined model and members", words


def _reuse_words(events: Sequence[Event], state: RunState, ledger: Ledger) -> str:
    from ensemble.reporting.figures.sharing import feeder_totals

    sent = sum(total["sent_bytes"] for total in feeder_totals(events).values())
    lines = (reuse_line(ledger), nodes_line(state, sent), ring_line(state))
    return "; ".join(line for line in lines if line)


def _levels_words(state: RunState) -> str:
    found = "".join(f"{line[:1].upper()}{line[1:]}. " for line in bottleneck_lines(state))
    return f"{found}Mean levels from the first sample to the last."


def _power_words(ledger: Ledger) -> tuple[str, str]:
    origin = ledger.total.origin
    words = f"Of whole nodes, {origin}."
    if origin == "estimated":
        words = (
            "Estimated from how busy the processors were, not measured: good for seeing when work was done, "
            "not as evidence of a saving."
        )
    return f"Power over time ({origin})", words


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
    begun = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(started_at(events)))
    kind = (
        f"search over {text.count(state.declared, 'trial')}"
        if state.mode == "search"
        else text.count(state.declared, "member")
    )
    heard = time.strftime("%H:%M:%S UTC", time.gmtime(state.updated)) if state.updated else ""
    parts = [
        kind,
        f"up to {text.count(state.epochs, 'epoch')}",
        f"{state.executor} executor",
        text.count(len(state.nodes), "node"),
        f"started {begun}",
    ]
    if state.ended is None:
        parts.append(f"last heard of {heard}")
    return " · ".join(parts)


def _tiles(state: RunState, ledger: Ledger) -> list[Tile]:
    counts: dict[str, int] = {}
    for member in state.members.values():
        counts[member.state] = counts.get(member.state, 0) + 1
    total = max(state.declared or 0, len(state.members))
    others = ", ".join(f"{n} {name}" for name, n in counts.items() if name != "finished")
    tiles = [Tile("Members finished", f"{counts.get('finished', 0)} of {total}", others or "none failed")]
    leader = best(state)
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
    found = turnaround(state)
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
    for name, words in (("accuracy", "accuracy"), ("nll", "NLL"), ("ece", "ECE")):
        value, other = finite(ensemble.get(name)), finite(alone.get(name))
        if value is None:
            continue
        better = other is not None and (value > other if name == "accuracy" else value < other)
        tone = "" if other is None or value == other else "good" if better else "bad"
        note = f"{text.gain(value, other)} to the best member" if other is not None else ""
        tiles.append(Tile(f"Combined {words}", text.score(value), note, tone))
    return tiles


def _foot(state: RunState) -> str:
    versions = state.header.get("versions") or {}
    parts = [f"{name.replace('_', '-')} {version}" for name, version in versions.items() if version]
    parts += [f"revision {state.header['revision']}"] if state.header.get("revision") else []
    parts += [f"run {state.run_id}"] if state.run_id else []
    combined: dict[str, Any] = state.combined or {}
    notes = [str(combined[name]) for name in ("note", "reason") if combined.get(name)]
    return " · ".join([*parts, *notes])


def _member_table(state: RunState, ledger: Ledger, scores: Scores) -> str:
    names = list(dict.fromkeys(name for member in state.members.values() for name in member.params))
    weights: dict[str, float] = (state.combined or {}).get("weights") or {}
    joules = text.joules_head(ledger.member(member).origin for member in state.members)
    head = [("#", ""), ("member", "text"), ("state", "text"), *((name, "") for name in names)]
    others = other_metrics(state)
    head += [("workers", ""), ("epochs", ""), ("attempts", ""), (state.objective, ""), *((n, "") for n in others)]
    head += [(f"{scores.split} NLL", ""), (f"{scores.split} ECE", "")] if scores.members else []
    head += [("weight", "")] if weights else []
    head += [("samples/s", ""), ("CPU-s", ""), (joules, ""), *([("J is", "text")] if joules == "J" else [])]
    rows = []
    for place, member in enumerate(ranked(state), start=1):
        used, own = ledger.member(member.id), scores.members.get(member.id, {})
        row = [Cell(str(place), place), Cell(escape(member.id), member.number), _state_cell(member)]
        row += [_value_cell(member.params.get(name)) for name in names]
        workers = member.identity.get("workers")
        row += [_number_cell(workers), _number_cell(member.epoch), _number_cell(member.attempts)]
        row += [_score_cell(metric(member, name)) for name in (state.objective, *others)]
        row += [_score_cell(own.get("nll")), _score_cell(own.get("ece"))] if scores.members else []
        row += [_score_cell(weights.get(member.id), 3)] if weights else []
        row += [_number_cell(member.training_rate), _number_cell(round(used.cpu_s, 1) or None)]
        row += [_number_cell(used.energy_j), *([Cell(used.origin, used.origin)] if joules == "J" else [])]
        rows.append(row)
    if not rows:
        return '<div class="card"><p class="soft">No member has been declared yet.</p></div>'
    return table(head, rows, top=0 if best(state) is not None else None)


def _training_table(state: RunState) -> str:
    head, rows = exchange.table([exchange.training_of(member) for member in ranked(state)])
    shares = {head.index(name) for name in ("computing", "synchronizing", "waiting for data") if name in head}
    sent = head.index("sent by a worker") if "sent by a worker" in head else None

    def cell(column: int, value: str | float | None) -> Cell:
        if value is None or isinstance(value, str):
            return Cell(escape(value or ""), value)
        shown = (
            f"{value:.1%}" if column in shares else text.memory(value) if column == sent else text.number(value)
        )
        return Cell(shown, value)

    words = [isinstance(value, str) for value in rows[0]]
    kinds = [(name, "text" if word else "") for name, word in zip(head, words, strict=True)]
    return table(kinds, [[cell(column, value) for column, value in enumerate(row)] for row in rows])


def _state_cell(member: MemberState) -> Cell:
    dot = f'<span class="dot" style="background:{STATES.get(member.state, STATES["waiting"])}"></span>'
    return Cell(dot + escape(member.state), member.state)


def _value_cell(value: Any) -> Cell:
    if value is None:
        return Cell("")
    return Cell(escape(text.value(value)), value if isinstance(value, (int, float)) else str(value))


def _number_cell(value: float | None) -> Cell:
    return Cell("", None) if value is None else Cell(text.number(value), value)


def _score_cell(value: float | None, digits: int = 4) -> Cell:
    return Cell("", None) if value is None else Cell(f"{value:.{digits}f}", value)
