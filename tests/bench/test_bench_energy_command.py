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
        ("--parts shapley --most-s 3", "--most-s needs --run-dir"),
        ("--parts shapley --most-s 3 --run-dir {tmp} --window-s 5", "--most-s 3 is too short"),
        ("--parts attribution,shapley --run-dir /proc/none", "--run-dir: "),
        ("--parts attribution,shapley --run-dir {tmp}/damaged", "no window"),
        ("--parts attribution,sharing --data {tmp}/none.tar", "none.tar"),
        ("--parts attribution,sharing --data {tmp}/empty.tar", "empty.tar"),
        ("--parts attribution,sharing --cores 4096", "4096 cores"),
        ("--parts attribution,sharing --steps walk", "--steps"),
        ("--parts attribution --data {tmp}", "--data is an option of a part that --parts leaves out: sharing"),
        ("--parts sharing --gpu", "--gpu is an option of a part that --parts leaves out: shapley"),
        ("--parts overhead --repeats 2", "--repeats is an option of a part that --parts leaves out"),
        ("--parts shapley --cool-s 2", "--cool-s needs --gpu"),
    ],
)
def test_a_mistake_in_any_parts_options_is_told_before_a_part_runs(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "coalitions.jsonl").write_text('{"bed": "synth')
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    assert main(["bench", "energy", *options.format(tmp=tmp_path).split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("seconds", ["-2", "nan", "soon"])
def test_a_pause_is_a_number_of_seconds(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "energy", "--gpu", "--cool-s", seconds])
    assert "must be a number of seconds" in capsys.readouterr().err


def test_an_unknown_option_points_to_the_help_of_the_study(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "energy", "--nonsense"])
    assert "`ensemble bench energy --help`" in capsys.readouterr().err


def test_without_a_whole_repeat_there_is_no_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, kept = tmp_path / "plot.html", tmp_path / "kept"
    options = ["--parts", "shapley", "--window-s", "1", "--most-s", "2", "--run-dir", str(kept)]
    assert main(["bench", "energy", *options, "--plot", str(plot)]) == 0
    shown = capsys.readouterr().err
    assert f"--run-dir {kept}" in shown and "no plot" in shown
    assert not plot.exists()


# --- its end -------------------------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize(
    ("options", "module", "folders", "fatal"),
    [
        ("--parts attribution --seconds 60 --repeats 1", "ensemble.bench.energy.busy", 1, signal.SIGTERM),
        pytest.param(
            "--parts attribution --seconds 1 --repeats 60",
            "ensemble.bench.energy.gpu_attribution",
            2,
            signal.SIGINT,
            marks=pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for NVIDIA's stand-in"),
        ),
        (
            "--parts overhead --metered-members 4 --metered-s 60",
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
    command = [sys.executable, "-m", "ensemble.cli", "bench", "energy", *options.split(), "--plot", "-"]
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
