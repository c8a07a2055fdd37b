"""A run as a job of `deploy/slurm.sbatch`, for tests."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from kit.event_dicts import read_events
from slurm_cluster import SlurmCluster

from ensemble.store import RunDir

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "deploy" / "slurm.sbatch"
MEMBERS = 4
ALIVE = ("PENDING", "RUNNING", "COMPLETING")
LIMIT_S = 600.0


class Job:
    """A job of the script, in a directory of its own.

    Args:
        options: of `ensemble run`.
        exported: additional variables of its environment.
        sbatch: options of `sbatch`.
    """

    def __init__(
        self, cluster: SlurmCluster, directory: Path, *options: str, exported: str = "", sbatch: Sequence[str] = ()
    ) -> None:
        self._cluster, self._directory = cluster, directory
        directory.mkdir()
        (directory / ".venv").symlink_to(sys.prefix)
        shutil.copy(HERE / "slow_spec.py", directory)
        command = ["sbatch", "--parsable", f"--export=ALL,{exported}", *sbatch, str(SCRIPT)]
        command += ["slow_spec.py", *options]
        self.number = cluster.run(*command, cwd=directory).strip()

    def hurry(self) -> None:
        (self._directory / "fast").touch()

    def events(self, type: str) -> list[dict[str, Any]]:
        path = RunDir(self._directory / "runs" / "slow_spec").events
        return [event for event in read_events(path) if event["type"] == type] if path.exists() else []

    def describe(self) -> dict[str, str]:
        return self._cluster.describe(self.number)

    def wait_until(self, is_met: Callable[[], bool]) -> None:
        until = time.monotonic() + LIMIT_S
        while not is_met():
            state = self.describe()
            if state["JobState"] not in ALIVE or time.monotonic() > until:
                assert is_met(), f"{state}\n{self.log()}"
                return
            time.sleep(0.5)

    def wait(self) -> tuple[str, str]:
        self.wait_until(lambda: self.describe()["JobState"] not in ALIVE)
        ended = self.describe()
        return ended["JobState"], ended["ExitCode"]

    def wait_for_checkpoints(self, members: int = MEMBERS) -> None:
        self.wait_until(lambda: len({event["member"] for event in self.events("checkpoint")}) == members)

    def log(self) -> str:
        return "".join(path.read_text() for path in self._directory.glob("ray-ensemble-*.log"))

    def ray_processes(self) -> list[str]:
        processes = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
        return [command for command in processes if f"/tmp/ray-of-0/{self.number}." in command]
