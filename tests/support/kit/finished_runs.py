"""What tests read in the log of a run, and do when something is logged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ensemble.store import RunState
from kit.event_dicts import fold, read_events


def of_kind(run_dir: Path, kind: str, member: str | None = None) -> list[dict[str, Any]]:
    """The events of that type so far, of one member or of all."""
    log = run_dir / "events.jsonl"
    events = read_events(log) if log.exists() else []
    return [e for e in events if e["type"] == kind and member in (None, e.get("member"))]


def read_state(run_dir: Path) -> RunState:
    """What the log of a run says of it so far."""
    return fold(read_events(run_dir / "events.jsonl"))


def once(kind: str, act: Callable[[], object], member: str | None = None) -> Callable[[dict[str, Any]], None]:
    """An `on_event` that acts at the first event of that type, of one member or of any."""
    done: list[bool] = []

    def on_event(event: dict[str, Any]) -> None:
        if not done and event["type"] == kind and member in (None, event.get("member")):
            done.append(True)
            act()

    return on_event


def hashes(run_dir: Path) -> dict[str, str | None]:
    """The weights of each member."""
    members = read_state(run_dir).members.values()
    return {member.id: member.weights_sha256 for member in members}


def finished_hashes(run_dir: Path) -> dict[str, str | None]:
    """The weights of each member, all of which must have finished."""
    members = read_state(run_dir).members.values()
    assert {member.state for member in members} == {"finished"}
    return hashes(run_dir)
