"""A study that is interrupted or terminated says so in a line and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kit.leftovers import wait_until

from benchmarks.sc18.config import write_photographs

ROOT = Path(__file__).parents[2]
SC18, FABRIC = "sc18 --data photos.tar", "fabric --parts training --links loopback"


@pytest.mark.more
@pytest.mark.parametrize(
    ("options", "module", "processes", "fatal"),
    [
        # its feeder has forked a worker
        (f"{SC18} --members 2 --designs node --step-ms 100", "pipelines.feeder.process", 2, signal.SIGTERM),
        (f"{FABRIC} --nets resnet50 --backends gloo", "benchmarks.launch.rank_main", 5, signal.SIGINT),
    ],
)
def test_a_study_that_is_ended_leaves_no_process_and_no_file(
    options: str, module: str, processes: int, fatal: signal.Signals, tmp_path: Path
) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    write_photographs(tmp_path / "photos.tar", 40)
    command = [sys.executable, "-m", "benchmarks", *options.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as study:
        while sum(module in command for _, command in list_processes(temporary)) < processes:
            assert study.poll() is None
            time.sleep(0.05)
        os.killpg(study.pid, fatal)  # as a terminal does
        _, errors = study.communicate(timeout=300)
    assert study.returncode == 128 + fatal
    assert errors.splitlines()[-1].startswith("ensemble: ") and "Traceback" not in errors
    wait_until(lambda: not list(list_processes(temporary)), "the end of its processes")
    assert list(temporary.iterdir()) == []


def list_processes(temporary: Path) -> Iterator[tuple[psutil.Process, list[str]]]:
    """Processes with that directory for temporary files, and their command lines."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(temporary):
                yield process, process.cmdline()
