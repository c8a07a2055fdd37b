"""The alert rules and the dashboard that are shipped: no fault is found, they ask for series that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kit.event_dicts import read_events, typed
from kit.execute_members import an_ensemble
from kit.run_events import START, Event, list_run, measured
from local_prometheus import ALERTS, promtool

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


def compute_series(events: Sequence[Event], minutes: int) -> list[dict[str, str]]:
    """What Prometheus has of a log, scraped once a minute from its begin, as input of `promtool test rules`."""
    state, view, to_come = RunState(), LedgerView(), [typed(event) for event in events]
    begin, series = to_come[0].t, dict[str, list[str]]()
    for minute in range(minutes):
        while to_come and to_come[0].t <= begin + 60 * minute:
            apply_event(state, to_come[0])
            view.apply(to_come.pop(0))
        for family, labels, value in project("digits", state, view):
            named = ", ".join(f'{n}="{v}"' for n, v in zip(family.labels, labels, strict=True))
            value -= begin if family.name.endswith("timestamp_seconds") else 0.0
            row = series.setdefault(f"{family.name}{{{named}}}", [])
            row += ["_"] * (minute - len(row)) + [repr(float(value))]
    for row in series.values():
        row += ["stale"] * (len(row) < minutes)  # as a scrape without it says
    return [{"series": name, "values": " ".join(row)} for name, row in series.items()]


def evaluate(path: Path, series: list[dict[str, str]], expected: dict[str, set[str]], *more: Any) -> None:
    firing = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"}) > bool 0'}
    labels = {at: [f'{{alertname="{name}"}}' for name in sorted(names)] for at, names in expected.items()}
    samples = {at: [{"labels": label, "value": 1} for label in given] for at, given in labels.items()}
    tests = [firing | {"eval_time": at, "exp_samples": given} for at, given in samples.items()]
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
    told = {"summary": "digits: 6 attempts have failed since a member last ended an epoch"}
    rule = ALERTS.read_text().partition("EnsembleFailuresInRow")[2].partition('description: "')[2]
    told["description"] = rule.partition('"')[0]
    fires = [{"exp_labels": {"severity": "page", "run": "digits"}, "exp_annotations": told}]
    alert = {"eval_time": f"{minutes - 1}m", "alertname": "EnsembleFailuresInRow", "exp_alerts": fires}
    series = compute_series(events, minutes)
    assert any("free_bytes" in each["series"] for each in series), "the space of the real machine"
    evaluate(tmp_path, series, {"0m": set()}, alert)


def test_each_trouble_of_a_run_fires_its_alert_and_ends_it_with_the_run(tmp_path: Path) -> None:
    begin = {"type": "run_started", "name": "digits", "epochs": 4, "members": 2, "executor": "ray"}
    node, gpu = {"type": "node", "cpus": 2.0, "gpus": ["A"]}, {"node": "n0", "gpu": "GPU-0"}
    nodes = [node | {"node": f"n{n}", "gpu_ids": [f"GPU-{n}"]} for n in range(2)]
    placed = {"type": "placed", "member": "member-0", "attempt": 0, "node": "n0", "devices": [None], "cohort": 0}
    steps = {"type": "progress", "member": "member-0", "attempt": 0, "epoch": 0, "step": 1, "steps": 4}
    well, full = (
        {"type": "node_health", "node": "n0", "free_gb": {"run directory": 50.0, "/tmp": tmp, "/dev/shm": shm}}
        for tmp, shm in ((50.0, 4.0), (1.0, 0.1))
    )
    troubles = [
        {"type": "node_lost", "node": "n1", "detail": "it is gone"},
        {"type": "feeder_lost", "node": "n0", "cohort": 0, "detail": "killed"},
        {"type": "gpu_quarantined", **gpu, "detail": "it fell off the bus"},
        full,
    ]
    at = [*[(0.0, e) for e in (begin, *MEMBERS, *nodes, placed, steps, well)], *[(600.0, e) for e in troubles]]
    at += [(620.0, steps | {"step": 2}), (3600.0, {"type": "run_stopped", "reason": "request"})]
    events = [{"v": 2, "t": START + t, **event} for t, event in at]
    silent = {"EnsembleDriverSilent"}  # nothing is logged between the events of this test
    nearly_full = {"EnsembleDiskNearlyFull", "EnsembleSharedMemoryNearlyFull"}
    expected = {"8m": silent, "10m": {"EnsembleGpuQuarantined"}, "45m": ALL - {"EnsembleFailuresInRow"}}
    expected |= {"13m": silent | nearly_full | {"EnsembleGpuQuarantined", "EnsembleNodeExcluded"}, "61m": set()}
    evaluate(tmp_path, compute_series(events, 62), expected)


LABELS = {family.name: set(family.labels) for family in FAMILIES}
PANELS = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_metric_and_label_of_a_panel_exists(panel: dict[str, Any]) -> None:
    for expression, legend in ((target["expr"], target["legendFormat"]) for target in panel["targets"]):
        [name] = re.findall(r"\bensemble_\w+", expression)
        matched = set(re.findall(r'(\w+)=~?"', expression))
        grouped = re.findall(r"by \(([^)]*)\)", expression)
        shown = set(re.split(r",\s*", grouped[0])) if grouped else LABELS[name]
        assert matched | shown <= LABELS[name] and set(re.findall(r"\{\{(\w+)\}\}", legend)) <= shown, expression
        rates = re.findall(r"rate\((\w+)", expression)
        assert all(rate.endswith("_total") for rate in rates), "only counters have a rate"


def test_promql_has_no_fault(tmp_path: Path) -> None:
    replaced = [each.replace("$__rate_interval", "1m").replace("$run", ".*") for each in EXPRESSIONS]
    rules = [{"record": f"rule{number}", "expr": expression} for number, expression in enumerate(replaced)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(tmp_path / "rules.yml"))


def test_every_family_with_figures_is_shown() -> None:
    shown = re.findall(r"ensemble_\w+", " ".join(EXPRESSIONS) + ALERTS.read_text())
    plain = {"ensemble_stream_workers", "ensemble_run_failed_attempts_total"}  # for a number
    plain |= {family.name for family in FAMILIES if family.kind == "info" or family.name in shown}
    missing = {family.name for family in FAMILIES} - plain
    assert missing == {f"ensemble_run_samples_{kind}_total" for kind in ("prepared", "consumed")}, "reuse has them"
