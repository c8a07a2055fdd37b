"""Runs on Ray: real actors, real kills."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from driver_child import RATES
from kit.event_dicts import read_events
from kit.execute_members import an_ensemble
from kit.finished_runs import hashes, of_kind
from kit.leftovers import find_processes_below, named_memory, new_named_memory

import ensemble
from ensemble import Resources

pytestmark = pytest.mark.ray

HERE = Path(__file__).parent
STRANGER = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False)"
RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
PYTHONPATH = os.pathsep.join([str(HERE.parents[2]), str(HERE.parents[1] / "support"), str(HERE.parent)])


def states(result: ensemble.Result) -> list[str]:
    return [row["state"] for row in result.members]


def test_a_run_on_ray_shares_as_on_one_node_is_accounted_and_leaves_nothing(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, str | None]
) -> None:
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr("tempfile.tempdir", None)
    shared_memory = named_memory()
    listening: set[tuple[str, str]] = set()
    modes, tokens, commands = set[int](), set[str](), list[str]()
    answers = list[subprocess.CompletedProcess[str]]()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")

    def look(event: dict[str, Any]) -> None:
        if event["type"] == "started":
            for path in short.iterdir():
                with contextlib.suppress(FileNotFoundError):  # `tempfile` tries where it can write
                    found = path.stat().st_mode
                    modes.update([stat.S_IMODE(found)] if stat.S_ISDIR(found) else [])
            tokens.add(os.environ["RAY_AUTH_TOKEN"])
            if not answers:  # of its Ray to another user of this machine
                import ray

                call = [sys.executable, "-c", STRANGER, ray.get_runtime_context().gcs_address]
                other = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
                other["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray asks the host's own address
                answers.append(subprocess.run(call, env=other, capture_output=True, text=True))
            for process in find_processes_below(short):
                try:
                    commands.append(" ".join(process.cmdline()))
                    connections = process.net_connections("tcp")
                except psutil.Error:
                    continue
                listening.update((c.laddr.ip, process.name()) for c in connections if c.status == "LISTEN")

    members = [{"lr": lr} for lr in RATES[:2]]
    declared = an_ensemble(members, epochs=4, resources=Resources(cpus_per_worker=0.2))
    run_dir = tmp_path / "run"
    result = ensemble.submit(declared, run_dir, executor="ray", on_event=look).wait()

    assert [(row["state"], row["attempts"]) for row in result.members] == [("finished", 1)] * 2
    assert hashes(run_dir).items() < reference.items(), "on Ray and shared, or inline and alone: the same weights"
    assert all(event["private_batches"] == 0 for event in of_kind(run_dir, "epoch"))
    [node] = {event["node"] for event in of_kind(run_dir, "placed")}
    used = {(event["role"], event["member"]) for event in of_kind(run_dir, "usage") if event["node"] == node}
    assert {("train", "member-0"), ("train", "member-1"), ("ray", None)} <= used
    roles = {row["role"] for row in (result.ledger or {})["rows"]}
    assert {"startup", "train", "prepare", "feed", "orchestrate", "ray"} <= roles
    events = read_events(run_dir / "events.jsonl")
    over = max(n for n, event in enumerate(events) if event["type"] == "finished")
    last = [event for event in events[over + 1 :] if event["type"] == "usage"]
    of_agents = {event["role"] for event in last if event["pid"] != os.getpid()}
    assert {"orchestrate", "ray"} <= of_agents, "what they used up to their end is in the log before its end"
    assert any(event["pid"] == os.getpid() for event in last) and events[-1]["type"] == "run_finished"
    loopback = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert listening and {ip for ip, _ in listening} <= loopback, listening
    assert find_processes_below(short) == []
    assert new_named_memory(shared_memory) == set()
    assert modes == {0o700}, "Ray lets everybody write in its own directory, nobody gets there"
    assert answers[0].returncode == 1 and "AuthenticationError" in answers[0].stderr, answers
    [token] = tokens
    assert len(token) == 64 and not any(token in command for command in commands)
    assert not (tmp_path / ".ray").exists(), "Ray would keep a token there that everybody may read"
    assert os.environ["RAY_AUTH_TOKEN"] == "of another cluster"


GIVES_UP_ONCE = """
import os, sys
import ray
from ensemble.executors.ray.session import RayConnection

started, usual = [], ray.init

def init(**options):
    context = usual(**options)
    started.append(ray.get_runtime_context().gcs_address)
    if len(started) == 1:  # a raylet has 30 seconds, which cannot be set
        raise Exception("The current node timed out during startup. This could happen because ...")
    return context

ray.init = init
session = RayConnection()
print(len(set(started)), len(session.nodes()), len(os.listdir(os.environ["TMPDIR"])))
session.close()
"""


@pytest.mark.more
def test_a_ray_that_gives_up_on_a_busy_machine_is_started_again(short: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(short)}
    command = [sys.executable, "-c", GIVES_UP_ONCE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "1", "1"], "two starts, one node, and the first one's directory is gone"
    assert find_processes_below(short) == []
