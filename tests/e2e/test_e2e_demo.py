"""The demo as a stranger runs it: on Ray, through the command, its report in a real browser."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kit.event_dicts import read_events
from kit.finished_runs import of_kind
from kit.leftovers import named_memory, new_named_memory

# A run that shares on Ray is in the first tier: tests/executors/ray/test_ray_runs.py.
pytestmark = [pytest.mark.ray, pytest.mark.more]

ACCOUNT = Path(__file__).parents[1] / "meter" / "account.py"


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """The demo's temporary directory, with a path short enough for Ray's sockets."""
    path = Path("/tmp") / f"t{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


class Demo:
    """What a run of the demo left to look at."""

    def __init__(self, run_dir: Path, scratch: Path) -> None:
        self.run_dir = run_dir
        self.shared_memory = named_memory()
        account = Path(str(run_dir) + "-account.json")
        command = [sys.executable, str(ACCOUNT), str(account), sys.executable, "-m", "ensemble.cli", "demo"]
        command += ["--run-dir", str(run_dir), "--json", str(run_dir) + ".json"]
        self.home = run_dir.with_name("home")
        self.home.mkdir()
        environment = {**os.environ, "TMPDIR": str(scratch), "HOME": str(self.home)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        self.said, self.progress = done.stdout, done.stderr
        self.used_s = json.loads(account.read_text())["cpu_s"]
        self.rows = json.loads(Path(str(run_dir) + ".json").read_text())


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, scratch: Path) -> Demo:
    return Demo(tmp_path_factory.mktemp("demo") / "run", scratch)


def test_eight_members_train_on_one_pipeline_and_their_sum_is_better(demo: Demo) -> None:
    assert [row["state"] for row in demo.rows] == ["finished"] * 8
    assert {row["energy_origin"] for row in demo.rows} <= {"estimated", "attributed"}
    assert all(row["cpu_s"] > 0 for row in demo.rows)
    (combined,), placed = of_kind(demo.run_dir, "combined"), of_kind(demo.run_dir, "placed")
    metrics = combined["metrics"]
    assert json.loads((demo.run_dir / "ledger.json").read_text())["reuse"]["factor"] == pytest.approx(8.0)
    assert len(placed) == 8 and len({event["cohort"] for event in placed}) == 1
    assert sorted(len(event["devices"]) for event in placed) == [1] * 6 + [2] * 2
    assert all(event["private_batches"] == 0 for event in of_kind(demo.run_dir, "epoch"))
    assert metrics["ensemble"]["accuracy"] > metrics["mean"]["accuracy"] + 0.01
    assert metrics["ensemble"]["nll"] < min(metrics["best"]["nll"], metrics["mean"]["nll"])
    assert demo.used_s < 120, "about a minute on two cores that have nothing else to do"


def test_the_ledger_has_all_that_the_process_tree_used(demo: Demo) -> None:
    kept = json.loads((demo.run_dir / "ledger.json").read_text())
    events = read_events(demo.run_dir / "events.jsonl")
    assert kept["run"]["cpu_s"] + events[-1]["report_cpu_s"] == pytest.approx(demo.used_s, rel=0.03)
    assert kept["run"]["cpu_s"] == sum(row["cpu_s"] for row in kept["rows"])


def test_a_person_is_told_what_matters(demo: Demo) -> None:
    ranks = re.findall(r"^ ?(\d+) +member-(\d)", demo.said, re.MULTILINE)
    metrics = {row["member"]: row["metric"] for row in demo.rows}
    assert [int(rank) for rank, _ in ranks] == list(range(1, 9))
    in_order = [metrics[f"member-{number}"] for _, number in ranks]
    assert in_order == sorted(in_order, reverse=True) and "each was used 8.00 times" in demo.said
    assert "estimated" in demo.said and str(demo.run_dir / "report.html") in demo.said
    assert "left" in demo.progress and "8/8 finished" in demo.progress


def test_nothing_is_left(demo: Demo, scratch: Path) -> None:
    assert list(scratch.iterdir()) == [] and list(demo.home.iterdir()) == []
    assert new_named_memory(demo.shared_memory) == set()
    for process in psutil.process_iter(["cmdline"]):
        assert not any(str(scratch) in word for word in process.info["cmdline"] or [])
