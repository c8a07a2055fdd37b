"""A run that is frozen for a while."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from faults_cluster import CHILD_PATH, Driver


@pytest.mark.more
@pytest.mark.parametrize("frozen", ["all", "driver"])
def test_a_run_that_was_frozen_for_longer_than_a_member_may_be_silent_kills_nobody(
    tmp_path: Path, frozen: str
) -> None:
    """As Slurm's suspend, `docker pause` and a laptop's lid do; the driver alone as a file system that hangs."""
    # A member is as long silent as it may take to start beside other load.
    told: dict[str, Any] = {"executor": "local", "widths": [1, 1], "step_s": 0.1, "hang_timeout_s": 20.0}
    told["retries"] = 0
    driver = Driver(tmp_path / "run", {**os.environ, "PYTHONPATH": CHILD_PATH}, **told)
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
