"""Nodes with several GPUs under Ray: logical ones, and a stand-in for NVIDIA's library that names four."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_child import Run, make_machine, several
from started_cluster import make_cluster, start_head

# Which GPUs a run plans with and lends: tests/executors/ray/test_ray_demand.py, test_ray_agent.py, without a Ray.
# What others leave of them, GPUs that break: tests/executors/test_executors_gpus.py, on a Ray of the run's own.
pytestmark = [pytest.mark.ray, pytest.mark.more]

FOUR = ",".join(["A100:80"] * 4)
#: Of twelve members, which together take four GPUs.
SHARES = (0.0, 0.25, 0.5, 1.0, 0.0, 0.25, 0.5, 1.0, 0.0, 0.25, 0.0, 0.25)
#: Another driver, which holds a GPU of the cluster until a file is there.
SOMEBODY_ELSE = """
import os, sys, time, ray
ray.init(log_to_driver=False, logging_level="ERROR")

@ray.remote(num_gpus=1, num_cpus=0)
class Taken:
    def holds(self): pass

taken = Taken.remote()
ray.get(taken.holds.remote())
print("holds", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_machine(tmp_path_factory.mktemp("nvml"), FOUR)


@pytest.mark.parametrize(
    ("gpus", "narrowed", "expected"),
    [
        pytest.param(",".join(["H100:80"] * 8), None, [f"GPU-{n}" for n in range(8)], marks=pytest.mark.slow),
        pytest.param(
            "A100:80:3,A100:80", None, ["GPU-1", "MIG-0-0", "MIG-0-1", "MIG-0-2"], marks=pytest.mark.slow
        ),
        pytest.param(FOUR, "3,1", ["GPU-1", "GPU-3"], marks=pytest.mark.slow),
        pytest.param(FOUR, "GPU-2,GPU-0", ["GPU-0", "GPU-2"]),
    ],
    ids=["eight", "mig", "numbers", "uuids"],
)
def test_a_ray_of_the_runs_own_uses_each_gpu_that_its_user_or_slurm_lets_it_see(
    tmp_path: Path, machine: dict[str, str], gpus: str, narrowed: str | None, expected: list[str]
) -> None:
    environment = machine | {"STAND_IN_GPUS": gpus} | ({"CUDA_VISIBLE_DEVICES": narrowed} if narrowed else {})
    steps, count = (f"started {len(expected)}", "go"), len(expected)  # all at the same time
    run = Run(tmp_path, environment, "ray", several(count, until="go"), steps)
    assert sorted(gpu for [gpu] in run.given_once().values()) == expected


@pytest.fixture(scope="module")
def cluster(machine: dict[str, str]) -> Iterator[dict[str, str]]:
    """A cluster of one node that lends the GPUs 2 and 3."""
    with start_head({**machine, "CUDA_VISIBLE_DEVICES": "2,3"}, 2) as head:
        yield {**machine, **head}


def test_shares_that_fit_on_two_gpus_run_at_once_and_each_rank_has_one_of_its_own(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    members = [{"lr": 0.1, "share": share, "until": "go"} for share in (0.4, 0.4, 0.6, 0.6)]
    # However the four are packed, three of them fit at once.
    run = Run(tmp_path, cluster, "ray", [*members, {"lr": 0.5, "workers": 2}], ("started 3", "go"))
    *single, wide = run.given_once().values()
    assert set.union(*single) == wide == {"GPU-2", "GPU-3"}
    spans = [(member.identity["gpus_per_worker"], member.spans[0]) for member in run.state.members.values()]
    for _, span in spans:
        beside = [(share, other) for share, other in spans if set(other.devices) & set(span.devices)]
        shares = [share for share, other in beside if other.placed <= span.placed < (other.ended or 0)]
        assert 0 < sum(shares) <= 1.0 + 1e-9


def test_members_of_all_shares_train_at_once_on_two_nodes(tmp_path: Path, machine: dict[str, str]) -> None:
    members = [{"lr": 0.01 * (n + 1), "share": share, "until": "go"} for n, share in enumerate(SHARES)]
    with make_cluster(**machine) as cluster:
        cluster.start(variables={"CUDA_VISIBLE_DEVICES": "0,1"}, cpus=4)
        cluster.join({"CUDA_VISIBLE_DEVICES": "2,3"}, 4)
        steps = f"started {len(SHARES)}", "go"
        run = Run(tmp_path, cluster.environment, "ray", members, steps, devices="auto")
    where: dict[str, list[float]] = {}
    for (member, [gpu]), share in zip(run.given_once().items(), SHARES, strict=True):
        [placed] = run.of_kind("placed", member)
        assert placed["device"] == ("cpu" if share == 0 else "A100") and (gpu == "") == (share == 0)
        where.setdefault(gpu, []).append(share)
    assert where.keys() == {"", "GPU-0", "GPU-1", "GPU-2", "GPU-3"}
    assert all(sum(shares) == 1.0 for gpu, shares in where.items() if gpu), where
    assert [1.0] in where.values(), "a whole one is nobody else's"
    assert len({event["node"] for event in run.of_kind("placed")}) == 2


def test_what_somebody_else_holds_is_waited_for_and_then_used(tmp_path: Path, cluster: dict[str, str]) -> None:
    command = [sys.executable, "-c", SOMEBODY_ELSE, str(tmp_path / "run" / "given-back")]
    with subprocess.Popen(command, env=cluster, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "holds\n"
            steps = ("missing 1 x", "given-back"), ("started 2", "go")
            run = Run(tmp_path, cluster, "ray", several(2, until="go"), *steps)
        finally:
            other.kill()
    assert sorted(run.given_once().values(), key=str) == [{"GPU-2"}, {"GPU-3"}]
    missing = [event["missing"] for event in run.of_kind("resources")]
    assert any(text.startswith("1 x (1 GPU") for text in missing) and missing[-1] == ""
