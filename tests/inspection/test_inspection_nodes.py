"""What is said of the nodes of a run: by its log, of runs in progress and of runs that have ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit.event_dicts import fold, read_events
from kit.execute_members import an_ensemble

import ensemble
from ensemble.cli.parser import main
from ensemble.events import NodeHealth
from ensemble.executors.node_health import is_news
from ensemble.meter.ledger_view import ledger
from ensemble.reporting.dashboard.projection import RunView
from ensemble.reporting.sections.nodes import list_columns, list_nodes, list_notes, tabulate
from ensemble.reporting.tables import lay_out
from ensemble.store import RunDir
from ensemble.store.event_log import read_batches

HOLDS = {"cpus": 4.0, "memory_gb": 16.0}
BEGIN = {"type": "run_started", "name": "digits", "members": 1, "epochs": 4, "executor": "ray"}
MEMBER = {"type": "member", "member": "member-0", "number": 0, "params": {}}


def story(*events: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"v": 2, "t": 100.0 + at, **event} for at, event in enumerate(events)]


def joins(node: str = "n0", **fields: Any) -> dict[str, Any]:
    return {"type": "node", "node": node, **HOLDS, **fields}


def placed(node: str = "n0", attempt: int = 0, **fields: Any) -> dict[str, Any]:
    return {"type": "placed", "member": "member-0", "attempt": attempt, "node": node, "devices": [None], **fields}


def failed(attempt: int = 0, **fields: Any) -> dict[str, Any]:
    usual = {"member": "member-0", "attempt": attempt, "error": "no", "reason": "error", "retry": True}
    return {"type": "failed", **usual, **fields}


UNUSABLE, LOST = {"type": "node_unusable", "node": "n0", "detail": "why"}, {"type": "node_lost", "node": "n0"}
RESTS = {**UNUSABLE, "retry_s": 30.0}
DRAINS = {"type": "node_draining", "node": "n0", "deadline": 900.0}
STOPS = {"type": "run_stopped", "reason": "request"}


STATES: list[tuple[list[dict[str, Any]], str, float | None, float | None]] = [
    *(([], "idle", None, None), ([placed()], "in use", None, None), ([joins(cpus=0.0)], "given back", None, None)),
    *(([UNUSABLE], "unusable", 103.0, None), ([RESTS, RESTS], "resting", 103.0, 134.0)),
    *(([RESTS, joins()], "idle", None, None), ([DRAINS], "draining", 103.0, 900.0)),
    *(([DRAINS, LOST], "lost", 104.0, None), ([LOST, joins()], "idle", None, None)),
    *(([LOST, STOPS], "lost", 103.0, None), ([STOPS], "ended", None, None)),
    ([LOST, STOPS, {**BEGIN, "resumed": True}], "given back", None, None),
]


def test_why_and_since_when_a_node_is_left_out() -> None:
    for events, state, since, until in STATES:
        [row] = list_nodes(fold(story(BEGIN, MEMBER, joins(), *events)))
        assert (row["state"], row["since"], row["until"]) == (state, since, until)
        assert (since is not None) == bool(list_notes([row]))


def test_failures_are_counted_on_the_node_of_the_rank_that_failed_over_all_starts() -> None:
    events = [BEGIN, MEMBER, joins("n0"), joins("n1"), placed("n0", nodes=["n0", "n1"]), failed(node="n1")]
    events += [placed("n0", 1), failed(1, reason="oom"), STOPS, BEGIN, joins("n0"), placed("n0", 2), failed(2)]
    state = fold(story(*events))
    rows = {row["node"]: row for row in list_nodes(state)}
    assert rows["n0"]["attempts"] == 3 and rows["n0"]["failures"] == {"oom": 1, "error": 1}
    assert rows["n1"]["attempts"] == 1 and rows["n1"]["failures"] == {"error": 1}
    assert state.failures_in_row == 1, "since this start"


def test_a_table_is_as_wide_as_the_terminal_and_says_what_is_held_of_what_there_is() -> None:
    health = {"type": "node_health", "node": "n0", "cpus": 8.0, "memory_gb": 16.0}
    health |= {"free_gb": {"run directory": 2.0}}
    rows = list_nodes(fold(story(BEGIN, MEMBER, joins(), placed(), health)))
    wide = lay_out(list_columns(rows))
    assert all(words in wide[1] for words in ("4 of 8", "member-0", "2 GiB"))
    assert all(len(line) <= 60 for line in lay_out(list_columns(rows), 60))
    whole = [BEGIN, MEMBER, joins(gpu_ids=["0", "1"]), placed()]
    broken = {"type": "gpu_quarantined", "node": "n0", "gpu": "1", "detail": "fell off the bus"}
    assert tabulate(fold(story(*whole)), ledger([])) == [], "of one node without a fault"
    [table] = tabulate(fold(story(*whole, broken)), ledger([]))
    assert "GPU 1 quarantined since" in table.text and "fell off the bus" in table.text


def test_only_what_has_changed_is_logged_again() -> None:
    known = NodeHealth(node="a", free_gb={"/tmp": 10.0, "/dev/shm": 1.0})

    def told(**changed: Any) -> dict[str, Any]:
        return {"type": "node_health", "node": "a", "free_gb": known.free_gb, **changed}

    assert is_news(None, told()) and not is_news(known, told())
    assert not is_news(known, told(free_gb={"/tmp": 8.5, "/dev/shm": 1.1}))
    assert is_news(known, told(free_gb={"/tmp": 7.5, "/dev/shm": 1.0}))
    assert is_news(known, told(free_gb={"/tmp": 10.0, "/dev/shm": 2.0}))
    assert is_news(known, told(free_gb={"/tmp": 10.0})), "a file system is gone"


@pytest.mark.more
def test_an_ended_run_still_says_what_its_node_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    faults = [{"lr": 0.1}, {"lr": 0.1, "fault": "exit", "after": 1}]
    ensemble.submit(an_ensemble(faults, epochs=1, retries=1), path, executor="local").wait()
    [row] = ensemble.describe_nodes(path)
    assert (row["node"], row["state"], row["attempts"], row["failures"]) == ("local", "ended", 3, {"lost": 2})
    assert row["has_cpus"] == row["cpus"]
    assert set(row["free_gb"]) == {"run directory", "/tmp", "/dev/shm"} and row["free_gb"]["/tmp"] > 0
    assert len([event for event in read_events(path / "events.jsonl") if event["type"] == "node_health"]) == 1
    view = RunView(RunDir(path))
    for events, offset in read_batches(view.run_dir.events):
        view.apply(events, offset)
    assert [table["id"] for table in view.tables_document()["places"]] == ["nodes", "feeders"]
    assert main(["nodes", str(path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == [row]
    assert main(["nodes", str(path)]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["node", "state"] and "2 lost" in line
