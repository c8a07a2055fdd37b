"""Nodes with several GPUs under Ray: logical ones, and a stand-in for NVIDIA's library that names four."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_child import Run, make_machine
from one_head import start_head

# Which GPUs a run plans with and lends: test_ray_demand.py and test_ray_agent.py, without a Ray; what it does with
# those of its own Ray, whole and in part: tests/executors/test_executors_gpus.py.
pytestmark = [pytest.mark.ray, pytest.mark.more]
FOUR = ",".join(["A100:80"] * 4)


@pytest.mark.parametrize(
    ("gpus", "narrowed", "expected"),
    [
        pytest.param("A100:80:3,A100:80", {}, "MIG-0-0 MIG-0-1 MIG-0-2 GPU-1", id="mig", marks=pytest.mark.slow),
        pytest.param(FOUR, {"CUDA_VISIBLE_DEVICES": "3,1"}, "GPU-1 GPU-3", id="numbers", marks=pytest.mark.slow),
        pytest.param(FOUR, {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-0"}, "GPU-0 GPU-2", id="uuids"),
    ],
)
def test_a_ray_of_the_runs_own_uses_each_gpu_that_its_user_or_slurm_lets_it_see(
    tmp_path: Path, gpus: str, narrowed: dict[str, str], expected: str
) -> None:
    wanted = set(expected.split())
    run = Run(tmp_path, gpus, "", "ray", "each", str(len(wanted)), **narrowed)
    assert list(run.states.values()) == ["finished"] * len(wanted)
    assert {gpu for member in run.states for [gpu] in run.given(member)} == wanted, (
        "each its own, no attempt in vain"
    )


def test_what_somebody_else_holds_of_a_narrowed_cluster_is_waited_for_and_then_used(tmp_path: Path) -> None:
    narrowed = make_machine(tmp_path, FOUR) | {"CUDA_VISIBLE_DEVICES": "2,3"}
    with start_head(narrowed, ["--num-cpus", "2"]) as head:
        run = Run(tmp_path, FOUR, "", "ray", "waits", **head)
    assert list(run.states.values()) == ["finished"] * 2
    assert sorted(gpu for member in run.states for [gpu] in run.given(member)) == ["GPU-2", "GPU-3"]
    missing = [event["missing"] for event in run.of_kind("resources")]
    assert any(text.startswith("1 x (1 GPU") for text in missing) and missing[-1] == ""


@pytest.mark.slow
def test_a_cluster_does_not_lend_a_broken_gpu_again(tmp_path: Path) -> None:
    with start_head(make_machine(tmp_path, FOUR), ["--num-cpus", "2"]) as head:
        run = Run(tmp_path, FOUR, "", "ray", "breaks", "xid 79", "fails", "1", **head)
    assert set(run.states.values()) == {"finished"}, run.said
    run.find_quarantined("XID 79: GPU has fallen")
