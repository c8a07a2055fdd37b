"""CUDA's Multi-Process Service: members that share a GPU run on it at the same time, not in turns.

Without it the GPU switches between processes, and what one leaves idle the others cannot use meanwhile. Its
control daemon belongs to the run: pipes and logs lie in the node's own directory (mode 0700), so that neither
another user nor another run is reached by it. It has no error isolation: a member whose kernel faults takes those
that share its GPU with it, which are then tried again. See NVIDIA's "Multi-Process Service" (the manual).
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
        end_left_behind(directory)
        if shutil.which(BINARY) is None:
            log.warning("mps=True: %s", ABSENT)
            return
        for each in (_pipes(directory), directory / "mps-log"):
            each.mkdir(mode=0o700, exist_ok=True)
        error = _call(directory, ["-d"], "")
        self.running = error is None
        if error is not None:
            shutil.rmtree(_pipes(directory), ignore_errors=True)
            log.warning("mps=True: the Multi-Process Service does not start: %s", error)

    def close(self) -> None:
        """End the daemon; its clients must have ended."""
        if self.running:
            self.running = False
            error = _quit(self._directory)
            if error is not None:
                log.warning("the Multi-Process Service of this run does not end: %s", error)


def end_left_behind(directory: Path) -> None:
    """End the daemon of a controller that was killed, if there is one."""
    if _pipes(directory).exists():
        if shutil.which(BINARY) is not None:
            _quit(directory)
        shutil.rmtree(_pipes(directory))


def _quit(directory: Path) -> str | None:
    return _call(directory, [], "quit\n")


def _call(directory: Path, arguments: list[str], said: str) -> str | None:
    """Why a call did not succeed, None where it did."""
    environment = {**os.environ, **_directories(directory), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
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
    if not _pipes(directory).is_dir():
        return {}
    percentage = min(100, math.ceil(100 * share - 1e-9)) if share > 0 else 100
    return {**_directories(directory), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percentage)}


def _pipes(directory: Path) -> Path:
    return directory / "mps"


def _directories(directory: Path) -> dict[str, str]:
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(_pipes(directory)),
        "CUDA_MPS_LOG_DIRECTORY": str(directory / "mps-log"),
    }
