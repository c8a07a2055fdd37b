"""Whole runs, the same on every executor; processes are real, and so is what kills them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from event_dicts import fold, read_events
from execute_members import an_ensemble, loss, model, samples
from finished_runs import finished_hashes, hashes
from leftovers import wait_until

import ensemble
from ensemble import Member, Recipe, Resources, Search, SpecError, uniform
from ensemble.controller.controller import Controller
from ensemble.store import StoreError

HERE = Path(__file__).parent


def by_state(result: ensemble.Result) -> dict[str, str]:
    return {row["member"]: row["state"] for row in result.members}


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Our processes that work for this run: those with its directory in their environment, and their children."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get("RUN_UNDER_TEST") == str(run_dir)
            if marked and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def check_nothing_is_left(run_dir: Path) -> None:
    wait_until(lambda: not processes_of(run_dir), "what was started for the run has ended")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUN_UNDER_TEST", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The weights of four undisturbed members that each worked alone."""
    path = tmp_path_factory.mktemp("reference") / "run"
    members = [{"lr": lr} for lr in (0.1, 0.2, 0.3, 0.4)]
    ensemble.submit(an_ensemble(members, epochs=4), path, executor="inline").wait()
    return hashes(path)


def test_a_run_trains_combines_and_reports_and_a_member_that_diverges_is_the_only_one_that_fails(
    run_dir: Path, reference: dict[str, str | None]
) -> None:
    seen: list[str] = []
    declared = an_ensemble([{"lr": 0.1}, {"lr": 0.3, "fault": "nan"}, {"lr": 0.3}], epochs=4, retries=1)
    run = ensemble.submit(declared, run_dir, "inline", on_event=lambda event: seen.append(event["type"]))
    result = run.wait()
    assert by_state(result) == {"member-0": "finished", "member-1": "failed", "member-2": "finished"}
    assert [row["attempts"] for row in result.members] == [1, 1, 1], "the same batches give the same loss"
    metrics = [row["metric"] for row in result.members if row["state"] == "finished"]
    assert result.best is not None and result.best["metric"] == max(metrics)
    assert result.combined is not None and result.combined["metrics"]["ensemble"]["accuracy"] > 0.6
    assert result.ledger is not None and result.stopped is None
    assert (run_dir / "report.html").stat().st_size > 10_000
    assert "finished" in run.logs("member-0")
    assert seen[0] == "run_started" and seen[-1] == "run_finished"
    assert run.status() == result.members
    assert (hashes(run_dir)["member-0"], hashes(run_dir)["member-2"]) == (
        reference["member-0"],
        reference["member-2"],
    )
    with pytest.raises(SpecError, match="member-1"):
        run.logs("member-7")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Members of which all but the first fail, each in its way, as processes of a program that ignores SIGCHLD."""
    folder = tmp_path_factory.mktemp("failed")
    members: list[Any] = [
        {"lr": 0.1},
        {"lr": 0.2, "fault": "kill", "after": 5, "marker": str(folder / "marker")},
        {"lr": 0.3, "fault": "nan"},
        Member({"lr": 0.1, "fault": "kill", "after": 4, "marker": str(folder / "marker of a rank")}, workers=2),
        {"lr": 0.4, "fault": "exit", "after": 2},
        Member({"lr": 0.2, "hold_mb": 700}, memory_gb=0.25),
    ]
    narrow = Resources(cpus_per_worker=0.2, gpus_per_worker=0.0, memory_gb=0.5)
    usual = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUN_UNDER_TEST", str(folder / "run"))
        try:
            made = an_ensemble(members, epochs=4, retries=1, resources=narrow)
            ensemble.submit(made, folder / "run", "local").wait()
        finally:
            signal.signal(signal.SIGCHLD, usual)
    return folder / "run"


@pytest.mark.more  # others, of fewer members: tests/faults/test_faults_members.py
def test_one_failure_stays_one_failure(failed: Path, reference: dict[str, str | None]) -> None:
    members = fold(read_events(failed / "events.jsonl")).members
    ends = {name: (each.state, each.reason, each.attempts) for name, each in members.items()}
    assert ends == {
        "member-0": ("finished", None, 1),
        "member-1": ("finished", "lost", 2),
        "member-2": ("failed", "nan", 1),
        "member-3": ("finished", "lost", 2),  # one of two ranks dies: the other is not left waiting for it
        "member-4": ("failed", "lost", 2),
        "member-5": ("finished", "oom", 3),
    }
    assert not list((failed / "members" / "member-3").glob("rendezvous*"))
    got = hashes(failed)
    assert got["member-0"] == reference["member-0"], "shared or alone, the same weights"
    assert got["member-1"] == reference["member-1"], "killed and resumed, the same weights"
    check_nothing_is_left(failed)


@pytest.mark.more  # a process is killed; tests/train has the property in one process
def test_members_that_are_killed_within_an_epoch_go_on_within_it(tmp_path: Path) -> None:
    """One epoch of 24 steps: a checkpoint is due after each, and one or two steps are done again."""
    members = [
        Member({"lr": 0.1, **fault}, seed=0, workers=workers)
        for workers in (1, 2)
        for fault in ({}, {"fault": "kill", "after": 20, "marker": str(tmp_path / f"of {workers}")})
    ]
    declared = an_ensemble(members, epochs=1, batch_size=4, checkpoint_minutes=1e-9, retries=1)
    ensemble.submit(declared, tmp_path / "run", "local").wait()
    got = hashes(tmp_path / "run")
    assert got["member-0"] == got["member-1"] is not None and got["member-2"] == got["member-3"] is not None
    events = read_events(tmp_path / "run" / "events.jsonl")
    for killed in ("member-1", "member-3"):
        began = [(e["epoch"], e["step"]) for e in events if e["type"] == "started" and e["member"] == killed]
        assert began[0] == (0, 0) and began[1][0] == 0 and 18 <= began[1][1] <= 19, (killed, began)


@pytest.mark.more
def test_how_a_member_ended_is_told_also_to_a_program_that_ignores_the_ends_of_child_processes(
    failed: Path,
) -> None:
    members = fold(read_events(failed / "events.jsonl")).members
    assert "SIGKILL" in (members["member-1"].error or "") and "ended with code 3" in (
        members["member-4"].error or ""
    )


@pytest.mark.more
def test_a_member_that_takes_too_much_memory_is_tried_again_with_more_room(failed: Path) -> None:
    """It holds 450 MB more than it was granted, beside members that do not."""
    increases = fold(read_events(failed / "events.jsonl")).memory_increases
    assert [event.memory_gb for event in increases] == [0.5, 1.0], "counted against none of its retries"


def test_a_stopped_run_goes_on_where_it_was(
    run_dir: Path, reference: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ensemble.controller.controller.TICK_S", 0.0)  # requests are seen at once
    declared = an_ensemble([{"lr": lr} for lr in (0.1, 0.2, 0.3, 0.4)], epochs=4)

    def stop_early(event: dict[str, Any]) -> None:
        if event["type"] == "epoch":
            run.stop()

    run = ensemble.submit(declared, run_dir, "inline", on_event=stop_early)
    with pytest.raises(StoreError, match="another controller"):
        ensemble.resume(run_dir)
    result = run.wait()
    assert result.stopped and list(by_state(result).values()) == ["stopped", "waiting", "waiting", "waiting"]
    with pytest.raises(StoreError, match="member-0 has params"):
        ensemble.submit(an_ensemble([{"lr": 0.7}], epochs=4), run_dir, "inline")
    result = ensemble.resume(run_dir).wait()
    assert set(by_state(result).values()) == {"finished"}
    assert hashes(run_dir) == reference


@pytest.mark.more
@pytest.mark.parametrize(("workers", "at"), [(1, (0, 2)), (2, (1, 0))])
def test_a_member_that_is_evaluated_for_longer_than_a_stop_may_take_is_not_killed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, workers: int, at: tuple[int, int]
) -> None:
    """One of one worker leaves its evaluation; ranks of another end theirs, and show meanwhile that they live."""
    monkeypatch.setitem(Controller.__init__.__kwdefaults__, "stop_timeout_s", 3.0)
    members = [Member({"lr": 0.1, "step_s": 0.7}, workers=workers)]
    declared = an_ensemble(members, train=samples(8, 0), batch_size=4, epochs=1)

    def stop(event: dict[str, Any]) -> None:
        if event["type"] == "progress" and event["step"] == 2 and not stopped:
            stopped.append(event)
            run.stop()

    stopped: list[dict[str, Any]] = []
    run = ensemble.submit(declared, run_dir, "local", on_event=stop)
    assert by_state(run.wait()) == {"member-0": "stopped"}
    events = read_events(run_dir / "events.jsonl")
    assert [(e["epoch"], e["step"]) for e in events if e["type"] == "checkpoint"] == [at]


def test_a_search_prunes_and_goes_on(run_dir: Path) -> None:
    search = Search({"lr": uniform(0.001, 0.5)}, trials=3, sampler="random", pruner="median")
    result = ensemble.submit(an_ensemble(search=search, epochs=2), run_dir, "inline").wait()
    assert len(result.members) == 3
    assert set(by_state(result).values()) <= {"finished", "pruned"}
    state = fold(read_events(run_dir / "events.jsonl"))
    assert all(member.first_epoch is not None for member in state.members.values())


@pytest.mark.more  # of the feeder alone: test_executors_moves.py
def test_losing_the_feeder_and_the_fork_server_changes_nothing(
    run_dir: Path, reference: dict[str, str | None]
) -> None:
    killed: list[str] = []

    def kill_both(event: dict[str, Any]) -> None:
        if event["type"] == "started" and not killed:
            running = [(p, p.cmdline()) for p in processes_of(run_dir)]
            for module in ("pipelines.feeder.process", "ensemble.executors.forkserver"):
                found = [p for p, command in running if module in command]
                min(found, key=lambda p: p.create_time()).kill()  # the server is older than what it forked
                killed.append(module)

    members = [{"lr": 0.1, "spawn": True}, {"lr": 0.2}, {"lr": 0.3}]
    run = ensemble.submit(an_ensemble(members, epochs=4), run_dir, "local", on_event=kill_both)
    result = run.wait()
    assert set(by_state(result).values()) == {"finished"} and len(killed) == 2
    assert {row["attempts"] for row in result.members} == {1}
    got = hashes(run_dir)
    assert all(got[member] == reference[member] for member in got)
    check_nothing_is_left(run_dir)  # what members start ends with them


def test_nothing_of_a_run_listens_for_others(run_dir: Path) -> None:
    """Unix sockets in directories that only their owner may enter; what torch opens for two ranks, on loopback."""
    modes: dict[str, str] = {}  # of the folder of each socket
    listening: set[str] = set()

    def look(event: dict[str, Any]) -> None:
        for process in processes_of(run_dir) if event["type"] in ("started", "epoch") else ():
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                found = process.net_connections("all")
                listening.update(each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN)
                for each in found:
                    if each.family == socket.AF_UNIX and each.laddr:
                        modes[each.laddr] = "not a file"
                        modes[each.laddr] = oct(stat.S_IMODE(os.stat(os.path.dirname(each.laddr)).st_mode))

    members = [{"lr": 0.1}, Member({"lr": 0.2}, workers=2)]
    result = ensemble.submit(an_ensemble(members, epochs=2), run_dir, "local", on_event=look).wait()
    assert set(by_state(result).values()) == {"finished"}
    assert set(modes.values()) == {"0o700"}, modes
    assert listening <= {"127.0.0.1", "::1"}


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(run_dir: Path, tmp_path: Path) -> None:
    hangs = {"lr": 0.1, "fault": "hang", "after": 3, "marker": str(tmp_path / "marker")}
    member = Member(hangs, workers=2, cpus_per_worker=0.5)
    declared = an_ensemble([member], epochs=3, hang_timeout_s=60.0, retries=1, sharing="independent")
    result = ensemble.submit(declared, run_dir, "local").wait()
    assert by_state(result) == {"member-0": "finished"}
    state = fold(read_events(run_dir / "events.jsonl"))
    assert state.members["member-0"].attempts == 2 and state.members["member-0"].reason == "lost"
    assert re.search(r"lost: rank [01] \(pid \d+ on .*\) does not answer", state.members["member-0"].error or "")
    assert not list((run_dir / "members" / "member-0").glob("failure*"))


def test_inline_refuses_several_workers(run_dir: Path) -> None:
    with pytest.raises(SpecError, match=r"asks for 2 workers.*executor='local'"):
        ensemble.submit(an_ensemble(resources=Resources(workers=2)), run_dir, "inline")


def test_what_no_node_can_give_is_refused_at_once(run_dir: Path) -> None:
    with pytest.raises(SpecError, match="the largest that would fit is cpus_per_worker"):
        ensemble.submit(an_ensemble(resources=Resources(cpus_per_worker=4096)), run_dir, "local")


DRIVER = """
import sys
sys.path.insert(0, {here!r})
from execute_members import an_ensemble, loss, model, samples
import ensemble
members = [{{"lr": lr}} for lr in (0.1, 0.2, 0.3, 0.4)]
def say(event):
    if event["type"] in ("started", "epoch"):
        print(event["type"], flush=True)
try:
    ensemble.submit(an_ensemble(members, epochs=4), {run_dir!r}, "local", on_event=say).wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
"""


def start_driver(run_dir: Path) -> subprocess.Popen[str]:
    """A driver in a process of its own, once its first member has started."""
    script = DRIVER.format(here=str(HERE), run_dir=str(run_dir))
    path = os.pathsep.join([str(HERE.parents[1]), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "RUN_UNDER_TEST": str(run_dir)},
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "started"
    return process


def test_a_killed_driver_leaves_no_process_and_its_run_goes_on(
    run_dir: Path, reference: dict[str, str | None]
) -> None:
    driver = start_driver(run_dir)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    check_nothing_is_left(run_dir)
    before = fold(read_events(run_dir / "events.jsonl"))
    result = ensemble.resume(run_dir, executor="inline").wait()
    assert set(by_state(result).values()) == {"finished"}
    assert hashes(run_dir) == reference
    for row in result.members:
        done = before.members[row["member"]]
        assert done.state != "finished" or row["attempts"] == done.attempts, (
            "finished members are not trained again"
        )


@pytest.mark.more
def test_ctrl_c_lets_members_write_a_checkpoint_and_leaves_nothing(
    run_dir: Path, reference: dict[str, str | None]
) -> None:
    driver = start_driver(run_dir)
    driver.send_signal(signal.SIGINT)
    said, _ = driver.communicate()
    assert said.splitlines()[-1] == "interrupted" and driver.returncode == 130
    check_nothing_is_left(run_dir)
    state = fold(read_events(run_dir / "events.jsonl"))
    assert state.ended is not None and state.ended.type == "run_stopped"
    assert {member.state for member in state.members.values()} <= {"stopped", "finished", "waiting"}
    ensemble.resume(run_dir).wait()
    assert hashes(run_dir) == reference


#: What launchers of jobs set, which a member is not part of.
LAUNCHED = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"} | {
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "OMPI_COMM_WORLD_RANK": "3", "PMI_RANK": "3"
}  # fmt: skip


def model_that_notes_its_environment(params: dict[str, Any]) -> Any:
    Path(params["note"]).write_text(
        json.dumps({name: os.environ.get(name) for name in (*LAUNCHED, "SLURM_JOB_ID")})
    )
    return model(params)


@pytest.mark.parametrize("executor", ["inline", pytest.param("local", marks=pytest.mark.more)])
def test_a_member_is_no_rank_of_the_job_in_which_the_run_was_started(
    executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**LAUNCHED, "SLURM_JOB_ID": "77"}.items():
        monkeypatch.setenv(name, value)
    note = tmp_path / "note"
    recipe = Recipe(model=model_that_notes_its_environment, loss=loss)
    declared = an_ensemble([{"lr": 0.1, "note": str(note)}], epochs=1, recipe=recipe)
    assert by_state(ensemble.submit(declared, tmp_path / "run", executor).wait()) == {"member-0": "finished"}
    own = {"RANK": "0", "WORLD_SIZE": "1", "SLURM_JOB_ID": "77"}
    assert json.loads(note.read_text()) == {**dict.fromkeys(LAUNCHED), **own}
    assert {name: os.environ.get(name) for name in LAUNCHED} == LAUNCHED


def as_default_dtype(values: Any) -> Any:
    import torch

    return torch.tensor(values.tolist()).numpy()


@pytest.mark.more
def test_members_in_processes_have_the_global_settings_with_which_they_were_declared(tmp_path: Path) -> None:
    import torch

    torch.set_default_dtype(torch.float64)  # as a spec does when it is imported, which no member does
    try:
        declared = an_ensemble(train=samples(96, 0).map(as_default_dtype, field="x", version=1), epochs=1)
        declared = dataclasses.replace(declared, valid=samples(48, 1).map(as_default_dtype, field="x", version=1))
        for executor in ("inline", "local"):
            ensemble.submit(declared, tmp_path / executor, executor).wait()
    finally:
        torch.set_default_dtype(torch.float32)
    assert finished_hashes(tmp_path / "local") == finished_hashes(tmp_path / "inline")
