"""The alert rules and the dashboard that are shipped: no fault is found, they ask for series that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kit.event_dicts import read_events, typed
from kit.execute_members import an_ensemble
from kit.run_events import START, Event, list_run, measured
from local_prometheus import ALERTS

import ensemble
from ensemble.meter import LedgerView
from ensemble.reporting.metrics import DASHBOARD
from ensemble.reporting.metrics.families import FAMILIES, project
from ensemble.store import RunState
from ensemble.store.event_handlers import apply_event

ASKED = {"params": {}, "workers": 1, "cpus_per_worker": 1.0, "gpus_per_worker": 0.0}
MEMBERS = [{"type": "member", "member": f"member-{n}", "number": n, **ASKED} for n in range(2)]
ALL = {
    *("EnsembleFailuresInRow", "EnsembleNoProgress", "EnsembleDriverSilent", "EnsembleNodeExcluded"),
    *("EnsembleFeederLost", "EnsembleDiskNearlyFull", "EnsembleSharedMemoryNearlyFull", "EnsembleGpuQuarantined"),
}


def promtool(*arguments: str) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool (package prometheus)")
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compute_series(events: Sequence[Event], minutes: int) -> list[dict[str, str]]:
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
            named = ", ".join(f'{n}="{v}"' for n, v in zip(family.labels, labels, strict=True))
            value -= begin if family.name.endswith("timestamp_seconds") else 0.0
            row = found.setdefault(f"{family.name}{{{named}}}", [])
            row += ["_"] * (minute - len(row)) + [repr(float(value))]
    ended = {name: ["stale"] * (len(row) < minutes) for name, row in found.items()}  # as a scrape without it says
    return [{"series": name, "values": " ".join(row + ended[name])} for name, row in found.items()]


def evaluate(path: Path, series: list[dict[str, str]], expected: dict[str, set[str]], *more: Any) -> None:
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
    promtool("test", "rules", str(path / "test.yml"))


def test_the_rules_have_no_fault_and_are_all_tested_here() -> None:
    assert f"{len(ALL)} rules found" in promtool("check", "rules", str(ALERTS))
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
    told = {"summary": summary, "description": said.partition('"')[0]}
    fires = [{"exp_labels": {"severity": "page", "run": "digits"}, "exp_annotations": told}]
    alert = {"eval_time": f"{minutes - 1}m", "alertname": "EnsembleFailuresInRow", "exp_alerts": fires}
    series = compute_series(events, minutes)
    assert any("free_bytes" in each["series"] for each in series), "the space of the real machine"
    evaluate(tmp_path, series, {"0m": set()}, alert)


def test_each_trouble_of_a_run_fires_its_alert_and_ends_it_with_the_run(tmp_path: Path) -> None:
    begin = {"type": "run_started", "name": "digits", "epochs": 4, "members": 2, "executor": "ray"}
    nodes = [
        {"type": "node", "node": f"n{n}", "cpus": 2.0, "gpus": ["A"], "gpu_ids": [f"GPU-{n}"]} for n in range(2)
    ]
    placed = {"type": "placed", "member": "member-0", "attempt": 0, "node": "n0", "devices": [None], "cohort": 0}
    steps = {"type": "progress", "member": "member-0", "attempt": 0, "epoch": 0, "step": 1, "steps": 4}
    well = {"type": "node_health", "node": "n0"}
    well |= {"free_gb": {"run directory": 50.0, "/tmp": 50.0, "/dev/shm": 4.0}}
    full = {"run directory": 50.0, "/tmp": 1.0, "/dev/shm": 0.1}
    troubles = [
        {"type": "node_lost", "node": "n1", "detail": "it is gone"},
        {"type": "feeder_lost", "node": "n0", "cohort": 0, "detail": "killed"},
        {"type": "gpu_quarantined", "node": "n0", "gpu": "GPU-0", "detail": "it fell off the bus"},
        well | {"free_gb": full},
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
    evaluate(tmp_path, compute_series(events, 62), expected)


LABELS = {family.name: set(family.labels) for family in FAMILIES}
PANELS = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def targets(panel: dict[str, Any]) -> list[tuple[str, str]]:
    return [(target["expr"], target["legendFormat"]) for target in panel["targets"]]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_metric_and_label_of_a_panel_exists(panel: dict[str, Any]) -> None:
    for expression, legend in targets(panel):
        names = re.findall(r"\bensemble_\w+", expression)
        assert len(names) == 1 and names[0] in LABELS, expression
        known = LABELS[names[0]]
        matched = set(re.findall(r'(\w+)=~?"', expression))
        grouped = re.findall(r"by \(([^)]*)\)", expression)
        left = known if not grouped else set(re.split(r",\s*", grouped[0]))
        assert matched <= known and left <= known, expression
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= left, (expression, legend)
        rates = re.findall(r"rate\((\w+)", expression)
        assert all(name.endswith("_total") for name in rates), "only counters have a rate"


def test_promql_has_no_fault(tmp_path: Path) -> None:
    expressions = [expression for panel in PANELS for expression, _ in targets(panel)]
    replaced = [each.replace("$__rate_interval", "1m").replace("$run", ".*") for each in expressions]
    rules = [{"record": f"rule{number}", "expr": expression} for number, expression in enumerate(replaced)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(tmp_path / "rules.yml"))


def test_every_family_with_figures_is_shown() -> None:
    shown = " ".join(expression for panel in PANELS for expression, _ in targets(panel))
    plain = {"ensemble_stream_workers"}  # for a number
    plain |= set(re.findall(r"ensemble_\w+", ALERTS.read_text())) | {"ensemble_run_failed_attempts_total"}
    left = {
        family.name
        for family in FAMILIES
        if family.name not in shown and family.kind != "info" and family.name not in plain
    }
    assert left == {"ensemble_run_samples_prepared_total", "ensemble_run_samples_consumed_total"}, "reuse has them"
