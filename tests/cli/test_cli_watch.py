"""`ensemble status --watch`: the live table of a run that another process drives, on a terminal."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.leftovers import wait_until
from kit.run_events import list_run, write_run
from test_cli import ENSEMBLE, SPEC, OnTerminal, environment, history, states


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path, Path]]:
    """A run in another process, its directory, and the file without which it is quick."""
    spec, run_dir, hold = tmp_path / "tiny.py", tmp_path / "run", tmp_path / "hold"
    spec.write_text(SPEC)
    hold.touch()
    settings = ["--set", "epochs=30", "--set", f"hold={hold}", "--executor", "local", "--run-dir", str(run_dir)]
    command = [*ENSEMBLE, "run", str(spec), *settings]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment(), **quiet) as process:
        wait_until(lambda: min(history(run_dir), default=0) >= 1, "an epoch of each member")
        yield process, run_dir, hold
        process.kill()


@pytest.mark.more
def test_a_run_elsewhere_is_watched_to_its_end(driver: tuple[subprocess.Popen[bytes], Path, Path]) -> None:
    process, run_dir, hold = driver
    watch = OnTerminal("status", run_dir, "--watch")
    watch.read_until(lambda shown: "0/2 finished, 2 running" in shown and "━" in shown)
    hold.unlink()
    assert watch.end() == 0
    assert "2/2 finished" in watch.shown and "30/30" in watch.shown
    assert process.wait(timeout=300) == 0


@pytest.mark.slow
def test_ctrl_c_ends_the_watch_and_not_the_run(driver: tuple[subprocess.Popen[bytes], Path, Path]) -> None:
    process, run_dir, hold = driver
    watch = OnTerminal("status", run_dir, "--watch")
    watch.read_until(lambda shown: "2 running" in shown)
    watch.process.send_signal(signal.SIGINT)
    assert watch.end() == 130 and "the watch has ended, the run goes on" in watch.shown
    assert watch.shown.count("\x1b[?25h") == watch.shown.count("\x1b[?25l") == 1, "the cursor is back"
    assert process.poll() is None
    hold.unlink()
    assert process.wait(timeout=300) == 0 and set(states(run_dir).values()) == {"finished"}


@pytest.mark.slow
def test_the_watch_ends_when_the_controller_is_lost(driver: tuple[subprocess.Popen[bytes], Path, Path]) -> None:
    process, run_dir, _ = driver
    watch = OnTerminal("status", run_dir, "--watch")
    watch.read_until(lambda shown: "2 running" in shown)
    process.kill()
    assert watch.end() == 0
    assert f"the controller (process {process.pid}) is gone; `ensemble resume {run_dir}` goes on" in watch.shown


def test_a_run_that_has_ended_is_shown_once(tmp_path: Path) -> None:
    watch = OnTerminal("status", write_run(tmp_path, list_run()), "--watch")
    assert watch.end() == 0 and "7/8 finished" in watch.shown
