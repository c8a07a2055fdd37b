"""When the executors sample power; a run beside a meter of the whole node has what that meter saw."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import selectors
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.event_dicts import ledger, read_events
from kit.execute_members import an_ensemble
from kit.finished_runs import of_kind

import ensemble
from ensemble.executors.node_services import NodeServices
from ensemble.meter.power import PowerMeter, PowerSource
from ensemble.meter.power.busy_time import find_busy_time
from ensemble.meter.power.common import Kind, Reading
from ensemble.reporting import write_report
from ensemble.spec import Energy
from ensemble.store import RunDir

WATTS = 400.0
BOTH = pytest.mark.parametrize("executor", ["inline", pytest.param("local", marks=pytest.mark.more)])


def test_the_account_of_a_run_is_what_its_meter_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = time.monotonic()

    def read() -> list[Reading]:
        nonlocal last
        last, since = time.monotonic(), last
        return [Reading("node", "node", WATTS * (last - since))]

    meter_with(monkeypatch, read, "node")
    declared = an_ensemble(energy=Energy(idle_w={"node": 150.0}))
    ensemble.submit(declared, tmp_path / "run", "inline").wait()
    events = read_events(tmp_path / "run" / "events.jsonl")
    node, *_ = [event for event in events if event["type"] == "node"]  # again where others take its memory
    assert "a meter" in node["power"]["source"] and node["power"]["origin"] == "measured"
    assert node["power"]["idle"]["origin"] == "given"
    total = ledger(events)
    (used,) = total.nodes
    assert used.origin == "measured" and used.energy_j is not None
    assert used.energy_j == pytest.approx(WATTS * used.metered_s, rel=0.02)
    assert {kind for row in total.rows for kind in row.parts} == {"node"}, "nothing is estimated beside it"
    assert sum(row.energy_j or 0.0 for row in total.rows) == used.energy_j


def meter_with(monkeypatch: pytest.MonkeyPatch, read: Callable[[], list[Reading]], kind: Kind = "cpu") -> None:
    source = PowerSource("a meter", kind, "measured", read)
    monkeypatch.setattr("ensemble.meter.power.meter.open_power_sources", lambda *_, **__: [source])


def test_a_run_in_this_process_has_energy_however_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter_with(monkeypatch, lambda: [Reading("package-0", "cpu", 1.0)])
    monkeypatch.setattr("ensemble.executors.inline._POWER_EVERY_S", 1e6)
    ensemble.submit(an_ensemble(energy=Energy(measure_idle_s=0)), tmp_path / "run", "inline").wait()
    assert [event["energy_j"] for event in of_kind(tmp_path / "run", "power")] == [1.0]
    assert ledger(read_events(tmp_path / "run" / "events.jsonl")).total.energy_j == 1.0


def test_power_is_never_sampled_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, slow_s = list[float](), [0.0]

    def read() -> list[Reading]:
        time.sleep(slow_s[0])
        ended.append(time.monotonic())
        return [Reading("package-0", "cpu", 1.0)]

    meter_with(monkeypatch, read)
    monkeypatch.setattr("ensemble.meter.cpu.report_interval_s", lambda age_s: 0.0)  # each sample is reported
    events, declared = list[dict[str, Any]](), an_ensemble(energy=Energy(measure_idle_s=0))
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as leaving:
        services = NodeServices("a", declared, selector, events.append)
        leaving.callback(services.close)
        for stalled_s, slow_s[0] in ((0.0, 0.0), (0.2, 0.0), (5.0, 0.0), (0.0, 0.7), (0.0, 1.2)):
            due_at = services.next_sample = time.monotonic() - stalled_s
            services.sample()
            assert ended[-1] + 0.5 <= services.next_sample, "an interval has half a second at least"
            assert services.next_sample <= max(due_at + 1.0, time.monotonic() + 0.5)
            services.sample()
            services.sample()
    assert [event["type"] for event in events] == ["power"] * 6, "the last one when it is closed"


@BOTH
def test_a_run_that_reports_next_to_never_has_the_same_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    monkeypatch.setattr("ensemble.meter.cpu.report_interval_s", lambda age_s: 1e6)
    monkeypatch.setattr("ensemble.executors.inline._POWER_EVERY_S", 0.0)
    sampled, sample = list[float](), PowerMeter.sample

    def count(meter: PowerMeter) -> dict[str, Any]:
        power = sample(meter)
        sampled.append(power["energy_j"])
        return power

    meter_with(monkeypatch, lambda: [Reading("package-0", "cpu", 1.0)])
    monkeypatch.setattr(PowerMeter, "sample", count)
    sharing = "node" if executor == "local" else "independent"
    members = [{"lr": 0.1, "step_s": 0.3}, {"lr": 0.3, "step_s": 0.3}]
    declared = an_ensemble(members, energy=Energy(measure_idle_s=0), sharing=sharing)
    ensemble.submit(declared, tmp_path / "run", executor).wait()
    events = read_events(tmp_path / "run" / "events.jsonl")
    power = [event for event in events if event["type"] == "power"]
    ends = sum(event["type"] in ("node", "finished") for event in events)
    assert 1 <= len(power) <= min(2 + ends, len(sampled))
    assert ledger(events).total.energy_j == sum(event["energy_j"] for event in power) == sum(sampled)
    feeders = [event for event in events if event["type"] == "feeder"]
    assert len(feeders) <= 2 * len({event["pid"] for event in feeders}), "the first, and what was left at the end"
    if executor == "local":
        assert sum(event["consumed"] for event in feeders[1:]) == 2 * 2 * 96
        assert {"feed", "prepare"} <= ledger(events).cpu_by_role().keys()


@BOTH
def test_the_last_moments_of_a_run_are_metered_too_and_report_ledger_and_log_say_the_same(
    tmp_path: Path, executor: str
) -> None:
    path = tmp_path / "run"
    ensemble.submit(an_ensemble(), path, executor).wait()
    events = read_events(path / "events.jsonl")
    kinds = [event["type"] for event in events]
    last = len(kinds) - 1 - kinds[::-1].index("power")
    assert kinds.index("combined") < last < kinds.index("run_finished")
    used, kept = ledger(events), json.loads((path / "ledger.json").read_text())
    per_s = {member: (each.energy_j or 0.0) / each.cpu_s for member, each in used.by_member().items()}
    mean = sum(per_s.values()) / len(per_s)
    assert mean > 0 and all(each == pytest.approx(mean, rel=0.15) for each in per_s.values())
    assert (kept["run"]["cpu_s"], kept["run"]["energy_j"]) == (used.run.cpu_s, used.run.energy_j)
    written = (path / "report.html").read_text()
    assert list_figures(written) == list_figures(write_report(RunDir(path)).read_text()) != []
    assert events[-1]["report_cpu_s"] > 0


def list_figures(page: str) -> list[Any]:
    (found,) = re.findall(r'id="documents">(.*?)</script>', page)
    tables = json.loads(found)["tables"]["tables"]
    return [row for table in tables if table["id"].startswith("cost_of") for row in table["rows"]]


def wait_on_a_core(batch: Any) -> Any:
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass
    return batch


def test_batch_stages_are_shared_work_with_a_row_of_their_own(tmp_path: Path) -> None:
    plain = an_ensemble(members=[{"lr": 0.1}, {"lr": 0.2}])
    declared = dataclasses.replace(plain, train=plain.train.map_batches(wait_on_a_core, batch_size=8))
    ensemble.submit(declared, tmp_path / "run", "local").wait()
    total = ledger(read_events(tmp_path / "run" / "events.jsonl"))
    (row,) = (row for row in total.rows if row.role == "batch")
    shared = [row for row in total.full_rows if row.role == "batch"]
    assert row.member is None and row.cpu_s > 0.02
    assert {row.member for row in shared} == {"member-0", "member-1"}
    assert sum(row.cpu_s for row in shared) == row.cpu_s
    assert sum(row.energy_j or 0.0 for row in shared) == (row.energy_j or 0.0)


@pytest.mark.skipif(getattr(find_busy_time(), "scope", None) != "host", reason="CPU time of others is not seen")
@BOTH
def test_a_run_can_be_interrupted_while_idle_power_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt() -> None:
        while "measuring the idle power" not in caplog.text:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    meter_with(monkeypatch, lambda: [Reading("package-0", "cpu", 1.0)])
    declared = an_ensemble(energy=Energy(measure_idle_s=600.0))
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt, match="before training started"):
        ensemble.submit(declared, tmp_path / "run", executor)
