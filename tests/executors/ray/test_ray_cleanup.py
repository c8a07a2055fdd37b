"""Ray may end the processes that its workers start, by three settings: a run is the same with each of them.

A node's agent is such a worker; its fork server, ranks and feeders are such processes.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.finished_runs import of_kind, read_state
from kit.leftovers import wait_until
from started_cluster import HERE, StartedCluster, make_cluster

pytestmark = pytest.mark.ray

#: What it is called here, and Ray's variable.
SETTINGS = {
    "children": "RAY_kill_child_processes_on_worker_exit",
    "subreaper": "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper",
    "groups": "RAY_process_group_cleanup_enabled",
}
OURS = ("ray::NodeAgent", "ensemble.executors", "pipelines.feeder", "pipelines.multinode", "sleep 600")


def choices() -> Iterator[Any]:
    """Every combination; that one is tried most often which differs most from Ray's defaults."""
    for count in range(len(SETTINGS) + 1):
        for on in itertools.combinations(SETTINGS, count):
            marks = pytest.mark.more if on == ("children", "subreaper") else pytest.mark.slow
            settings = {variable: str(word in on).lower() for word, variable in SETTINGS.items()}
            yield pytest.param(settings, marks=marks, id="+".join(on) or "none")


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended; whoever adopted it may not have waited for it yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture(scope="module", params=choices())
def cluster(request: pytest.FixtureRequest) -> Iterator[StartedCluster]:
    with make_cluster(**request.param) as made:
        (made.directory / "own").mkdir()  # of what the head starts
        made.start(variables={"TMPDIR": str(made.directory / "own")})
        yield made


def find(cluster: StartedCluster, *words: str) -> list[psutil.Process]:
    """Living processes that the head has started with one of these words in their command line."""
    started = cluster.find(*words, TMPDIR=str(cluster.directory / "own"))
    return [process for process in started if is_alive(process)]


@contextlib.contextmanager
def drive(cluster: StartedCluster, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver with its run in `path`: two members have failed, the third one waits until `path / "go"` exists."""
    run = path / "run"
    command = [sys.executable, str(HERE / "driver_child.py"), "cleanup", str(run), str(path / "go")]
    driver = subprocess.Popen(command, env=cluster.environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(of_kind(run, "failed")) == 2 and len(of_kind(run, "started")) == 3, "all are there")
        yield driver
    finally:
        driver.kill()
        driver.wait()


def test_exits_are_told_and_a_killed_agent_costs_no_retry_and_nothing_is_left(
    cluster: StartedCluster, tmp_path: Path
) -> None:
    with drive(cluster, tmp_path) as driver:
        [agent] = find(cluster, "ray::NodeAgent")
        of_agent = agent.children(recursive=True)
        assert len(of_agent) > 3
        agent.kill()
        wait_until(lambda: bool(of_kind(tmp_path / "run", "agent_replaced")), "another agent has taken over")
        wait_until(lambda: not any(is_alive(process) for process in of_agent), "what it had started is gone")
        (tmp_path / "go").touch()
        _, output = driver.communicate()
    assert driver.returncode == 0, output
    killed, exited, waited = read_state(tmp_path / "run").members.values()
    assert (killed.state, killed.reason) == ("failed", "lost") and "SIGKILL" in (killed.error or "")
    assert (exited.state, exited.reason) == ("failed", "lost") and "ended with code 3" in (exited.error or "")
    assert waited.state == "finished", "it had no retries"
    wait_until(lambda: not find(cluster, *OURS), "nothing of ours is left")
    assert not any((cluster.directory / "own").iterdir())


@pytest.mark.slow  # the end of a run's own Ray: test_ray_runs.py
def test_a_killed_raylet_leaves_no_process_of_ours(cluster: StartedCluster, tmp_path: Path) -> None:
    with drive(cluster, tmp_path):
        assert len(find(cluster, *OURS)) > 5
        [raylet] = find(cluster, "/raylet/raylet")
        raylet.kill()
        wait_until(lambda: not find(cluster, *OURS), "nothing of ours is left")
