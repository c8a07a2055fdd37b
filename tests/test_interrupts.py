"""Ctrl-C and SIGTERM while a run starts: it ends as the signal says, one line is said, nothing is left."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.event_dicts import fold, read_events
from kit.finished_runs import read_state
from kit.leftovers import wait_until

import ensemble
from ensemble.cli.parser import main
from ensemble.executors.inline import InlineExecutor
from ensemble.interrupts import Interrupted, defer_signals, raise_if_deferred
from ensemble.spec.spec_file import load_spec

ROOT = Path(__file__).parents[1]
SPEC = """
import numpy as np
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources

def model(params):
    import torch
    return torch.nn.Linear(4, 3)

def loss(model, batch):
    import os, pathlib, time, torch
    pathlib.Path(os.environ["TMPDIR"], "stepping").touch()
    time.sleep(float(os.environ["STEP_S"]))
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

def spec():
    x, y = np.zeros((64, 4), np.float32), np.zeros(64, np.int64)
    return Ensemble(name="slow", recipe=Recipe(model=model, loss=loss), members=[{"lr": 0.1}] * 2, epochs=50,
                    batch_size=8, train=Pipeline(sources.arrays(x=x, y=y)))
"""
CLI = "import sys; from ensemble.cli import main; sys.exit(main())"


class Command:
    """`ensemble run` or a program of its own as a process, all of whose temporary files are below `tmp`."""

    def __init__(
        self, tmp: Path, directory: Path, executor: str, step_s: float = 0.1, program: str = "", **environment: str
    ) -> None:
        self.tmp, self.run_dir = tmp, directory / "run"
        spec = directory / "slow.py"
        spec.write_text((SPEC_THAT_WAITS if "WHERE" in environment else "") + SPEC)
        own = {"PYTHONPATH": f"{directory}:{ROOT}", "TMPDIR": str(tmp), "STEP_S": str(step_s)}
        arguments = ["run", str(spec), "--executor", executor, "--run-dir", str(self.run_dir)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", program or CLI, *([str(spec), str(self.run_dir)] if program else arguments)],
            env={**os.environ, **own, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip

    def wait_for(self, sign: Callable[[], bool]) -> None:
        until = time.monotonic() + 300
        while not sign():
            assert self.process.poll() is None and time.monotonic() < until, self.process.communicate()
            time.sleep(0.005)

    def below(self, pattern: str) -> Callable[[], bool]:
        return lambda: any(self.tmp.glob(pattern))

    def logged(self, kind: str) -> Callable[[], bool]:
        events = self.run_dir / "events.jsonl"
        return lambda: events.exists() and f'"{kind}"' in events.read_text()

    def wait_until_gone(self) -> None:
        wait_until(lambda: not self._list_left(), "its end")

    def _list_left(self) -> list[str]:
        found = [str(path) for what in ("ray", "ensemble") for path in self.tmp.glob(f"{what}-*")]
        for process in psutil.process_iter():
            try:
                if str(self.tmp) in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {process.cmdline()}")
            except psutil.Error:
                continue
        return found


@pytest.fixture
def tmp() -> Iterator[Path]:
    """With a name short enough for Ray's sockets."""
    path = Path("/tmp") / f"t{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


def ends(command: Command, code: int, *says: str) -> None:
    """Assert that it ends with this code, one line that says one of these, and nothing left of it."""
    said = command.process.communicate(timeout=600)[1]
    assert command.process.returncode == code, said
    lines = [line for line in said.splitlines() if not line.startswith(("[", "there is no valid="))]  # progress
    assert len(lines) == 1 and any(words in lines[0] for words in says), said
    command.wait_until_gone()


@pytest.mark.parametrize(
    ("executor", "number", "code", "sign", "says"),
    [
        ("inline", signal.SIGTERM, 143, "placed", "ensemble resume"),
        pytest.param("local", signal.SIGINT, 130, "directory", "", marks=pytest.mark.more),
        pytest.param("local", signal.SIGTERM, 143, "sockets", "can be run again", marks=pytest.mark.more),
        pytest.param("local", signal.SIGHUP, 129, "placed", "ensemble resume", marks=pytest.mark.more),
    ],
)
def test_a_signal_while_a_run_starts_ends_it_in_order(
    executor: str, number: signal.Signals, code: int, sign: str, says: str, tmp: Path, tmp_path: Path
) -> None:
    command = Command(tmp, tmp_path, executor)
    in_tmp, placed = command.below("ensemble-*"), command.logged("placed")
    command.wait_for({"directory": command.run_dir.exists, "sockets": in_tmp, "placed": placed}[sign])
    command.process.send_signal(number)
    ends(command, code, says)
    events = command.run_dir / "events.jsonl"
    state = fold(read_events(events) if events.exists() else [])
    assert (state.ended and state.ended.type) == ("run_stopped" if state.starts else None)


@pytest.mark.more
@pytest.mark.ray
@pytest.mark.parametrize(
    ("numbers", "code", "sign", "after_s", "says"),
    [
        # On a busy machine, the run may have begun by then.
        ([signal.SIGINT], 130, "ray-*/r/session_*", 1.0, ["can be run again", "ensemble resume"]),
        ([signal.SIGTERM] * 2, 143, "ray-*/r/session_*", 0.5, [""]),  # the second does not wait for Ray
    ],
    ids=["later", "twice"],
)
def test_signals_while_ray_starts_leave_nothing_of_it(
    numbers: list[signal.Signals], code: int, sign: str, after_s: float, says: list[str], tmp: Path, tmp_path: Path
) -> None:
    command = Command(tmp, tmp_path, "ray")
    command.wait_for(command.below(sign))
    for number in numbers:
        time.sleep(after_s)
        command.process.send_signal(number)
    ends(command, code, *says)


@pytest.mark.parametrize("executor", ["inline", pytest.param("local", marks=pytest.mark.more)])
def test_a_second_signal_ends_members_at_once_and_leaves_nothing(executor: str, tmp: Path, tmp_path: Path) -> None:
    command = Command(tmp, tmp_path, executor, step_s=3600.0)  # no member comes to write a checkpoint
    command.wait_for(command.below("stepping"))
    command.process.send_signal(signal.SIGINT)
    asked, requests = command.logged("request"), command.run_dir / "requests"
    command.wait_for(lambda: any(requests.glob("stop-*")) or asked())  # two at once would be taken for one
    command.process.send_signal(signal.SIGINT)
    ends(command, 130, "ended at once; `ensemble resume")
    state = fold(read_events(command.run_dir / "events.jsonl"))
    assert state.ended is not None and state.ended.type == "run_stopped"
    assert {member.state for member in state.members.values()} <= {"stopped", "waiting"}


def test_a_deferred_signal_ends_what_its_own_thread_waits_for_and_nothing_of_another() -> None:
    with defer_signals() as received, ThreadPoolExecutor(1) as other:
        signal.raise_signal(signal.SIGINT)
        other.submit(raise_if_deferred).result()
        with pytest.raises(Interrupted):
            raise_if_deferred()
    raise_if_deferred()
    assert received == [signal.SIGINT]


PROGRAM = """
import sys, time
import ensemble
from ensemble.spec.spec_file import load_spec

if __name__ == "__main__":
    run = ensemble.submit(load_spec(sys.argv[1]), sys.argv[2], "local")
    time.sleep(3600)
"""


@pytest.mark.more
def test_a_second_signal_to_a_program_that_ends_before_its_run_prints_no_traceback(
    tmp: Path, tmp_path: Path
) -> None:
    """The run is stopped by a function that is registered with atexit."""
    command = Command(tmp, tmp_path, "local", step_s=3600.0, program=PROGRAM)
    command.wait_for(command.below("stepping"))
    command.process.send_signal(signal.SIGTERM)
    assert command.process.stderr is not None
    lines = iter(command.process.stderr.readline, "")
    assert "the program ends before its run" in next(line for line in lines if "there is no valid=" not in line)
    command.process.send_signal(signal.SIGTERM)
    assert command.process.communicate(timeout=600)[1] == "" and command.process.returncode == 143
    command.wait_until_gone()
    state = fold(read_events(command.run_dir / "events.jsonl"))
    assert (state.ended and state.ended.type) == "run_stopped"


STARTS = """
import importlib.abc, os, pathlib, signal, sys, time

def wait(name):
    sign = pathlib.Path(os.environ["TMPDIR"], name)
    sign.touch()
    while sign.exists():
        time.sleep(0.01)

if os.environ["WHERE"] == "import":
    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "ensemble.cli.run_commands":
                wait("waits")
    sys.meta_path.insert(0, Finder())
"""
SPEC_THAT_WAITS = """
import os
from sitecustomize import wait

class Lost:
    def __del__(self):
        wait("waits")

if os.environ["WHERE"] == "destructor":
    Lost()  # what a signal raises here is printed and forgotten
elif os.environ["WHERE"] == "caught":
    try:
        wait("waits")
    except BaseException as error:
        raise ImportError("something else") from error
else:
    wait("waits")
"""


@pytest.mark.parametrize(
    ("where", "number", "code", "says"),
    [
        ("import", signal.SIGINT, 130, "ensemble: interrupted"),
        ("spec", signal.SIGTERM, 143, "ensemble: terminated"),
        pytest.param("destructor", signal.SIGINT, 130, "ensemble: interrupted", marks=pytest.mark.more),
        pytest.param("caught", signal.SIGTERM, 143, "ensemble: terminated", marks=pytest.mark.more),
    ],
)
def test_a_signal_while_something_is_imported_is_answered_in_one_line(
    where: str, number: signal.Signals, code: int, says: str, tmp: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STARTS)
    command = Command(tmp, tmp_path, "inline", WHERE=where)
    command.wait_for(command.below("waits"))
    command.process.send_signal(number)
    said = command.process.communicate(timeout=600)[1]
    assert command.process.returncode == code, said
    lines = [line for line in said.splitlines() if line.startswith("ensemble")]
    assert lines == [says] and ("Traceback" in said) == (where == "destructor"), said
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_starting_can_be_asked_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow.py").write_text(SPEC)
    monkeypatch.setenv("STEP_S", "0")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run_dir, opened = tmp_path / "run", InlineExecutor.open

    def open_late(self: Any, *given: Any) -> Any:
        assert main(["stop", str(run_dir)]) == 0  # from another shell, while nodes are looked for
        return opened(self, *given)

    monkeypatch.setattr(InlineExecutor, "open", open_late)
    for _ in ("a new run", "one that goes on"):
        ensemble.submit(load_spec(tmp_path / "slow.py"), run_dir, "inline").wait()
        said = capsys.readouterr().out
        assert "asked the run, which is starting, to stop as soon as it has started" in said and "None" not in said
        state = read_state(run_dir)
        assert state.ended is not None and state.ended.type == "run_stopped"
        assert {member.state for member in state.members.values()} <= {"waiting", "stopped"}
