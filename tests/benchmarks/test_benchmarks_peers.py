"""The same members here and by other systems: both train on equally many photographs, and are measured whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import measure
from benchmarks.sc18.config import write_photographs


@pytest.mark.more
def test_members_here_and_by_dataloaders_train_on_equally_many_photographs(tmp_path: Path) -> None:
    write_photographs(tmp_path / "few.tar", 20)
    command = [sys.executable, "-m", "benchmarks", "peers", "--data", str(tmp_path / "few.tar"), "--members", "2"]
    command += ["--systems", "ray-ensemble,dataloader", "--cases", "late", "--epochs", "2", "--repeats", "1"]
    subprocess.run([*command, "--json", str(tmp_path / "rows.json")], check=True)
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [row["system"] for row in rows] == ["ray-ensemble", "dataloader"]
    assert {row["samples"] for row in rows} == {2 * 2 * 64}, "two members, two epochs of two whole batches"
    assert all(row["cpu_s"] > 1 and row["memory_mib"] > 50 and not row["error"] for row in rows)


def test_a_system_that_cannot_be_installed_is_left_out_with_the_reason(tmp_path: Path) -> None:
    environment = measure.Environment(tmp_path, [], print)
    environment.errors["spdl==0.8.0"] = "not installed: no such package"
    (row,) = measure.run_case("equal", 1, ["spdl"], {"data": "", "epochs": 1, "classes": 1}, environment, 1)
    assert (row.error, row.samples) == ("not installed: no such package", 0)
