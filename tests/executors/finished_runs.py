"""What tests read in the log of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from event_dicts import fold, read_events


def of_kind(run_dir: Path, kind: str, member: str | None = None) -> list[dict[str, Any]]:
    """The events of that type so far, of one member or of all."""
    log = run_dir / "events.jsonl"
    events = read_events(log) if log.exists() else []
    return [e for e in events if e["type"] == kind and member in (None, e.get("member"))]


def hashes(run_dir: Path) -> dict[str, str | None]:
    """The weights of each member."""
    members = fold(read_events(run_dir / "events.jsonl")).members.values()
    return {member.id: member.weights_sha256 for member in members}


def finished_hashes(run_dir: Path) -> dict[str, str | None]:
    """The weights of each member, all of which must have finished."""
    members = fold(read_events(run_dir / "events.jsonl")).members.values()
    assert {member.state for member in members} == {"finished"}
    return hashes(run_dir)
