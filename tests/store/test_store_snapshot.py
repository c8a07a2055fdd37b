"""How a run stands, from a snapshot and what follows it in the log: the same as from the whole log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit.event_dicts import lines, project
from kit.run_events import list_run, measured

from ensemble.reporting import RunProjection, status_rows
from ensemble.store import RunDir, RunStatus

Event = dict[str, Any]


@pytest.fixture(autouse=True)
def every_event_is_worth_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ensemble.store.snapshot.GROWN_BYTES", 1)
    monkeypatch.setattr("ensemble.meter.ledger_view.MARGIN_S", 2.0)


def rows_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return status_rows(project(events))


def rows(standing: RunStatus) -> list[dict[str, Any]]:
    return status_rows(RunProjection.from_status(standing))


def a_run(seed: int) -> list[Event]:
    """Members that finish, fail, are tried again; stopped once and resumed on nodes that have a meter."""
    first = list_run(6, 4, seed, until=12.0)
    stopped = {"v": 2, "t": first[-1]["t"], "type": "run_stopped", "reason": "asked to"}
    again = [{**event, "t": event["t"] + 100.0} for event in measured(list_run(6, 4, seed))]
    later = [event | ({"attempt": event["attempt"] + 2} if "attempt" in event else {}) for event in again]
    return [*first, stopped, later[0] | {"resumed": True}, *(e for e in later[1:] if e["type"] != "member")]


def write(path: Path, events: list[Event]) -> RunDir:
    run_dir = RunDir(path)
    run_dir.events.write_bytes(lines(events))
    return run_dir


JOULES = ("energy_j", "full_energy_j", "mean_w")


def same(found: list[Event], expected: list[Event]) -> bool:
    """The same rows; energy and power to a hundred-thousandth of a joule and watt."""
    for row, other in zip(found, expected, strict=True):
        for name in other:
            approximate = name in JOULES and other[name] is not None
            assert row[name] == (pytest.approx(other[name], abs=1e-5) if approximate else other[name]), name
    return True


@pytest.mark.parametrize("seed", range(4))
def test_a_snapshot_and_what_follows_is_the_whole_log(tmp_path: Path, seed: int) -> None:
    events = a_run(seed)
    keeper = RunStatus(RunDir(tmp_path))
    for end in (*range(20, len(events), 37), len(events)):
        run_dir = write(tmp_path, events[:end])
        found = RunStatus.load(run_dir)  # from the snapshot of the round before
        assert (found.offset > 0 and same(rows(found), rows_of(events[:end]))) and found.state.finished == {}
        keeper.save_if_grown()
        found = RunStatus.load(run_dir)
        assert same(rows(found), rows_of(events[:end]))
    run_dir.snapshot.unlink()
    assert same(rows(RunStatus.load(run_dir)), rows_of(events)), "deleting it loses nothing"
    other = RunStatus(run_dir)
    other.save_if_grown()
    assert all(member.history == [] for member in other.state.members.values()), "it is lean"


def test_a_snapshot_that_another_controller_wrote_is_gone_on_from(tmp_path: Path) -> None:
    events = a_run(7)
    run_dir = write(tmp_path, events[:100])
    RunStatus(run_dir).save_if_grown()
    first = run_dir.snapshot.read_bytes()
    write(tmp_path, events)
    RunStatus(run_dir).save_if_grown()
    assert run_dir.snapshot.read_bytes() != first
    assert same(rows(RunStatus.load(run_dir)), rows_of(events))


def of_header(content: bytes, **changes: Any) -> bytes:
    head, _, body = content.partition(b"\n")
    return json.dumps({**json.loads(head), **changes}).encode() + b"\n" + body


def test_a_damaged_snapshot_or_that_of_another_log_is_not_used(tmp_path: Path) -> None:
    events = a_run(1)
    run_dir = write(tmp_path, events)
    RunStatus(run_dir).save_if_grown()
    content = run_dir.snapshot.read_bytes()
    damaged = [content[: len(content) // 2], b"", content.replace(b"accuracy", b"occuracy", 1), b"[" * 100_000]
    damaged += [of_header(content, v=99), content.partition(b"\n")[2], of_header(content, offset=10**9)]
    for snapshot in damaged:
        run_dir.snapshot.write_bytes(snapshot)
        found = RunStatus(run_dir)
        found._load_snapshot()
        assert found.offset == 0 and found.state.members == {}
        assert same(rows(RunStatus.load(run_dir)), rows_of(events))
    run_dir.snapshot.write_bytes(content)
    other = a_run(2)
    write(tmp_path, other)
    assert same(rows(RunStatus.load(run_dir)), rows_of(other))


def test_a_member_that_ended_and_trains_again_after_all_is_counted_right(tmp_path: Path) -> None:
    events = a_run(1)
    run_dir = write(tmp_path, events)
    RunStatus(run_dir).save_if_grown()
    again = {"v": 2, "t": events[-1]["t"], "type": "epoch", "member": "member-0", "attempt": 5, "epoch": 1}
    events.append({**again, "metrics": {"accuracy": 0.25}, "samples": 10, "samples_per_s": 1.0})
    write(tmp_path, events)
    assert same(rows(RunStatus.load(run_dir)), rows_of(events))
