"""Runs a state machine of hypothesis, which forks and kills processes, in a process group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from pipelines.ipc.child_processes import child_environment


def draw_histories(machine: Path, seed: int, examples: int, faults: tuple[str, ...]) -> None:
    """Go through so many histories: `faults` are those that must have happened in one of them."""
    command = [sys.executable, "-W", "ignore", str(machine), str(seed), str(examples), *faults]
    environment, errors = child_environment(), subprocess.PIPE
    with subprocess.Popen(command, env=environment, stderr=errors, start_new_session=True) as process:
        try:
            _, output = process.communicate(timeout=1200)
        finally:
            with contextlib.suppress(ProcessLookupError):  # they have ended, as they should
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output.decode()
