"""Limits of a run: what they hold back on one machine, and that a resume may change them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.execute_members import an_ensemble
from kit.finished_runs import finished_hashes, of_kind

import ensemble
from ensemble.schedule.needs import Node


def test_a_node_is_offered_within_the_limits_a_gpu_in_parts_as_one() -> None:
    parents = ("GPU-0", "GPU-0", "GPU-1", "GPU-2")
    node = Node("n", 8.0, ("A",) * 4, 64.0, "n", gpu_ids=("a", "b", "c", "d"), gpu_parents=parents)
    limited = node.limit({"gpus": 2, "cpus": 3.0})
    assert (limited.gpu_ids, limited.cpus) == (("a", "b", "c"), 3.0)
    assert node.limit({}) == node and node.limit({"gpus": 0}).gpus == ()


def test_a_run_goes_on_under_other_limits_to_the_same_weights(tmp_path: Path) -> None:
    declared = an_ensemble(limits={"cpus": 1.0})
    ensemble.submit(declared, tmp_path / "run", executor="inline").wait()
    again = ensemble.resume(tmp_path / "run", epochs=3, limits={"cpus": 1.5})
    again.wait()
    ensemble.submit(an_ensemble(epochs=3), tmp_path / "free", executor="inline").wait()
    assert finished_hashes(tmp_path / "run") == finished_hashes(tmp_path / "free")
    started = of_kind(tmp_path / "run", "run_started")
    assert [event.get("limits") for event in started] == [{"cpus": 1.0}, {"cpus": 1.5}]
    assert of_kind(tmp_path / "run", "node")[0]["cpus"] == 1.0


@pytest.mark.more
def test_options_limit_what_runs_at_once(tmp_path: Path) -> None:
    spec = tmp_path / "limited_spec.py"
    spec.write_text("from kit.execute_members import an_ensemble\n\ndef spec():\n    return an_ensemble()\n")
    command = [sys.executable, "-m", "ensemble.cli", "run", str(spec), "--run-dir", str(tmp_path / "run")]
    limited = [*command, "--executor", "local", "--max-cpus", "1", "--max-gpus=0"]
    here = os.pathsep.join(filter(None, sys.path))  # of what the spec imports
    done = subprocess.run(limited, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": here})
    assert done.returncode == 0, done.stderr
    placed, finished = (of_kind(tmp_path / "run", kind) for kind in ("placed", "finished"))
    assert placed[1]["t"] >= finished[0]["t"], "one member at a time"
    (started,) = of_kind(tmp_path / "run", "run_started")
    assert started["limits"] == {"gpus": 0, "cpus": 1.0}
