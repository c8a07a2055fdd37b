"""Runs CUDA's Multi-Process Service, so that members which share a GPU run on it concurrently.

Without it the GPU alternates between processes, and the capacity that one leaves idle is lost. Its control daemon
belongs to the run: its pipes and logs are in the node's own directory (mode 0700), so no other user and no other
run can reach it. It does not isolate errors: a member whose kernel faults ends the others on its GPU, which are
then retried. See NVIDIA's manual "Multi-Process Service".
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
_PATIENCE_S = 10.0

log = logging.getLogger(__name__)


class Mps:
    """The control daemon of one node and run; nothing but a line in the log where it cannot be started.

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
        for each in (_pipe_directory(directory), directory / "mps-log"):
            each.mkdir(mode=0o700, exist_ok=True)
        error = _run_control(directory, ["-d"], "")
        self.running = error is None
        if error is not None:
            shutil.rmtree(_pipe_directory(directory), ignore_errors=True)
            log.warning("mps=True: the Multi-Process Service does not start: %s", error)

    def close(self) -> None:
        """End the daemon; its clients must have ended."""
        if self.running:
            self.running = False
            error = _stop_daemon(self._directory)
            if error is not None:
                log.warning("the Multi-Process Service of this run does not end: %s", error)


def stop_stale_daemon(directory: Path) -> None:
    """End the daemon of a controller that was killed, if there is one."""
    if _pipe_directory(directory).exists():
        if shutil.which(BINARY) is not None:
            _stop_daemon(directory)
        shutil.rmtree(_pipe_directory(directory))


def _stop_daemon(directory: Path) -> str | None:
    return _run_control(directory, [], "quit\n")


def _run_control(directory: Path, arguments: list[str], said: str) -> str | None:
    """Why a call did not succeed, None where it did."""
    environment = {**os.environ, **_make_environment(directory), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    # The daemon counts devices from its own list, clients from the daemon's: with all of them both agree.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        done = subprocess.run(
            [BINARY, *arguments],
            input=said,
            env=environment,
            stdout=subprocess.DEVNULL,  # a pipe would be held open by the daemon
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return f"exit code {done.returncode}; see {directory / 'mps-log'}" if done.returncode else None


def client_environment(directory: Path, share: float) -> dict[str, str]:
    """What a worker on a GPU needs to share it through the node's daemon; nothing where none runs.

    Args:
        directory: of the node.
        share: of the GPU; 0 for one that asked for none, which may use all of it. A bound on the part of the GPU's
            multiprocessors that it may keep at work, rounded up.
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
