"""What holds of a run on every executor; processes are real, and so is what kills them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.event_dicts import fold, read_events
from kit.execute_members import an_ensemble
from kit.finished_runs import finished_hashes, hashes, of_kind
from kit.leftovers import find_processes_below, named_memory, new_named_memory, wait_until

import ensemble
from ensemble import Member, Resources

HERE = Path(__file__).parent
NARROW = Resources(cpus_per_worker=0.2, gpus_per_worker=0.0, memory_gb=0.5)
RAY = pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.more])


@pytest.fixture
def folder(short: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where all temporary files of a run lie, by which its processes are found."""
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr("tempfile.tempdir", None)
    return short


class Sockets:
    """Who listens for what while a run goes on: addresses, and the modes of the folders of Unix sockets."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.addresses, self.modes = folder, set[str](), dict[str, str]()
        self._before = {c.laddr for c in psutil.Process().net_connections("all")}  # nothing of this run

    def look(self, event: dict[str, Any]) -> None:
        if event["type"] not in ("started", "epoch"):
            return
        own = [c for c in psutil.Process().net_connections("all") if c.laddr not in self._before]
        for process in (None, *find_processes_below(self.folder)):
            with contextlib.suppress(psutil.NoSuchProcess):
                connections = [c for c in (process.net_connections("all") if process else own) if c.laddr]
                self.addresses.update(c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN)
                for name in (c.laddr for c in connections if c.family == socket.AF_UNIX):
                    with contextlib.suppress(FileNotFoundError):  # it was removed after it was seen
                        mode = os.stat(os.path.dirname(name)).st_mode if name.startswith("/") else None
                        self.modes[name] = "not a file" if mode is None else oct(stat.S_IMODE(mode))


# On Ray in the first tier, with what Ray itself leaves: tests/executors/ray/test_ray_runs.py.
@pytest.mark.parametrize("executor", ["inline", "local"])
def test_members_learn_the_same_bits_nothing_listens_for_others_and_nothing_is_left(
    executor: str, folder: Path, tmp_path: Path, reference: dict[str, str | None]
) -> None:
    memory, sockets = named_memory(), Sockets(folder)
    members: list[Any] = [{"lr": 0.1}, {"lr": 0.2}]
    if executor == "local":
        members.append(Member({"lr": 0.3}, workers=2))  # torch opens sockets for its ranks
    declared = an_ensemble(members, epochs=4, resources=NARROW)
    result = ensemble.submit(declared, tmp_path / "run", executor, on_event=sockets.look).wait()
    assert [(row["state"], row["attempts"]) for row in result.members] == [("finished", 1)] * len(members)
    got = hashes(tmp_path / "run")
    assert [got[f"member-{n}"] for n in (0, 1)] == [reference[f"member-{n}"] for n in (0, 1)]
    if executor == "local":
        assert all(event["private_batches"] == 0 for event in of_kind(tmp_path / "run", "epoch"))
        assert sockets.modes and set(sockets.modes.values()) == {"0o700"}, sockets.modes
        assert sockets.addresses <= {"127.0.0.1", "::1"}
    wait_until(lambda: not find_processes_below(folder), "nothing is left")
    assert list(folder.iterdir()) == []
    assert new_named_memory(memory) == set()


DRIVER = """
import sys
from kit.execute_members import an_ensemble
import ensemble

def say(event):
    if event["type"] == "started":
        print("started", flush=True)

try:
    members = [{"lr": lr} for lr in (0.1, 0.2, 0.3, 0.4)]
    needs = ensemble.Resources(cpus_per_worker=0.2, gpus_per_worker=0.0, memory_gb=0.5)
    ensemble.submit(an_ensemble(members, epochs=4, resources=needs), *sys.argv[1:], on_event=say).wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
"""


def start_driver(run_dir: Path, executor: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(HERE.parents[1]), *sys.path])
    command = [sys.executable, "-c", DRIVER, str(run_dir), executor]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "started"
    return process


@pytest.mark.parametrize("executor", ["local", RAY])
def test_a_killed_driver_leaves_no_process_and_its_run_goes_on(
    executor: str, folder: Path, tmp_path: Path, reference: dict[str, str | None]
) -> None:
    driver = start_driver(tmp_path / "run", executor)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    # Ray's agents try for a minute to tell of the raylet's end, and so may a worker that was in a call to it.
    wait_until(lambda: not find_processes_below(folder, rays_agents=False), "nothing is left")
    before = fold(read_events(tmp_path / "run" / "events.jsonl"))
    result = ensemble.resume(tmp_path / "run", executor="inline" if executor == "local" else None).wait()
    assert finished_hashes(tmp_path / "run") == reference
    for row in result.members:
        known = before.members[row["member"]]
        assert known.state != "finished" or row["attempts"] == known.attempts, "it is not trained again"
    wait_until(lambda: not find_processes_below(folder), "nothing is left")


@pytest.mark.more
@pytest.mark.parametrize("executor", ["local", RAY])
def test_ctrl_c_lets_members_write_a_checkpoint_and_leaves_nothing(
    executor: str, folder: Path, tmp_path: Path, reference: dict[str, str | None]
) -> None:
    driver = start_driver(tmp_path / "run", executor)
    driver.send_signal(signal.SIGINT)
    said, _ = driver.communicate()
    assert said.splitlines()[-1] == "interrupted" and driver.returncode == 130
    wait_until(lambda: not find_processes_below(folder), "nothing is left")
    state = fold(read_events(tmp_path / "run" / "events.jsonl"))
    assert state.ended is not None and state.ended.type == "run_stopped"
    assert {member.state for member in state.members.values()} <= {"stopped", "finished", "waiting"}
    ensemble.resume(tmp_path / "run").wait()
    assert finished_hashes(tmp_path / "run") == reference


@pytest.mark.more  # of fewer members, in the first tier: tests/faults/test_faults_members.py
@pytest.mark.parametrize("executor", ["local", RAY])
def test_one_failure_stays_one_failure_and_says_how_its_member_ended(
    executor: str, tmp_path: Path, request: pytest.FixtureRequest, reference: dict[str, str | None]
) -> None:
    """Also to a program that ignores the ends of its child processes."""
    if executor == "ray":
        request.getfixturevalue("one_ray")
    members: list[Any] = [
        {"lr": 0.1},
        {"lr": 0.2, "fault": "kill", "after": 5, "marker": str(tmp_path / "marker")},
        {"lr": 0.3, "fault": "nan"},
        Member({"lr": 0.1, "fault": "kill", "after": 4, "marker": str(tmp_path / "marker of a rank")}, workers=2),
        {"lr": 0.4, "fault": "exit", "after": 2},
        Member({"lr": 0.2, "hold_mb": 700}, memory_gb=0.25),
    ]
    usual = signal.signal(signal.SIGCHLD, signal.SIG_IGN) if executor == "local" else None
    try:
        declared = an_ensemble(members, epochs=4, retries=1, resources=NARROW)
        ensemble.submit(declared, tmp_path / "run", executor).wait()
    finally:
        if usual is not None:
            signal.signal(signal.SIGCHLD, usual)
    state = fold(read_events(tmp_path / "run" / "events.jsonl"))
    ends = [(member.state, member.reason, member.attempts) for member in state.members.values()]
    again = ("finished", "lost", 2)  # also where one of two ranks dies: the other is not left waiting for it
    others = [("finished", None, 1), ("failed", "nan", 1), ("failed", "lost", 2), ("finished", "oom", 3)]
    assert ends == [others[0], again, others[1], again, *others[2:]]
    errors = [state.members[f"member-{n}"].error or "" for n in (1, 4)]
    assert "SIGKILL" in errors[0] and "ended with code 3" in errors[1]
    increases = [event.memory_gb for event in state.memory_increases]
    assert increases == [0.5, 1.0], "counted against none of its retries"
    assert not list((tmp_path / "run" / "members" / "member-3").glob("rendezvous*"))
    got = hashes(tmp_path / "run")
    assert [got[f"member-{n}"] for n in (0, 1)] == [reference[f"member-{n}"] for n in (0, 1)], "killed and resumed"
