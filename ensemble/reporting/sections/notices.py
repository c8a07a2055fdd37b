"""Notices: what did not go as planned, by the event log: failures, restarts, skipped records, interruptions."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ensemble.reporting import text
from ensemble.reporting.loggers.processes import describe_logger
from ensemble.spec import hyperparameters
from ensemble.spec.splits import describe_overlap
from ensemble.store.member import Event
from ensemble.store.verification import describe_hole

MOST_SAID = 80  # characters of an error that is said in full elsewhere
ESTIMATED = "an estimated joule is a weighted CPU-second"


@dataclass(frozen=True)
class Notice:
    """One thing that a reader should know of: when (seconds since the start), how grave, what."""

    at_s: float
    level: str  # "error" | "warning" | "info"
    text: str


def _where(event: Event) -> str:
    return f"{event['node']}, stream group {event.get('cohort')}"


def describe_unmeasured(members: Iterable[str], error: str) -> str:
    """Returns an `unmeasured` event as a sentence; the failure of a member itself says the whole of the error."""
    why = textwrap.shorten(error, MOST_SAID, placeholder=" ...")
    return f"{', '.join(members)}: not measured, placed by default estimates: {why}"


def describe_bad_record(event: Event) -> str:
    """Returns a `bad_record` event as a sentence."""
    which = f"sample {event['index']} of {event['split']} ({event['where']})"
    return f"{which}: {event['reason']}; nobody prepares it any more"


_ACTIONS = {
    "none": "that is rounding, they are shared",
    "alone": "it prepares them itself from the start",
    "anew": "it begins anew and prepares its own batches",
    "fails": "it fails, as verify_sharing='fail' says",
    "renewed": "the cache begins anew",
}


def describe_difference(event: Event) -> str:
    """Returns a `sample_difference` event as a sentence."""
    where = f"epoch {event['epoch']}, position {event['place']} (sample {event['index']})"
    if event["result"] == "left_out":
        return (
            f"{event['member']}: shared samples of {event['split']} are not compared, {where}: {event['detail']}"
        )
    if event.get("member") is None:
        who = f"samples of {event['split']} kept in a cache are not what the pipeline prepares"
    else:
        who = f"{event['member']}: shared samples of {event['split']} are not what its own pipeline prepares"
    return f"{who}, {where}: {event['detail']}; {_ACTIONS[event['action']]}"


def describe_early_stop(member: str, epochs: int, stop: Mapping[str, Any]) -> str:
    """Returns why a member ended before its last epoch, as a sentence.

    Args:
        epochs: that it has trained.
        stop: the field `early_stopping` of its `finished` event.
    """
    if "reason" in stop:
        return f"{member}: ended after {epochs} of {stop['epochs']} epochs: {stop['reason']}"
    best, patience = stop["best"], text.count(stop["patience"], "epoch")
    why = f"{best['metric']} has not improved for {patience}"
    value = f"{text.score(best['value'])} in epoch {best['epoch'] + 1}"
    return f"{member}: stopped early after {epochs} of {stop['epochs']} epochs: {why} (best: {value})"


def describe_quarantine(event: Event) -> str:
    """Returns a `gpu_quarantined` event as a sentence."""
    return f"{event['node']}: GPU {event['gpu']} is used no more: {event['detail']}"


def describe_unusable(event: Event) -> str:
    """Returns a `node_unusable` event as a sentence."""
    again = f"; it is tried again after {event['retry_s']:g} s" if "retry_s" in event else ""
    return f"{event['node']}: nothing can be started there: {event['detail']}{again}"


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


_REMEDIES: dict[str, Callable[[Event], str]] = {
    "alone": lambda event: "it prepares its own batches from its next epoch on",
    "move": lambda event: f"it reads stream group {event['cohort']} from its next epoch on",
    "apart": lambda event: f"a stream of their own, stream group {event['cohort']}, from the next epoch on",
    "widen": lambda event: f"it goes on with {event['workers']} workers",
}


def collect_notices(events: Iterable[Event]) -> list[Notice]:
    """Failures, restarts, skipped records, skipped steps, interruptions: what did not go as planned, in order."""
    collector = NoticeCollector()
    return [notice for event in events for notice in collector.apply(event)]


class NoticeCollector:
    """Finds the notices of a log while it grows."""

    def __init__(self) -> None:
        self._begin: float | None = None
        self._minimizes_energy = False
        self._feeders: dict[str, Event] = {}  # the last event of each
        self._attempts: Counter[str] = Counter()
        self._bad: set[tuple[str, int]] = set()
        self._unread: set[str] = set()

    def apply(self, event: Event) -> list[Notice]:
        """Returns the notices of the next event."""
        if self._begin is None or (event["type"] == "run_started" and not event.get("resumed")):
            self._begin = float(event["t"])
        at_s = float(event["t"]) - self._begin
        return [Notice(at_s, level, what) for level, what in self._describe(event)]

    def _describe(self, event: Event) -> Iterator[tuple[str, str]]:
        """Yields (level, text)."""
        kind, member = event["type"], event.get("member", "")
        if kind == "placed":
            self._attempts[member] += 1
        elif kind == "failed":
            after = "it will be tried again" if event.get("retry") else "it is not tried again"
            after += "" if event.get("retry") or event.get("reason") == "nan" else " before a resume"
            level = "warning" if event.get("retry") else "error"
            reason, error = event.get("reason", "error"), event.get("error") or "no message"
            yield level, f"{member}, attempt {self._attempts[member]}: failed ({reason}): {error}; {after}"
        elif kind == "started" and self._attempts[member] > 1:
            epoch, step = event.get("epoch", 0), event.get("step", 0)
            where = f"goes on at epoch {epoch + 1}, step {step}" if epoch or step else "starts again"
            yield "info", f"{member}, attempt {self._attempts[member]}: {where}"
        elif kind == "damaged":
            yield "warning", f"{member}: {event['error']}: it goes on from what is whole"
        elif kind == "unreadable":
            yield "error", describe_hole(event)
        elif kind == "unmeasured":
            yield "warning", describe_unmeasured(event["members"], event.get("error") or "no message")
        elif kind == "memory_increase":
            asked = [(event.get("memory_gb"), "GiB"), (event.get("gpus_per_worker"), "of a GPU")]
            more = " and ".join(f"{value:g} {unit}" for value, unit in asked if value is not None)
            yield "info", f"{member} and those like it get {more} for each worker from here on"
        elif kind == "remedy":
            what = _REMEDIES[event["what"]](event)
            yield "info", f"{', '.join(event['members'])}: {what}, for the run to end sooner"
        elif kind == "cost" and self._minimizes_energy and event["energy_origin"] == "estimated":
            self._minimizes_energy = False  # once is enough
            yield "info", f"the search minimizes joules that are estimated: {ESTIMATED}"
        elif kind == "unused_hyperparameters":
            what = hyperparameters.describe_unused(event["params"], event.get("meant") or {})
            yield "warning", f"{what} ({member})"
        elif kind == "finished" and event.get("early_stopping"):
            yield "info", describe_early_stop(member, event["epoch"] + 1, event["early_stopping"])
        elif kind == "cancelled":
            yield "info", f"{member}: cancelled"
        elif kind in ("paused", "resumed"):
            yield "info", f"{member}: {kind}"
        elif kind == "epoch":
            where = f"{member}, epoch {event['epoch'] + 1}"
            if steps := event.get("skipped_steps"):
                yield "info", f"{where}: {text.count(steps, 'step')} skipped, gradients were not finite"
            if records := event.get("private_skipped"):
                yield "warning", f"{where}: {text.count(records, 'record')} could not be prepared"
        elif kind == "feeder":
            where = _where(event)
            before, self._feeders[where] = self._feeders.get(where, {}), event
            more, again, alone = (
                event.get(name, 0) - before.get(name, 0) for name in ("skipped", "restarts", "detached")
            )
            if more > 0:
                records = text.count(more, "record")
                yield "warning", f"{where}: {records} could not be prepared, for every member"
            if again > 0:
                yield "warning", f"{where}: preparation workers restarted {again}×"
            if alone > 0:
                yield "info", f"{where}: a member kept the others waiting and went on alone, {alone}×"
        elif kind == "bad_record" and (record := (event["split"], event["index"])) not in self._bad:
            self._bad.add(record)
            yield "warning", describe_bad_record(event)
        elif kind == "sample_difference":
            yield "info" if event["action"] == "none" else "warning", describe_difference(event)
        elif kind == "feeder_lost":
            yield "warning", describe_lost_feeder(event)
        elif kind == "feeder_restarted":
            yield "info", f"{_where(event)}: another feeder took its place ({event['restarts']}×)"
        elif kind == "sharing_ended":
            yield "warning", describe_end_of_sharing(event)
        elif kind == "gpu_quarantined":
            yield "error", describe_quarantine(event)
        elif kind == "node_unusable":
            yield "warning", describe_unusable(event)
        elif kind == "device_changed":
            changed = f"{event['device']}, and not {event['before']}"
            yield "warning", f"{member}: trains on another device than before: {changed}"
        elif kind == "agent_replaced":
            yield "warning", f"{event['node']}: its agent ended, another took its place: {event['detail']}"
        elif kind == "power" and event.get("reason") and event["node"] not in self._unread:
            self._unread.add(event["node"])
            yield "warning", f"{event['node']}: no reading of the meter for a time ({event['reason']})"
        elif kind == "node_draining":
            what = "the cluster drains it: its members write checkpoints and move to other nodes"
            yield "info", f"{event['node']}: {what}"
        elif kind == "code_changed":
            parts = ", ".join(event["changed"]) or "which parts cannot be told"
            earlier = f"; weights of the earlier code: {', '.join(event['trained'])}" if event["trained"] else ""
            yield "warning", f"the code changed ({parts}){earlier}"
        elif kind == "logger" and event["state"] != "works":
            yield "warning", describe_logger(event)
        elif kind == "run_stopped":
            yield "warning", f"the run was stopped ({event.get('reason') or 'no reason given'})"
        elif kind == "run_started":
            self._minimizes_energy = self._minimizes_energy or event.get("second_objective") == "energy_j"
            if event.get("resumed"):
                yield "info", "the run was resumed"
            else:
                yield from (("warning", describe_overlap(row)) for row in event.get("overlap") or ())
