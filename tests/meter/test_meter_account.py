"""The run's ledger against an account that the kernel keeps of the whole process tree.

That of a demo under Ray is compared in `tests/e2e/test_e2e_demo.py`.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from burning_members import declare, train_inline
from kit import event_dicts
from kit.event_dicts import fold, ledger, read_events, typed
from kit.ranks import CONTEXT

import ensemble
from ensemble.meter.usage_parser import UsageParser

ACCOUNT = Path(__file__).parent / "account.py"
SPEC = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
import dataclasses, numpy
from burning_members import declare
from pipelines import Pipeline, sources

def spec():
    valid = Pipeline(sources.arrays(x=numpy.ones((16, 4), "float32"), label=numpy.zeros(16, "int64")))
    return dataclasses.replace(declare(members=4, epochs=2, step_s=0.05), valid=valid)
"""


def test_the_ledger_has_all_that_the_process_tree_used(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(SPEC)
    command = [sys.executable, str(ACCOUNT), "account.json", sys.executable, "-m", "ensemble.cli"]
    command += ["run", "short.py", "--executor", "local", "--run-dir", "run"]
    subprocess.run(command, stdout=subprocess.DEVNULL, cwd=tmp_path, check=True)
    used_s, run_dir = json.loads((tmp_path / "account.json").read_text())["cpu_s"], tmp_path / "run"
    kept: dict[str, Any] = json.loads((run_dir / "ledger.json").read_text())
    events = read_events(run_dir / "events.jsonl")
    assert kept["run"]["cpu_s"] + events[-1]["report_cpu_s"] == pytest.approx(used_s, rel=0.03)
    assert kept["run"]["cpu_s"] == sum(row["cpu_s"] for row in kept["rows"])
    assert kept["run"]["cpu_s"] == ledger(events).run.cpu_s
    (begun,) = [event for event in events if event["type"] == "run_started"]
    told = [event for event in events if event["type"] == "usage" and event["pid"] == begun["pid"]]
    assert [event["role"] for event in told][:2] == ["startup", "orchestrate"], "before the run's first event"
    assert 0.3 < told[0]["cpu_s"] < told[0]["for_s"], "one thread reads imports"
    (combined,) = [event for event in events if event["type"] == "combined"]
    assert events[-1]["type"] == "run_finished"
    assert events.index(told[-1]) > events.index(combined), "the last figures are told at the end"


def read_used_s() -> float:
    """CPU-seconds of this process and of the children that it has waited for, such as git."""
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + waited.ru_utime + waited.ru_stime


def test_members_in_the_drivers_process_are_counted_once(tmp_path: Path) -> None:
    began_s = read_used_s()
    ensemble.submit(declare(members=2, epochs=4, step_s=0.01), tmp_path / "run", "inline").wait()
    used_s, events = read_used_s() - began_s, read_events(tmp_path / "run" / "events.jsonl")
    roles, report_s = ledger(events).cpu_by_role(), events[-1]["report_cpu_s"]
    # What was used before the run began is not the run's in a program of the user's own.
    steps_s = 2 * 4 * 8 * 0.01
    assert steps_s <= sum(roles.values()) + report_s <= used_s
    assert roles["train"] >= steps_s and roles["orchestrate"] <= used_s - report_s - steps_s


def count_epochs(log: Path) -> int:
    return log.read_text().count('"type":"epoch"') if log.exists() else 0


def test_the_time_between_a_kill_and_the_next_start_is_nobodys(tmp_path: Path) -> None:
    pause_s, run = 1000.0, tmp_path / "run"
    process = CONTEXT.Process(target=train_inline, args=(run,))
    process.start()
    while process.is_alive() and count_epochs(run / "events.jsonl") < 2:
        time.sleep(0.05)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    lines = [line | {"t": line["t"] - pause_s} for line in lines]  # as if that time had gone by since
    (run / "events.jsonl").write_bytes(
        event_dicts.lines({name: value for name, value in line.items() if name != "crc"} for line in lines)
    )
    ensemble.resume(run, "inline").wait()
    events, reader = read_events(run / "events.jsonl"), UsageParser()
    state = fold(events)
    assert 0 < state.wall_s < pause_s / 2 and state.idle_s > pause_s / 2
    for event in events:
        reader.apply(typed(event))
    (node,) = reader.nodes.values()
    spans = [*(use.span for use in node.cpu), *node.reserved[None], *node.power]
    assert node.power and all(span.end - span.start < pause_s / 2 for span in spans)
