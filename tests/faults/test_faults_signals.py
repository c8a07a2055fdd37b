"""Signals at times that no other test picks: while the members are combined, and a run frozen for a while."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from faults_cluster import CHILD_PATH, Driver, list_left, processes_with
from faults_conductor import EPOCHS


def start(run_dir: Path, tmp: Path, **told: Any) -> Driver:
    """A driver all of whose temporary files are below `tmp`."""
    own = {"PYTHONPATH": CHILD_PATH, "FAULTS_RUN": str(tmp), "TMPDIR": str(tmp)}
    return Driver(run_dir, {**os.environ, **own}, **told)


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
    driver = start(tmp_path / "run", tmp, **told)
    driver.wait_for(lambda: len(driver.list_events("finished")) == 2)
    driver.process.send_signal(signal.SIGTERM)
    assert driver.end()[0] == 143 and list_left(processes_with("FAULTS_RUN", str(tmp)), tmp) == []
    assert driver.state.ended is not None, "its end is in the log, whichever it was"
    again = start(tmp_path / "run", tmp, **told)
    assert again.end()[0] == 0 and list_left(processes_with("FAULTS_RUN", str(tmp)), tmp) == []
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
    # A member is as long silent as it may take to start beside other load.
    told: dict[str, Any] = {"executor": "local", "widths": [1, 1], "step_s": 0.1, "hang_timeout_s": 20.0}
    told["retries"] = 0
    driver = start(tmp_path / "run", tmp, **told)
    driver.wait_for(lambda: len(driver.list_events("epoch")) >= 2)
    victims = [psutil.Process(driver.process.pid)]
    victims += victims[0].children(recursive=True) if frozen == "all" else []
    for process in victims:
        process.suspend()
    time.sleep(25.0)
    for process in reversed(victims):  # members go on first, or last: the driver is the first of them
        process.resume()
    assert driver.end()[0] == 0 and driver.list_events("failed") == []
    assert {member.attempts for member in driver.state.members.values()} == {1}
