"""Limits of a run: what they hold back on one machine, and that a resume may change them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from execute_members import an_ensemble
from finished_runs import finished_hashes, of_kind

import ensemble
from ensemble import Resources, SpecError
from ensemble.schedule import Node


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limits": {"gpu": 1}}, "a limit of Ensemble.limits"),
        ({"limits": {"gpus": 1.5}}, r"Ensemble.limits\['gpus'\] must be an integer"),
        ({"limits": {"cpus": 0}}, r"Ensemble.limits\['cpus'\] must be above 0"),
        ({"limits": 4}, "Ensemble.limits must be a dict of one or more of gpus, cpus"),
    ],
)
def test_impossible_limits_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        an_ensemble(**options)


def test_a_node_is_offered_within_the_limits_a_gpu_in_parts_as_one() -> None:
    parents = ("GPU-0", "GPU-0", "GPU-1", "GPU-2")
    node = Node("n", 8.0, ("A",) * 4, 64.0, "n", gpu_ids=("a", "b", "c", "d"), gpu_parents=parents)
    limited = node.limit({"gpus": 2, "cpus": 3.0})
    assert (limited.gpu_ids, limited.cpus) == (("a", "b", "c"), 3.0)
    assert node.limit({}) == node and node.limit({"gpus": 0}).gpus == ()


def test_a_member_beyond_the_limits_is_refused_and_others_go_on_under_other_limits_to_the_same_weights(
    tmp_path: Path,
) -> None:
    wide = Resources(cpus_per_worker=2.0, gpus_per_worker=0.0, memory_gb=0.5)
    with pytest.raises(SpecError, match="member-0 needs 2 cores, and limits allow 1"):
        ensemble.submit(an_ensemble(resources=wide, limits={"cpus": 1}), tmp_path / "wide", executor="inline")
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
    spec.write_text("from execute_members import an_ensemble\n\ndef spec():\n    return an_ensemble()\n")
    command = [sys.executable, "-m", "ensemble.cli", "run", str(spec), "--run-dir", str(tmp_path / "run")]
    limited = [*command, "--executor", "local", "--max-cpus", "1", "--max-gpus=0"]
    here = os.pathsep.join(filter(None, sys.path))  # of what the spec imports
    done = subprocess.run(limited, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": here})
    assert done.returncode == 0, done.stderr
    placed, finished = (of_kind(tmp_path / "run", kind) for kind in ("placed", "finished"))
    assert placed[1]["t"] >= finished[0]["t"], "one member at a time"
    (started,) = of_kind(tmp_path / "run", "run_started")
    assert started["limits"] == {"gpus": 0, "cpus": 1.0}
