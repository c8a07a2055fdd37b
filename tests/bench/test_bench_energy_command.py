"""`ensemble bench energy` as a command: options are checked before anything runs, and its end leaves nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ensemble.cli.parser import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--parts overhaed", "overhead"),
        ("--data {tmp}/none.tar", "none.tar"),
        ("--data {tmp}/empty.tar", "empty.tar"),
        ("--cores 4096", "4096 cores"),
        ("--steps walk", "--steps"),
    ],
)
def test_a_mistake_in_an_option_is_told_before_a_part_runs(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    assert main(["bench", "energy", *options.format(tmp=tmp_path).split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


# --- its end -------------------------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize(
    ("options", "module", "folders", "fatal"),
    [
        ("benchmarks attribution --seconds 60 --repeats 1", "benchmarks.energy.member", 1, signal.SIGTERM),
        pytest.param(
            "benchmarks attribution --seconds 1 --repeats 60",
            "benchmarks.energy.attribution",
            1,
            signal.SIGINT,
            marks=pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for NVIDIA's stand-in"),
        ),
        (
            "ensemble.cli bench energy --parts overhead --metered-members 4 --metered-s 60",
            "ensemble.bench.energy.metered_ranks",
            2,
            signal.SIGTERM,
        ),
    ],
)
def test_a_study_that_is_ended_leaves_no_process_and_no_file(
    options: str, module: str, folders: int, fatal: signal.Signals, tmp_path: Path
) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    command = [sys.executable, "-m", *options.split(), "--plot", "-"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as study:
        while not (
            any(module in command for _, command in list_processes(temporary))
            and len(list(temporary.glob("bench-*"))) == folders
        ):
            assert study.poll() is None
            time.sleep(0.05)
        os.killpg(study.pid, fatal)  # as a terminal does
        _, errors = study.communicate(timeout=300)
    assert study.returncode == 128 + fatal
    assert errors.splitlines()[-1].startswith("ensemble: ") and "Traceback" not in errors
    until = time.monotonic() + 300
    while left := list(list_processes(temporary)):
        assert time.monotonic() < until, left
        time.sleep(0.05)
    assert list(temporary.iterdir()) == []


def list_processes(temporary: Path) -> Iterator[tuple[psutil.Process, list[str]]]:
    """Processes with that directory for temporary files, and their command lines."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(temporary):
                yield process, process.cmdline()
