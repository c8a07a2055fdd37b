"""The run's ledger against an account that the kernel keeps of the whole process tree.

That of a demo under Ray is compared in `tests/e2e/test_e2e_demo.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ensemble.meter import ledger
from ensemble.store import read_events

ACCOUNT = Path(__file__).parent / "account.py"
CASES = Path(__file__).parents[1] / "e2e"
SPEC = f"""
import sys
sys.path.append({str(CASES)!r})
from search_cases import declared

def spec():
    return declared(places=2, trials=6, epochs=2, sampler="random", pruner="none")
"""


@pytest.fixture(scope="module")
def accounts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, Path]]:
    """CPU-seconds of a demo and of a short search, each with its run directory."""
    root = tmp_path_factory.mktemp("account")
    (root / "short.py").write_text(SPEC)
    commands = {"demo": ["demo", "--set", "epochs=2"], "search": ["run", str(root / "short.py")]}
    begun = {}
    for name, words in commands.items():
        command = [
            sys.executable,
            str(ACCOUNT),
            str(root / f"{name}.json"),
            sys.executable,
            "-m",
            "ensemble.cli",
        ]
        command += [*words, "--executor", "local", "--run-dir", str(root / name)]
        begun[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=root, env={**os.environ})
    assert [process.wait(timeout=240) for process in begun.values()] == [0, 0]
    used = {name: json.loads((root / f"{name}.json").read_text())["cpu_s"] for name in commands}
    return {name: (used[name], root / name) for name in commands}


@pytest.mark.parametrize("name", ["demo", "search"])
def test_the_ledger_has_all_that_the_process_tree_used(accounts: dict[str, tuple[float, Path]], name: str) -> None:
    used_s, run_dir = accounts[name]
    kept: dict[str, Any] = json.loads((run_dir / "ledger.json").read_text())
    report_s = read_events(run_dir / "events.jsonl")[-1]["report_cpu_s"]
    assert kept["run"]["cpu_s"] + report_s == pytest.approx(used_s, rel=0.03)
    assert kept["run"]["cpu_s"] == sum(row["cpu_s"] for row in kept["rows"])
    assert kept["run"]["cpu_s"] == ledger(read_events(run_dir / "events.jsonl")).run.cpu_s


def test_the_drivers_start_has_its_place_before_the_runs_first_event(
    accounts: dict[str, tuple[float, Path]],
) -> None:
    events = read_events(accounts["demo"][1] / "events.jsonl")
    (begun,) = [event for event in events if event["type"] == "run_started"]
    told = [event for event in events if event["type"] == "usage" and event["pid"] == begun["pid"]]
    assert [event["role"] for event in told][:2] == ["startup", "orchestrate"]
    assert 0.3 < told[0]["cpu_s"] < told[0]["for_s"], "one thread reads imports"
    assert events[-1]["type"] == "run_finished"
    (combined,) = [event for event in events if event["type"] == "combined"]
    assert events.index(told[-1]) > events.index(combined), "the last figures are told at the end"
