"""Consumers come, read, stall, leave and die, so do workers and feeders: `feeder_machine.py` says what holds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.ipc.child_processes import child_environment

MACHINE = str(Path(__file__).with_name("feeder_machine.py"))
#: Whose histories have all faults: with another version of hypothesis, others may be needed.
SEEDS, FAULTS = (2, 6, 8, 9, 10, 11, 15, 17, 18, 20), ("reader killed", "worker killed", "feeder killed", "left")
CASES = [(0, 4, ("reader killed", "feeder killed", "left")), pytest.param(1, 10, (), marks=pytest.mark.more)]
CASES += [pytest.param(seed, 10, FAULTS, marks=pytest.mark.chaos) for seed in SEEDS]


@pytest.mark.parametrize(("seed", "examples", "faults"), CASES)
def test_everyone_reads_everything_once_whoever_comes_stalls_leaves_or_dies(
    seed: int, examples: int, faults: tuple[str, ...]
) -> None:
    command = [sys.executable, "-W", "ignore", MACHINE, str(seed), str(examples), *faults]
    environment, errors = child_environment(), subprocess.PIPE
    with subprocess.Popen(command, env=environment, stderr=errors, start_new_session=True) as machine:
        try:
            _, output = machine.communicate(timeout=1200)
        finally:
            with contextlib.suppress(ProcessLookupError):  # they have ended, as they should
                os.killpg(machine.pid, signal.SIGKILL)
    assert machine.returncode == 0, output.decode()
