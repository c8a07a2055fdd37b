"""Signals at times that no other test picks: while the members are combined, and to the whole process group."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from event_dicts import fold, read_events
from faults_cluster import CHILD_PATH, processes_with
from faults_plan import EPOCHS

from ensemble.store import RunState, StoreError

LIMIT_S = 300.0  # of what hangs


class Driver:
    """A driver in a process group of its own, all of whose temporary files are below `tmp`."""

    def __init__(self, run_dir: Path, tmp: Path, **told: Any) -> None:
        self._events, self._tmp = run_dir / "events.jsonl", tmp
        environment = {**os.environ, "PYTHONPATH": CHILD_PATH, "FAULTS_RUN": str(tmp), "TMPDIR": str(tmp)}
        command = [
            sys.executable,
            str(Path(__file__).with_name("faults_driver.py")),
            str(run_dir),
            json.dumps(told),
        ]
        self.process = subprocess.Popen(
            command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def wait_for(self, kind: str, count: int = 1) -> None:
        until = time.monotonic() + LIMIT_S
        while sum(event["type"] == kind for event in self.events()) < count:
            assert self.process.poll() is None and time.monotonic() < until, kind
            time.sleep(0.005)

    def events(self) -> list[dict[str, Any]]:
        try:
            return read_events(self._events)
        except StoreError:
            return []

    @property
    def state(self) -> RunState:
        return fold(self.events())

    def left(self) -> list[str]:
        processes = processes_with("FAULTS_RUN", str(self._tmp))
        found = [str(process) for process in processes if process.status() != psutil.STATUS_ZOMBIE]
        return found + [str(path) for what in ("ensemble", "ray") for path in self._tmp.glob(f"{what}-*")]


@pytest.fixture
def tmp() -> Iterator[Path]:
    """With a name short enough for Ray's sockets."""
    path = Path("/tmp") / f"t{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


@pytest.mark.more
def test_a_signal_while_members_are_combined_trains_nobody_again(
    tmp: Path, tmp_path: Path, expected: dict[str, str | None]
) -> None:
    told: dict[str, Any] = {"executor": "local", "widths": [1, 2], "epochs": EPOCHS, "step_s": 0.0}
    driver = Driver(tmp_path / "run", tmp, **told)
    driver.wait_for("finished", 2)
    driver.process.send_signal(signal.SIGTERM)
    assert driver.process.wait(LIMIT_S) == 143 and driver.left() == []
    assert driver.state.ended is not None, "its end is in the log, whichever it was"
    again = Driver(tmp_path / "run", tmp, **told)
    assert again.process.wait(LIMIT_S) == 0 and again.left() == []
    state = again.state
    assert state.combined is not None and state.ended is not None and state.ended.type == "run_finished"
    for member in state.members.values():
        assert (member.attempts, member.weights_sha256) == (1, expected[member.id])


@pytest.mark.more
@pytest.mark.parametrize("frozen", ["all", "driver"])
def test_a_run_that_was_frozen_for_longer_than_a_member_may_be_silent_kills_nobody(
    tmp: Path, tmp_path: Path, frozen: str
) -> None:
    """As Slurm's suspend, `docker pause` and a laptop's lid do; the driver alone as a file system that hangs."""
    told: dict[str, Any] = {
        "executor": "local",
        "widths": [1, 1],
        "step_s": 0.1,
        "hang_timeout_s": 20.0,  # longer than a member takes to start beside other load
        "retries": 0,
    }
    driver = Driver(tmp_path / "run", tmp, **told)
    driver.wait_for("epoch", 2)
    victims = [psutil.Process(driver.process.pid)]
    victims += victims[0].children(recursive=True) if frozen == "all" else []
    for process in victims:
        process.suspend()
    time.sleep(25.0)
    for process in reversed(victims):  # members go on first, or last: the driver is the first of them
        process.resume()
    assert driver.process.wait(LIMIT_S) == 0
    assert [e["type"] for e in driver.events() if e["type"] == "failed"] == []
    assert {member.attempts for member in driver.state.members.values()} == {1}


@pytest.mark.ray
@pytest.mark.slow
def test_a_signal_to_all_processes_at_once_does_not_end_ray_before_the_run(
    tmp: Path, tmp_path: Path, expected: dict[str, str | None]
) -> None:
    """As timeout(1) and systemd send it."""
    told: dict[str, Any] = {"executor": "ray", "widths": [1, 2], "epochs": EPOCHS, "step_s": 0.1}
    driver = Driver(tmp_path / "run", tmp, **told)
    driver.wait_for("epoch", 3)
    os.killpg(driver.process.pid, signal.SIGTERM)
    assert driver.process.wait(LIMIT_S) == 143
    assert driver.left() == []
    assert {member.state for member in driver.state.members.values()} == {"stopped"}, "each wrote a checkpoint"
    again = Driver(tmp_path / "run", tmp, **told)
    assert again.process.wait(LIMIT_S) == 0 and again.left() == []
    assert {member.id: member.weights_sha256 for member in again.state.members.values()} == {
        name: expected[name] for name in ("member-0", "member-1")
    }
