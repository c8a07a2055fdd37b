"""Runs CUDA's Multi-Process Service, so that members which share a GPU run on it concurrently.

Its control daemon belongs to the run: its pipes and logs are in the node's own directory (mode 0700). It does not
isolate errors: a member whose kernel faults ends the others on its GPU, which are then retried.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import subprocess
from pathlib import Path

BINARY = "nvidia-cuda-mps-control"
ABSENT = f"{BINARY} is not on the PATH: members that share a GPU take turns on it"
_CALL_S = 10.0

log = logging.getLogger(__name__)


class Mps:
    """The control daemon of one node and run; if it cannot be started, a line in the log says why.

    Args:
        directory: of the node, mode 0700.

    Attributes:
        running: whether it was started.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.running = False
        stop_stale_daemon(directory)
        if shutil.which(BINARY) is None:
            log.warning("mps=True: %s", ABSENT)
            return
        for folder in (_pipe_directory(directory), directory / "mps-log"):
            folder.mkdir(mode=0o700, exist_ok=True)
        error = _run_control(directory, ["-d"], "")
        self.running = error is None
        if error is not None:
            shutil.rmtree(_pipe_directory(directory), ignore_errors=True)
            log.warning("mps=True: the Multi-Process Service does not start: %s", error)

    def close(self) -> None:
        """End the daemon; its clients must have ended."""
        if self.running:
            self.running = False
            error = _run_control(self._directory, [], "quit\n")
            if error is not None:
                log.warning("the Multi-Process Service of this run does not end: %s", error)


def stop_stale_daemon(directory: Path) -> None:
    """End the daemon of a controller that was killed, if there is one."""
    if _pipe_directory(directory).exists():
        if shutil.which(BINARY) is not None:
            _run_control(directory, [], "quit\n")
        shutil.rmtree(_pipe_directory(directory))


def _run_control(directory: Path, arguments: list[str], commands: str) -> str | None:
    """Run the control program; returns why it failed, None if it succeeded."""
    environment = {**os.environ, **_make_environment(directory), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    # The daemon numbers devices by its own list, clients by the daemon's: with all devices both agree.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        done = subprocess.run(
            [BINARY, *arguments],
            input=commands,
            env=environment,
            stdout=subprocess.DEVNULL,  # a pipe would be held open by the daemon
            stderr=subprocess.DEVNULL,
            timeout=_CALL_S,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return f"exit code {done.returncode}; see {directory / 'mps-log'}" if done.returncode else None


def make_client_environment(directory: Path, share: float) -> dict[str, str]:
    """Environment of a worker that shares a GPU through the node's daemon; empty if no daemon runs.

    Args:
        directory: of the node.
        share: limit on the part of the GPU's multiprocessors that the worker uses, rounded up to a percentage; 0:
            no limit.
    """
    if not _pipe_directory(directory).is_dir():
        return {}
    percentage = min(100, math.ceil(100 * share - 1e-9)) if share > 0 else 100
    return {**_make_environment(directory), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percentage)}


def _pipe_directory(directory: Path) -> Path:
    return directory / "mps"


def _make_environment(directory: Path) -> dict[str, str]:
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(_pipe_directory(directory)),
        "CUDA_MPS_LOG_DIRECTORY": str(directory / "mps-log"),
    }
