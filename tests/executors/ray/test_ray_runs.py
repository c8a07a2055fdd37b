"""Runs on Ray: real actors, real kills."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from event_dicts import fold, read_events
from execute_members import an_ensemble, loss
from finished_runs import hashes, of_kind
from leftovers import named_memory, new_named_memory, wait_until
from nodes_child import RATES

import ensemble
from ensemble import Member, Recipe, Resources, SpecError
from ensemble.executors.ray import RayExecutor
from ensemble.store import RunDir
from ensemble.train import Job

pytestmark = pytest.mark.ray

HERE = Path(__file__).parent
RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
PYTHONPATH = os.pathsep.join([str(HERE.parents[2]), str(HERE.parent)])


def states(result: ensemble.Result) -> list[str]:
    return [row["state"] for row in result.members]


def processes_of_session(root: Path, *, agents: bool = True) -> list[psutil.Process]:
    """Processes of a run whose temporary files are below `root`: Ray's, members, feeders.

    Args:
        agents: whether Ray's own agents of a node count.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended
            command = process.cmdline()
            words = [*command, *process.environ().values(), *(file.path for file in process.open_files())]
            ended = process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid()
            if any(str(root) in word for word in words) and not ended:
                found += [process] if agents or not any(name in command for name in RAYS_AGENTS) else []
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The weights of four undisturbed members that each worked alone, in this process."""
    path = tmp_path_factory.mktemp("reference") / "run"
    ensemble.submit(an_ensemble([{"lr": lr} for lr in RATES], epochs=4), path, executor="inline").wait()
    return hashes(path)


def test_a_run_on_ray_shares_as_on_one_node_is_accounted_and_leaves_nothing(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, str | None]
) -> None:
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr("tempfile.tempdir", None)
    shared_memory = named_memory()
    listening: set[tuple[str, str]] = set()
    modes, tokens, commands = set[int](), set[str](), list[str]()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")

    def look(event: dict[str, Any]) -> None:
        if event["type"] == "started":
            for path in short.iterdir():
                with contextlib.suppress(FileNotFoundError):  # `tempfile` tries where it can write
                    found = path.stat().st_mode
                    modes.update([stat.S_IMODE(found)] if stat.S_ISDIR(found) else [])
            tokens.add(os.environ["RAY_AUTH_TOKEN"])
            for process in processes_of_session(short):
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
    assert processes_of_session(short) == []
    assert new_named_memory(shared_memory) == set()
    assert modes == {0o700}, "Ray lets everybody write in its own directory, nobody gets there"
    [token] = tokens
    assert len(token) == 64 and not any(token in command for command in commands)
    assert not (tmp_path / ".ray").exists(), "Ray would keep a token there that everybody may read"
    assert os.environ["RAY_AUTH_TOKEN"] == "of another cluster"


# Each of these starts a Ray of its own, or two; those below share one.


@pytest.mark.more
def test_a_killed_driver_leaves_no_process_and_its_run_goes_on(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, str | None]
) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr("tempfile.tempdir", None)
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, str(HERE / "nodes_child.py"), str(run_dir)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert driver.stdout is not None
    assert driver.stdout.readline().strip() == "started"
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    # Ray's agents try for a minute to tell of the raylet's end, and so may a worker that was in a call to it
    wait_until(lambda: not processes_of_session(short, agents=False), "nothing is left")
    result = ensemble.resume(run_dir).wait()
    assert processes_of_session(short) == []
    assert set(states(result)) == {"finished"}
    assert hashes(run_dir) == reference


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
    assert processes_of_session(short) == []


@pytest.mark.slow
def test_a_node_agent_that_breaks_or_is_killed_is_replaced_and_its_members_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, str | None]
) -> None:
    breaks, both = tmp_path / "breaks", tmp_path / "both were replaced"
    monkeypatch.setenv("BREAKS_AGENTS", str(breaks))
    import agent_members

    harmed: list[int] = []  # agents replaced before, each time

    def harm(event: dict[str, Any]) -> None:
        replaced = len(of_kind(tmp_path / "run", "agent_replaced"))
        if event["type"] == "started" and not harmed:
            breaks.touch()
            harmed.append(0)
        elif event["type"] == "power" and replaced == 1 and harmed == [0]:
            harmed.append(1)
            kill_agents()
        elif event["type"] == "power" and replaced == 2:
            both.touch()

    members: list[Any] = [{"lr": lr, "fault": "wait", "after": 4, "marker": str(both)} for lr in RATES[:2]]
    recipe = Recipe(model=agent_members.Model(), loss=loss)
    declared = an_ensemble(members, recipe=recipe, epochs=4, resources=Resources(cpus_per_worker=0.2), retries=0)
    result = ensemble.submit(declared, tmp_path / "run", executor="ray", on_event=harm).wait()
    assert states(result) == ["finished"] * 2
    got = hashes(tmp_path / "run")
    assert {member: got[member] for member in got} == {member: reference[member] for member in got}
    broke, was_killed = of_kind(tmp_path / "run", "agent_replaced")
    assert "no power to be had" in broke["detail"] and "no power" not in was_killed["detail"]


def kill_agents() -> None:
    """End the node agents of this process's Ray."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if "ray::NodeAgent" in " ".join(process.cmdline()):
                process.kill()


@pytest.mark.more
def test_failures_stay_with_their_member(one_ray: None, tmp_path: Path, reference: dict[str, str | None]) -> None:
    killed = {"fault": "kill", "after": 5, "marker": str(tmp_path / "marker")}
    rank = {"fault": "kill", "after": 4, "marker": str(tmp_path / "marker of a rank")}
    members: list[Any] = [
        {"lr": 0.1},
        {"lr": 0.2, **killed},
        {"lr": 0.3, "fault": "nan"},
        Member({"lr": 0.1, **rank}, workers=2),
    ]
    declared = an_ensemble(members, epochs=4, retries=1, resources=Resources(cpus_per_worker=0.2))
    run_dir = tmp_path / "run"
    result = ensemble.submit(declared, run_dir, executor="ray").wait()
    assert states(result) == ["finished", "finished", "failed", "finished"]
    assert [row["attempts"] for row in result.members] == [1, 2, 1, 2]
    assert fold(read_events(run_dir / "events.jsonl")).members["member-1"].reason == "lost"
    got = hashes(run_dir)
    assert got["member-0"] == reference["member-0"]
    assert got["member-1"] == reference["member-1"], "killed and resumed, the same weights"


@pytest.mark.more
def test_an_actor_that_was_killed_gets_no_other_rank(one_ray: None, tmp_path: Path) -> None:
    """A rank may have said its last when its member is killed, because another rank failed."""
    declared = an_ensemble([{"lr": 0.1}], epochs=1, resources=Resources(cpus_per_worker=0.2))
    run_dir = RunDir.create(tmp_path / "run", declared)
    executor = RayExecutor()
    try:
        [node] = executor.open(run_dir, declared, lambda events: None)

        def launch(attempt: int) -> None:
            job = Job(
                run_dir=str(run_dir.path),
                identity=declared.identify(0),
                attempt=attempt,
                rank=0,
                rendezvous=None,
                interface=None,
                device="cpu",
                feeder=None,
                node=node.name,
            )
            executor.launch([job], [None])

        def until(kind: str) -> dict[str, Any]:
            while True:
                for event in executor.events(1.0):
                    if event["type"] == kind:
                        return event

        launch(0)
        worker = psutil.Process(until("started")["pid"])
        psutil.wait_procs([worker])  # its end is told, and nobody has read it yet
        executor.kill("member-0")
        assert until("exited")["attempt"] == 0
        launch(1)
        assert until("exited")["outcome"] == "finished"
    finally:
        executor.close()


@pytest.mark.more
def test_what_no_node_can_give_is_refused(one_ray: None, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="largest that would fit"):
        ensemble.submit(an_ensemble(resources=Resources(cpus_per_worker=4096)), tmp_path / "run", "ray")
