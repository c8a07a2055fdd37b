"""Ray may end the processes that its workers start, by three settings: a run is the same with each of them.

A node's agent is such a worker; its fork server, ranks and feeders are such processes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.finished_runs import of_kind, read_state
from kit.leftovers import wait_until
from one_head import start_head

pytestmark = pytest.mark.ray

HERE = Path(__file__).parent
PYTHONPATH = os.pathsep.join([str(HERE.parents[2]), str(HERE.parents[1] / "support"), str(HERE.parent)])

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


@dataclass
class Head:
    """A Ray node of this test, and what a driver needs to find it."""

    environment: dict[str, str]
    temporary: Path

    def list_processes(self, *words: str) -> list[psutil.Process]:
        """Living processes that this node has started with one of these words in their command line."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended
                command = " ".join(process.cmdline())
                named = any(word in command for word in words)
                if named and process.environ().get("TMPDIR") == str(self.temporary) and is_alive(process):
                    found.append(process)
        return found

    @contextlib.contextmanager
    def drive(self, path: Path) -> Iterator[subprocess.Popen[str]]:
        """A driver with its run in `path`, whose members wait until `path / "go"` exists."""
        command = [sys.executable, str(HERE / "cleanup_child.py"), str(path / "run"), str(path / "go")]
        driver = subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True)
        try:
            yield driver
        finally:
            driver.kill()
            driver.wait()


@pytest.fixture(scope="module", params=choices())
def head(request: pytest.FixtureRequest) -> Iterator[Head]:
    temporary = Path("/tmp") / f"t{secrets.token_hex(4)}"  # of what we start, with short names for its sockets
    temporary.mkdir(mode=0o700)
    own = {"TMPDIR": str(temporary), "PYTHONPATH": PYTHONPATH}
    with start_head({**os.environ, **request.param, **own}, ["--num-cpus", "1"]) as found:
        yield Head({**os.environ, "PYTHONPATH": PYTHONPATH, **found}, temporary)
    subprocess.run(["rm", "-rf", str(temporary)], check=True)


def wait_for_members(run: Path) -> None:
    """Until two members have failed and the third one waits."""
    wait_until(lambda: len(of_kind(run, "failed")) == 2 and len(of_kind(run, "started")) == 3, "all are there")


def test_exits_are_told_and_a_killed_agent_costs_no_retry_and_nothing_is_left(head: Head, tmp_path: Path) -> None:
    with head.drive(tmp_path) as driver:
        wait_for_members(tmp_path / "run")
        [agent] = head.list_processes("ray::NodeAgent")
        of_agent = agent.children(recursive=True)
        assert len(of_agent) > 3
        agent.kill()
        wait_until(lambda: bool(of_kind(tmp_path / "run", "agent_replaced")), "another agent has taken over")
        wait_until(lambda: not any(is_alive(each) for each in of_agent), "what it had started is gone")
        (tmp_path / "go").touch()
        _, said = driver.communicate()
    assert driver.returncode == 0, said
    killed, left, waited = read_state(tmp_path / "run").members.values()
    assert (killed.state, killed.reason) == ("failed", "lost") and "SIGKILL" in (killed.error or "")
    assert (left.state, left.reason) == ("failed", "lost") and "ended with code 3" in (left.error or "")
    assert waited.state == "finished", "it had no retries"
    wait_until(lambda: not head.list_processes(*OURS), "nothing of ours is left")
    assert not any(head.temporary.iterdir())


@pytest.mark.slow  # the end of a run's own Ray: test_ray_runs.py
def test_a_killed_raylet_leaves_no_process_of_ours(head: Head, tmp_path: Path) -> None:
    with head.drive(tmp_path):
        wait_for_members(tmp_path / "run")
        assert len(head.list_processes(*OURS)) > 5
        [raylet] = head.list_processes("/raylet/raylet")
        raylet.send_signal(signal.SIGKILL)
        wait_until(lambda: not head.list_processes(*OURS), "nothing of ours is left")
