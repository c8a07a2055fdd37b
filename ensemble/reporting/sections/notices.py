"""Notices: what did not go as planned, by the event log: failures, restarts, skipped records, interruptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ensemble.reporting import text
from ensemble.reporting.page import notice_list
from ensemble.reporting.sections import Content, ReportData
from ensemble.store.member import Event

MOST = 60
ESTIMATED = "an estimated joule is a weighted CPU-second"
TONES = {"error": "bad", "warning": "warn", "info": ""}


def start_time(events: Sequence[Event]) -> float:
    """When the run began: the first `run_started`, or the first event of a log without one; Unix seconds."""
    return float(next((e["t"] for e in events if e["type"] == "run_started"), events[0]["t"] if events else 0.0))


@dataclass(frozen=True)
class Notice:
    """One thing that a reader should know of: when (seconds since the start), how grave, what."""

    at_s: float
    level: str  # "error" | "warning" | "info"
    text: str


def _where(event: Event) -> str:
    return f"{event['node']}, cohort {event.get('cohort')}"


def describe_bad_record(event: Event) -> str:
    """Returns a `bad_record` event as a sentence."""
    which = f"sample {event['index']} of {event['split']} ({event['where']})"
    return f"{which}: {event['reason']}; nobody prepares it any more"


def describe_quarantine(event: Event) -> str:
    """Returns a `gpu_quarantined` event as a sentence."""
    return f"{event['node']}: GPU {event['gpu']} is used no more: {event['detail']}"


def describe_lost_feeder(event: Event) -> str:
    """Returns a `feeder_lost` event as a sentence."""
    return f"{_where(event)}: the feeder ended, its members prepare for themselves: {event['detail']}"


def describe_end_of_sharing(event: Event) -> str:
    """Returns a `sharing_ended` event as a sentence."""
    if event.get("node") is None:
        return f"nothing is shared, every member prepares its own batches: {event['detail']}"
    return f"{_where(event)}: sharing ended for good, its members prepare for themselves: {event['detail']}"


def describe_unread(node: str, seconds: float) -> str:
    """Returns for how long the energy of a node is not known, as a sentence."""
    return f"{seconds:.3g} s of node {node} have no reading of the meter: their energy is not known"


def compose(data: ReportData) -> Content:
    """Returns the first `MOST` notices as a list; None where there are none."""
    found = collect_notices(data.events)
    shown = [(text.clock(notice.at_s), TONES[notice.level], notice.text) for notice in found[:MOST]]
    if len(found) > MOST:
        shown.append(("", "", f"and {len(found) - MOST} more: see events.jsonl"))
    return notice_list(shown) if shown else None


_REMEDIES: dict[str, Callable[[Event], str]] = {
    "alone": lambda event: "it prepares its own batches from its next epoch on",
    "move": lambda event: f"it reads the stream of cohort {event['cohort']} from its next epoch on",
    "apart": lambda event: f"a stream of their own, cohort {event['cohort']}, from the next epoch on",
    "widen": lambda event: f"it goes on with {event['workers']} workers",
}


def collect_notices(events: Sequence[Event]) -> list[Notice]:
    """Failures, restarts, skipped records, skipped steps, interruptions: what did not go as planned, in order."""
    begin = start_time(events)
    found: list[Notice] = []
    minimizes_energy = any(e.get("second_objective") == "energy_j" for e in events if e["type"] == "run_started")
    last: dict[str, Event] = {}  # of each feeder
    attempt: Counter[str] = Counter()
    bad: set[tuple[str, int]] = set()
    unread: dict[str, float] = {}  # seconds by node, until they are noted
    for event in events:
        if event["type"] == "power" and event.get("reason"):
            unread[event["node"]] = unread.get(event["node"], 0.0) + event["interval_s"]

    def note(event: Event, level: str, what: str) -> None:
        found.append(Notice(float(event["t"]) - begin, level, what))

    for event in events:
        kind, member = event["type"], event.get("member", "")
        if kind == "placed":
            attempt[member] += 1
        elif kind == "failed":
            after = "it will be tried again" if event.get("retry") else "it is not tried again"
            after += "" if event.get("retry") or event.get("reason") == "nan" else " before a resume"
            level = "warning" if event.get("retry") else "error"
            reason, error = event.get("reason", "error"), event.get("error") or "no message"
            note(event, level, f"{member}, attempt {attempt[member]}: failed ({reason}): {error}; {after}")
        elif kind == "started" and attempt[member] > 1:
            epoch, step = event.get("epoch", 0), event.get("step", 0)
            where = f"goes on at epoch {epoch + 1}, step {step}" if epoch or step else "starts again"
            note(event, "info", f"{member}, attempt {attempt[member]}: {where}")
        elif kind == "unmeasured":
            who = ", ".join(event["members"])
            note(event, "warning", f"{who}: not measured, placed by guess: {event.get('error') or 'no message'}")
        elif kind == "room":
            asked = [(event.get("memory_gb"), "GiB"), (event.get("gpus_per_worker"), "of a GPU")]
            more = " and ".join(f"{value:g} {unit}" for value, unit in asked if value is not None)
            note(event, "info", f"{member} and those like it get {more} for each worker from here on")
        elif kind == "remedy":
            what = _REMEDIES[event["what"]](event)
            note(event, "info", f"{', '.join(event['members'])}: {what}, for the run to end sooner")
        elif kind == "cost" and minimizes_energy and event["energy_origin"] == "estimated":
            minimizes_energy = False  # once is enough
            note(event, "info", f"the search minimizes joules that are estimated: {ESTIMATED}")
        elif kind == "unread":
            note(event, "warning", f"nothing reads the hyperparameter {', '.join(event['params'])} ({member})")
        elif kind == "cancelled":
            note(event, "info", f"{member}: cancelled")
        elif kind in ("paused", "resumed"):
            note(event, "info", f"{member}: {kind}")
        elif kind == "epoch" and event.get("skipped_steps"):
            what = f"{text.count(event['skipped_steps'], 'step')} skipped, gradients were not finite"
            note(event, "info", f"{member}, epoch {event['epoch'] + 1}: {what}")
        elif kind == "feeder":
            where = _where(event)
            before, last[where] = last.get(where, {}), event
            more, again, alone = (
                event.get(name, 0) - before.get(name, 0) for name in ("skipped", "restarts", "detached")
            )
            if more > 0:
                records = text.count(more, "record")
                note(event, "warning", f"{where}: {records} could not be prepared, for every member")
            if again > 0:
                note(event, "warning", f"{where}: preparation workers restarted {again}×")
            if alone > 0:
                note(event, "info", f"{where}: a member kept the others waiting and went on alone, {alone}×")
        elif kind == "bad_record" and (record := (event["split"], event["index"])) not in bad:
            bad.add(record)
            note(event, "warning", describe_bad_record(event))
        elif kind == "feeder_lost":
            note(event, "warning", describe_lost_feeder(event))
        elif kind == "feeder_restarted":
            note(event, "info", f"{_where(event)}: another feeder took its place ({event['restarts']}×)")
        elif kind == "sharing_ended":
            note(event, "warning", describe_end_of_sharing(event))
        elif kind == "gpu_quarantined":
            note(event, "error", describe_quarantine(event))
        elif kind == "agent_replaced":
            note(event, "warning", f"{event['node']}: its agent ended, another took its place: {event['detail']}")
        elif kind == "power" and event.get("reason") and event["node"] in unread:
            said = describe_unread(event["node"], unread.pop(event["node"]))
            note(event, "warning", f"{said} ({event['reason']})")
        elif kind == "node_draining":
            what = "the cluster drains it: its members write checkpoints and move to other nodes"
            note(event, "info", f"{event['node']}: {what}")
        elif kind == "code_changed":
            parts = ", ".join(event["changed"]) or "which parts cannot be told"
            earlier = f"; weights of the earlier code: {', '.join(event['trained'])}" if event["trained"] else ""
            note(event, "warning", f"the code changed ({parts}){earlier}")
        elif kind == "run_stopped":
            note(event, "warning", f"the run was stopped ({event.get('reason') or 'no reason given'})")
        elif kind == "run_started" and event.get("resumed"):
            note(event, "info", "the run was resumed")
    return found
