"""promtool evaluates the alert rules that are shipped, with series computed from logs of runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "executors"))

from event_dicts import read_events, typed
from execute_members import an_ensemble
from local_prometheus import ALERTS
from run_events import START, Event, list_run, measured

import ensemble
from ensemble.meter import LedgerView
from ensemble.reporting.metrics.projection import FEW, project
from ensemble.store import RunState
from ensemble.store.event_handlers import apply_event

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (package prometheus)")
ASKED = {"params": {}, "workers": 1, "cpus_per_worker": 1.0, "gpus_per_worker": 0.0}
MEMBERS = [{"type": "member", "member": f"member-{n}", "number": n, **ASKED} for n in range(2)]
ALL = {
    *("EnsembleFailuresInRow", "EnsembleNoProgress", "EnsembleDriverSilent", "EnsembleNodeExcluded"),
    *("EnsembleFeederLost", "EnsembleDiskNearlyFull", "EnsembleSharedMemoryNearlyFull", "EnsembleGpuQuarantined"),
    "EnsembleClockSkew",
}


def compute_series(events: Sequence[Event], minutes: int, prefix: str = "") -> list[dict[str, str]]:
    """What Prometheus has of a run, scraped once a minute, as input of `promtool test rules`.

    As much of the log is there as was written by then; time begins with the log, at zero.
    """
    state, view, left = RunState(), LedgerView(), [typed(event) for event in events]
    begin = left[0].t
    found: dict[str, list[str]] = {}
    for minute in range(minutes):
        while left and left[0].t <= begin + 60 * minute:
            event = left.pop(0)
            apply_event(state, event)
            view.apply(event)
        for family, labels, value in project("digits", state, view):
            if prefix and family not in FEW:
                continue
            named = ", ".join(f'{n}="{v}"' for n, v in zip(family.labels, labels, strict=True))
            value -= begin if family.name.endswith("timestamp_seconds") else 0.0
            row = found.setdefault(f"{prefix}{family.name}{{{named}}}", [])
            row += ["_"] * (minute - len(row)) + [repr(float(value))]
    ended = {name: ["stale"] * (len(row) < minutes) for name, row in found.items()}  # as a scrape without it says
    return [{"series": name, "values": " ".join(row + ended[name])} for name, row in found.items()]


def evaluate(path: Path, series: list[dict[str, str]], expected: dict[str, set[str]], *more: Any) -> None:
    """Assert which alerts fire at these times."""
    tests = [
        {
            "expr": 'count by (alertname) (ALERTS{alertstate="firing"}) > bool 0',
            "eval_time": at,
            "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)],
        }
        for at, names in expected.items()
    ]
    group = {"interval": "1m", "input_series": series, "promql_expr_test": tests, "alert_rule_test": list(more)}
    given = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [group]}
    (path / "test.yml").write_text(json.dumps(given))
    command = ["promtool", "test", "rules", str(path / "test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_have_no_fault_and_are_all_tested_here() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and f"{len(ALL)} rules found" in done.stdout, done.stderr + done.stdout
    assert all(ALERTS.read_text().count(f"alert: {name}\n") == 1 for name in ALL)


def test_a_run_that_goes_well_wakes_nobody(tmp_path: Path) -> None:
    events = [{**event, "t": START + 20 * (event["t"] - START)} for event in measured(list_run(epochs=8))]
    minutes = int((events[-1]["t"] - START) / 60) + 2
    assert minutes > 10
    evaluate(tmp_path, compute_series(events, minutes), {f"{at}m": set() for at in range(minutes)})


@pytest.mark.more
def test_members_of_a_real_run_that_fail_one_after_another_wake_somebody(tmp_path: Path) -> None:
    faults = [{"lr": 0.1, "fault": "exit", "after": 1} for _ in range(3)]
    declared = an_ensemble(faults, epochs=1, retries=1)
    ensemble.submit(declared, tmp_path / "run", executor="local").wait()
    events = read_events(tmp_path / "run" / "events.jsonl")
    begin = events[0]["t"]
    events = [{**event, "t": begin + 60 * (event["t"] - begin)} for event in events]  # a second is a minute
    minutes = int((events[-1]["t"] - begin) / 60) + 2
    summary = "digits: 6 attempts have failed since a member last ended an epoch"
    said = ALERTS.read_text().partition("EnsembleFailuresInRow")[2].partition('description: "')[2]
    alert = {
        "eval_time": f"{minutes - 1}m",
        "alertname": "EnsembleFailuresInRow",
        "exp_alerts": [
            {
                "exp_labels": {"severity": "page", "run": "digits"},
                "exp_annotations": {"summary": summary, "description": said.partition('"')[0]},
            }
        ],
    }
    series = compute_series(events, minutes)
    assert any("free_bytes" in each["series"] for each in series), "the space of the real machine"
    evaluate(tmp_path, series, {"0m": set()}, alert)


@pytest.mark.parametrize("prefix", ["", "ray_"])
def test_each_trouble_of_a_run_fires_its_alert_and_ends_it_with_the_run(tmp_path: Path, prefix: str) -> None:
    begin = {"type": "run_started", "name": "digits", "epochs": 4, "members": 2, "executor": "ray"}
    nodes = [
        {"type": "node", "node": f"n{n}", "cpus": 2.0, "gpus": ["A"], "gpu_ids": [f"GPU-{n}"]} for n in range(2)
    ]
    placed = {"type": "placed", "member": "member-0", "attempt": 0, "node": "n0", "devices": [None], "cohort": 0}
    steps = {"type": "progress", "member": "member-0", "attempt": 0, "epoch": 0, "step": 1, "steps": 4}
    well = {"type": "node_health", "node": "n0", "clock_s": 2.0, "clock_error_s": 1.9}
    well |= {"free_gb": {"run directory": 50.0, "/tmp": 50.0, "/dev/shm": 4.0}}
    full = {"run directory": 50.0, "/tmp": 1.0, "/dev/shm": 0.1}
    troubles = [
        {"type": "node_lost", "node": "n1", "detail": "it is gone"},
        {"type": "feeder_lost", "node": "n0", "cohort": 0, "detail": "killed"},
        {"type": "gpu_quarantined", "node": "n0", "gpu": "GPU-0", "detail": "it fell off the bus"},
        well | {"clock_s": -5.0, "clock_error_s": 0.5, "free_gb": full},
    ]
    told = [*[(0.0, e) for e in (begin, *MEMBERS, *nodes, placed, steps, well)], *[(600.0, e) for e in troubles]]
    told += [(620.0, steps | {"step": 2}), (3600.0, {"type": "run_stopped", "reason": "request"})]
    events = [{"v": 2, "t": START + at, **event} for at, event in told]
    at_once = {
        "EnsembleGpuQuarantined",
        "EnsembleDriverSilent",
    }  # nothing is logged between the events of this test
    expected = {
        "8m": {"EnsembleDriverSilent"},
        "10m": {"EnsembleGpuQuarantined"},
        "13m": at_once | {"EnsembleNodeExcluded", "EnsembleDiskNearlyFull", "EnsembleSharedMemoryNearlyFull"},
        "45m": ALL - {"EnsembleFailuresInRow"},
        "61m": set(),
    }
    evaluate(tmp_path, compute_series(events, 62, prefix), expected)
