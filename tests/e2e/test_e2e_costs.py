"""A search for the front of accuracy and joules, from end to end: its driver is killed, and it is resumed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import optuna
import psutil

sys.path.insert(0, str(Path(__file__).parent))
from test_e2e_search import drive

import ensemble
from ensemble.store import read_events

OPTIONS = {"second_objective": "energy_j", "trials": 5, "samples": 120, "epochs": 1, "sharing": "independent"}


def read_costs(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir / "events.jsonl") if event["type"] == "cost"]


def test_a_search_whose_driver_was_killed_keeps_what_its_trials_were_judged_by(tmp_path: Path) -> None:
    run_dir, until = tmp_path / "run", time.monotonic() + 240
    driver = drive(run_dir, OPTIONS)
    try:
        while not (run_dir / "events.jsonl").exists() or not read_costs(run_dir):
            assert driver.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        children = psutil.Process(driver.pid).children(recursive=True)
    finally:
        driver.kill()
        driver.wait()
    assert not psutil.wait_procs(children, 60)[1], "what it had started ends with it"
    before = read_costs(run_dir)
    result = ensemble.resume(run_dir, executor="local").wait()
    after = read_costs(run_dir)
    assert after[: len(before)] == before
    assert sorted(event["member"] for event in after) == [f"member-{number}" for number in range(5)]

    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(run_dir / "optuna.journal"))
    )
    study = optuna.load_study(study_name="searched", storage=storage)
    energy = {event["member"]: event["energy_j"] for event in after}
    metric = {row["member"]: row["metric"] for row in result.members}
    assert all(joules > 0 for joules in energy.values())
    assert [trial.values for trial in study.trials] == [
        [metric[trial.user_attrs["member"]], energy[trial.user_attrs["member"]]] for trial in study.trials
    ]
    assert {trial.user_attrs["member"] for trial in study.best_trials} == set(result.front)
    page = (run_dir / "report.html").read_text()
    assert all(f'"{member}"' in page for member in result.front)
