"""Events of a log as dicts, as `on_event` gives them: what tests write down, and what they compare."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from ensemble import store
from ensemble.events import VERSION, Event, decode_event, to_dict
from ensemble.meter import Ledger
from ensemble.meter.ledger_view import ledger as ledger_of
from ensemble.reporting.run_projection import RunProjection
from ensemble.store import RunState
from ensemble.store.event_log import add_crc


def complete(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event with the usual values of what tests leave out: origins, parts of a node, the number of an epoch."""
    made = {"v": VERSION, "t": 0.0, **event}
    if event["type"] in ("usage", "power"):
        made = {"origin": "measured", **made}
    if event["type"] == "power" and event.get("energy_j") is not None:
        interval_s = event["energy_j"] / event["watts"] if event.get("watts") else 0.0
        parts = [{"kind": "cpu", "energy_j": event["energy_j"], "origin": made["origin"]}]
        made = {"parts": parts, "interval_s": interval_s, **made}
    return {"epoch": 0, **made} if event["type"] == "epoch" else made


def typed(event: Mapping[str, Any] | Event) -> Event:
    """The event of a dict."""
    if isinstance(event, Event):
        return event
    found = decode_event(json.dumps(complete(event)).encode())
    assert found is not None, f"no event: {event}"
    return found


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """`ensemble.store.read_events`, as dicts."""
    return [to_dict(event) for event in store.read_events(path)]


def fold(events: Iterable[Mapping[str, Any] | Event]) -> RunState:
    """`ensemble.store.fold` of dicts."""
    return store.fold(map(typed, events))


def apply_event(state: RunState, event: Mapping[str, Any] | Event) -> None:
    """`ensemble.store.apply_event` of a dict."""
    store.apply_event(state, typed(event))


def ledger(events: Iterable[Mapping[str, Any] | Event]) -> Ledger:
    """`ensemble.meter.ledger` of dicts."""
    return ledger_of(map(typed, events))


def project(events: Iterable[Mapping[str, Any] | Event], driver: str | None = None) -> RunProjection:
    """`RunProjection.from_events` of dicts."""
    return RunProjection.from_events(map(typed, events), driver)


def collect_notices(events: Iterable[Mapping[str, Any] | Event]) -> list[Any]:
    """The notices of a log, in order."""
    from ensemble.reporting.sections.notices import NoticeCollector

    collector = NoticeCollector()
    return [notice for event in map(typed, events) for notice in collector.apply(event)]


def lines(events: Iterable[Mapping[str, Any] | Event]) -> bytes:
    """Events as the lines of a log."""
    made = (json.dumps(complete(each)).encode() for each in map(as_dict, events))
    return b"".join(add_crc(line) + b"\n" for line in made)


def as_dict(event: Mapping[str, Any] | Event) -> Mapping[str, Any]:
    """An event as a dict."""
    return to_dict(event) if isinstance(event, Event) else event
