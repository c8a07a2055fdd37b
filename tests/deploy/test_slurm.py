"""`deploy/slurm.sbatch` on a Slurm cluster of two nodes: exit codes, preemption, what is left behind."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from event_dicts import read_events
from slurm_cluster import NODES, SlurmCluster, unavailable

from ensemble.store import RunDir

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "deploy" / "slurm.sbatch"
MEMBERS = 4
ALIVE = ("PENDING", "RUNNING", "COMPLETING")
LIMIT_S = 600.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[SlurmCluster]:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    with SlurmCluster(shared) as cluster:
        yield cluster


class Job:
    """A job of the script, in a directory of its own; `exported` are additional variables of its environment."""

    def __init__(self, cluster: SlurmCluster, directory: Path, *options: str, exported: str = "") -> None:
        self._cluster, self._directory = cluster, directory
        directory.mkdir()
        (directory / ".venv").symlink_to(sys.prefix)
        shutil.copy(HERE / "slow_spec.py", directory)
        command = ["sbatch", "--parsable", f"--export=ALL,{exported}", str(SCRIPT), "slow_spec.py", *options]
        self.number = cluster.run(*command, cwd=directory).strip()

    def hurry(self) -> None:
        """Let the members train at full speed."""
        (self._directory / "fast").touch()

    def events(self, type: str) -> list[dict[str, Any]]:
        """The run's events of a type."""
        path = RunDir(self._directory / "runs" / "slow_spec").events
        return [event for event in read_events(path) if event["type"] == type] if path.exists() else []

    def describe(self) -> dict[str, str]:
        return self._cluster.describe(self.number)

    def wait_until(self, is_met: Callable[[], bool]) -> None:
        until = time.monotonic() + LIMIT_S
        while not is_met():
            state = self.describe()
            if state["JobState"] not in ALIVE or time.monotonic() > until:
                assert is_met(), f"{state}\n{self.log()}"
                return
            time.sleep(0.5)

    def wait(self) -> tuple[str, str]:
        """Wait for the job's end; returns its state and its exit code as Slurm shows them."""
        self.wait_until(lambda: self.describe()["JobState"] not in ALIVE)
        ended = self.describe()
        return ended["JobState"], ended["ExitCode"]

    def wait_for_checkpoints(self, members: int = MEMBERS) -> None:
        """Wait until so many members have a checkpoint after an epoch."""
        self.wait_until(lambda: len({event["member"] for event in self.events("checkpoint")}) == members)

    def log(self) -> str:
        return "".join(path.read_text() for path in self._directory.glob("ray-ensemble-*.log"))

    def ray_processes(self) -> list[str]:
        """Processes of Ray that the job has started."""
        processes = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
        return [command for command in processes if f"/tmp/ray-of-0/{self.number}." in command]


def test_slurm_accepts_the_script_for_two_nodes(cluster: SlurmCluster) -> None:
    done = cluster.execute(["sbatch", "--test-only", str(SCRIPT)])
    assert done.returncode == 0 and "on nodes n[0-1]" in done.stderr, done.stderr


@pytest.mark.ray
@pytest.mark.parametrize(
    "exported",
    [pytest.param("", marks=pytest.mark.more), pytest.param("INTERFACE=eth0", marks=pytest.mark.slow)],
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
