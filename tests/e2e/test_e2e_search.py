"""Searches from end to end: killed and taken up again, sharing one stream, writing to a storage of the user's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from event_dicts import fold, read_events
from search_cases import declared

import ensemble

ROOT = Path(__file__).parents[2]
SAMPLES = 96
# Each trial by itself: its results are the same whenever it begins.
KILLED: dict[str, Any] = {"sampler": "tpe", "pruner": "hyperband", "objective": "gain", "trials": 16}
KILLED["sharing"] = "independent"


def proposals(run_dir: Path) -> list[dict[str, Any]]:
    return [member.params for member in fold(read_events(run_dir / "events.jsonl")).members.values()]


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The run directory of a search whose driver was killed in its midst."""
    run_dir = tmp_path / "killed"
    script = str(Path(__file__).parent / "search_cases.py")
    command = [sys.executable, script, str(run_dir), json.dumps(KILLED)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    driver = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, **quiet)  # type: ignore[call-overload]
    try:
        events, begun = run_dir / "events.jsonl", 0
        while begun < KILLED["trials"] // 2:
            assert driver.poll() is None
            time.sleep(0.01)
            begun = events.read_bytes().count(b'"type":"member"') if events.exists() else 0
        children = psutil.Process(driver.pid).children(recursive=True)
    finally:
        driver.kill()
        driver.wait()
    assert not psutil.wait_procs(children, 300)[1], "what it had started ends with it"
    return run_dir


@pytest.mark.more  # a sampler proposes the same after a resume: tests/search/test_search_searcher.py
def test_a_search_whose_driver_was_killed_proposes_what_it_would_have(
    killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ensemble.controller.finalize.Finalizer.write_report", lambda *_: None
    )  # no report: it takes as long
    before = proposals(killed)
    assert 0 < len(before) < KILLED["trials"]
    ensemble.resume(killed, executor="inline").wait()
    ensemble.submit(declared(**KILLED), tmp_path / "run", executor="inline").wait()
    expected = proposals(tmp_path / "run")
    assert len(expected) == KILLED["trials"] and proposals(killed) == expected
    states = [fold(read_events(run / "events.jsonl")) for run in (killed, tmp_path / "run")]
    outcomes = [[(m.state, m.metrics, m.weights_sha256) for m in state.members.values()] for state in states]
    assert outcomes[0] == outcomes[1]


@pytest.mark.more
def test_trials_of_hyperband_share_one_stream_and_a_database_shows_them(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    made = declared(places=3, trials=9, samples=SAMPLES, batch_size=32, storage=url)
    result = ensemble.submit(made, tmp_path / "run", executor="local").wait()
    events = read_events(tmp_path / "run" / "events.jsonl")
    members = fold(events).members.values()
    assert {member.state for member in members} == {"finished", "pruned"}
    told = [event for event in events if event["type"] == "epoch"]
    assert not any(event["private_batches"] for event in told), "no trial prepares for itself"
    read = {member.first_epoch + epoch for member in members for epoch in range(member.epoch)}
    assert result.ledger is not None
    reuse = result.ledger["reuse"]
    assert reuse["consumed"] == SAMPLES * len(told)
    ring = made.capacity or 0  # may have been filled in vain when all readers leave at once
    assert reuse["prepared"] <= SAMPLES * len(read) + ring * len(members), "each epoch once, for all that read it"
    assert reuse["prepared"] < reuse["consumed"]
    assert all(later.first_epoch > 0 for later in list(members)[3:]), "those in freed places joined where it was"

    trials = optuna.load_study(study_name="searched", storage=url).trials
    assert [trial.user_attrs["member"] for trial in trials] == [member.id for member in members]
    states = {"finished": "COMPLETE", "pruned": "PRUNED"}
    assert [trial.state.name for trial in trials] == [states[member.state] for member in members]
    assert [trial.value for trial in trials] == [member.metrics["accuracy"] for member in members]
