"""`deploy/slurm.sbatch` on a Slurm cluster of two nodes: exit codes, preemption, what is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import NODES, SlurmCluster, unavailable
from slurm_job import MEMBERS, SCRIPT, Job


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[SlurmCluster]:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    with SlurmCluster(shared) as cluster:
        yield cluster


def test_slurm_accepts_the_script_for_two_nodes(cluster: SlurmCluster) -> None:
    done = cluster.execute(["sbatch", "--test-only", str(SCRIPT)])
    assert done.returncode == 0 and "on nodes n[0-1]" in done.stderr, done.stderr


@pytest.mark.ray
@pytest.mark.parametrize(
    "exported", [pytest.param("", marks=pytest.mark.more), pytest.param("INTERFACE=eth0", marks=pytest.mark.slow)]
)
def test_a_run_over_two_nodes_completes(cluster: SlurmCluster, shared: Path, exported: str) -> None:
    job = Job(cluster, shared / f"completes-{exported}", "--set", "epochs=2", exported=exported)
    job.hurry()
    assert job.wait() == ("COMPLETED", "0:0"), job.log()
    assert len({event["member"] for event in job.events("finished")}) == MEMBERS
    assert {event["node"] for event in job.events("placed")} == {f"n{number}" for number in range(NODES)}
    assert job.ray_processes() == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_a_warned_job_writes_checkpoints_and_continues_in_the_queue(
    cluster: SlurmCluster, shared: Path, name: str
) -> None:
    """USR1: the time is nearly up; TERM: a preemption. One of the members fails, so the run ends with status 3."""
    job = Job(cluster, shared / name, "--set", "epochs=200", "--set", "faulty=true")
    job.wait_for_checkpoints(MEMBERS - 1)
    assert job.ray_processes() != []
    cluster.run("scancel", f"--signal={name}", "--batch", job.number)
    job.wait_until(lambda: job.describe()["Restarts"] == "1")
    assert len(job.events("run_stopped")) == 1, job.log()
    job.hurry()
    assert job.wait() == ("FAILED", "3:0"), job.log()
    assert len({event["member"] for event in job.events("finished")}) == MEMBERS - 1
    resumed = [event for event in job.events("started") if event["epoch"] > 0]
    assert len({event["member"] for event in resumed}) == MEMBERS - 1
    assert job.ray_processes() == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [("scontrol", "requeue"), ("scancel", "--signal=TERM")], ids=["at once", "steps"]
)
def test_a_preemption_that_also_ends_ray_is_survived(
    cluster: SlurmCluster, shared: Path, command: tuple[str, str], request: pytest.FixtureRequest
) -> None:
    """At once: Slurm ends the whole job. Steps: Slurm grants time and tells the steps, not the script."""
    job = Job(cluster, shared / request.node.callspec.id.replace(" ", "-"), "--set", "epochs=200")
    job.wait_for_checkpoints()
    cluster.run(*command, job.number)
    job.wait_until(lambda: job.describe()["Restarts"] == "1")
    job.hurry()
    assert job.wait() == ("COMPLETED", "0:0"), job.log()
    assert len({event["member"] for event in job.events("finished")}) == MEMBERS
    assert any(event["epoch"] > 0 for event in job.events("started"))
    assert job.ray_processes() == []


@pytest.mark.ray
@pytest.mark.slow
def test_a_cancelled_job_is_not_queued_again(cluster: SlurmCluster, shared: Path) -> None:
    job = Job(cluster, shared / "cancelled", "--set", "epochs=200")
    job.wait_for_checkpoints()
    cluster.run("scancel", job.number)
    assert job.wait()[0] == "CANCELLED"
    assert job.describe()["Restarts"] == "0"
    assert job.ray_processes() == []
