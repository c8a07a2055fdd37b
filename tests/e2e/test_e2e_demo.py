"""The demo as a stranger runs it: on Ray, through the command."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from kit.finished_runs import of_kind
from kit.leftovers import named_memory, new_named_memory

ACCOUNT = Path(__file__).parents[1] / "meter" / "account.py"


# A run that shares on Ray is in the first tier: tests/executors/ray/test_ray_runs.py.
@pytest.mark.ray
@pytest.mark.more
def test_eight_members_train_on_one_pipeline_their_sum_is_better_and_nothing_is_left(tmp_path: Path) -> None:
    scratch, home, run_dir = Path("/tmp") / f"t{secrets.token_hex(4)}", tmp_path / "home", tmp_path / "run"
    for path in (scratch, home):  # the first one's path is short enough for Ray's sockets
        path.mkdir(mode=0o700)
    before, rows, account = named_memory(), tmp_path / "rows.json", tmp_path / "account.json"
    command = [sys.executable, str(ACCOUNT), str(account), sys.executable, "-m", "ensemble.cli", "demo"]
    command += ["--run-dir", str(run_dir), "--json", str(rows)]
    environment = {**os.environ, "TMPDIR": str(scratch), "HOME": str(home)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(rows.read_text())
    assert [row["state"] for row in found] == ["finished"] * 8
    assert {row["energy_origin"] for row in found} <= {"estimated", "attributed"}
    assert all(row["cpu_s"] > 0 for row in found)
    kept, used_s = json.loads((run_dir / "ledger.json").read_text()), json.loads(account.read_text())["cpu_s"]
    (end,) = of_kind(run_dir, "run_finished")
    assert kept["run"]["cpu_s"] + end["report_cpu_s"] == pytest.approx(used_s, rel=0.03)
    assert kept["run"]["cpu_s"] == sum(row["cpu_s"] for row in kept["rows"])
    assert used_s < 120, "about a minute on two cores that have nothing else to do"
    (combined,), placed = of_kind(run_dir, "combined"), of_kind(run_dir, "placed")
    assert kept["reuse"]["factor"] == pytest.approx(8.0)
    assert len(placed) == 8 and len({event["cohort"] for event in placed}) == 1
    assert sorted(len(event["devices"]) for event in placed) == [1] * 6 + [2] * 2
    assert all(event["private_batches"] == 0 for event in of_kind(run_dir, "epoch"))
    metrics = combined["metrics"]
    assert metrics["ensemble"]["accuracy"] > metrics["mean"]["accuracy"] + 0.01
    assert metrics["ensemble"]["nll"] < min(metrics["best"]["nll"], metrics["mean"]["nll"])

    ranks = re.findall(r"^ ?(\d+) +member-(\d)", done.stdout, re.MULTILINE)
    by_member = {row["member"]: row["metric"] for row in found}
    assert [int(rank) for rank, _ in ranks] == list(range(1, len(ranks) + 1))
    assert 3 <= len(ranks) <= 5 and f"and {8 - len(ranks)} more" in done.stdout, "a long path takes lines"
    in_order = [by_member[f"member-{number}"] for _, number in ranks]
    assert in_order == sorted(by_member.values(), reverse=True)[: len(ranks)]
    [(prepared, consumed)] = re.findall(r"([\d,]+) samples were prepared instead of ([\d,]+)", done.stdout)
    assert 8 * int(prepared.replace(",", "")) == int(consumed.replace(",", ""))
    assert "estimated" in done.stdout and str(run_dir / "report.html") in done.stdout
    assert "left" in done.stderr and "8/8 finished" in done.stderr

    assert list(scratch.iterdir()) == [] and list(home.iterdir()) == []
    assert new_named_memory(before) == set()
    for process in psutil.process_iter(["cmdline"]):
        assert not any(str(scratch) in word for word in process.info["cmdline"] or [])
    shutil.rmtree(scratch)
