"""What one member does to the others of its cohort, on real feeders: it hangs, fails early, is far ahead."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from execute_members import an_ensemble

import ensemble
from ensemble import Member, Resources
from ensemble.store import fold, read_events

NARROW = Resources(cpus_per_worker=0.1)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir / "events.jsonl") if event["type"] == kind]


def test_a_hang_is_the_end_of_the_guilty_attempt_only(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    hung = {"lr": 0.1, "fault": "hang", "after": 8, "marker": str(tmp_path / "marker")}
    members: list[Any] = [{"lr": 0.1}, hung, {"lr": 0.2}]
    declared = an_ensemble(members, epochs=60, capacity=64, hang_timeout_s=4.0, resources=NARROW)
    result = ensemble.submit(declared, run_dir, "local").wait()
    assert [row["state"] for row in result.members] == ["finished"] * 3
    assert [row["attempts"] for row in result.members] == [1, 2, 1]
    (failure,) = events(run_dir, "failed")
    assert failure["member"] == "member-1" and failure["reason"] == "hang"


def test_a_member_that_keeps_others_waiting_goes_on_alone_and_learns_the_same(tmp_path: Path) -> None:
    members: list[Any] = [{"lr": 0.1}, {"lr": 0.2, "step_s": 0.15}]
    alone = an_ensemble(members, epochs=5)
    ensemble.submit(alone, tmp_path / "alone", "inline").wait()
    declared = an_ensemble(members, epochs=5, capacity=64, stall_policy="detach", resources=NARROW)
    ensemble.submit(declared, tmp_path / "run", "local").wait()
    done = {event["member"]: event for event in events(tmp_path / "run", "finished")}
    for event in events(tmp_path / "alone", "finished"):
        assert done[event["member"]]["weights_sha256"] == event["weights_sha256"]
    last = events(tmp_path / "run", "feeder")[-1]
    assert last["detached"] > 0 and last["ring_bytes"] > 64 * 24
    assert set(last["fullness"]) == {"ring", "workers", "waiting"}
    private = [e["private_batches"] for e in events(tmp_path / "run", "epoch") if e["member"] == "member-1"]
    assert sum(private) > 0
    assert done["member-1"]["t"] - done["member-0"]["t"] > 0.5, "the quick one has not waited for the slow one"


def test_members_that_fail_before_they_come_are_not_waited_for(tmp_path: Path) -> None:
    members: list[Any] = [{"lr": 0.1}, {"lr": 0.1, "fault": "build"}, {"lr": 0.2}]
    declared = an_ensemble(members, epochs=2, retries=0, gate_timeout_s=60.0, resources=NARROW)
    began = time.monotonic()
    result = ensemble.submit(declared, tmp_path / "run", "local").wait()
    assert [row["state"] for row in result.members] == ["finished", "failed", "finished"]
    assert time.monotonic() - began < 30
    epochs = events(tmp_path / "run", "epoch")
    assert all(event["private_batches"] == 0 for event in epochs), "the two that came share"


def test_wide_members_get_over_the_loss_of_their_feeder_together(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    killed: list[float] = []

    def kill_feeder(event: dict[str, Any]) -> None:
        if event["type"] == "epoch" and not killed:
            for process in psutil.process_iter(["cmdline", "environ"]):
                words = process.info["cmdline"] or []
                mine = (process.info["environ"] or {}).get("RUN_UNDER_TEST") == str(run_dir)
                if mine and "pipelines.feed" in words:
                    os.kill(process.pid, signal.SIGKILL)
                    killed.append(time.monotonic())

    os.environ["RUN_UNDER_TEST"] = str(run_dir)
    try:
        members = [Member({"lr": 0.1, "step_s": 0.002}, workers=width) for width in (2, 2, 1)]
        declared = an_ensemble(members, epochs=40, gate_timeout_s=60.0, resources=NARROW)
        result = ensemble.submit(declared, run_dir, "local", on_event=kill_feeder).wait()
    finally:
        del os.environ["RUN_UNDER_TEST"]
    assert killed and [row["state"] for row in result.members] == ["finished"] * 3
    assert {row["attempts"] for row in result.members} == {1}
    waited = [
        sum(e["waited_s"] for e in events(run_dir, "epoch") if e["member"] == f"member-{i}") for i in range(3)
    ]
    assert max(waited) < 20, "nobody waits for the gate's whole time"


def test_a_member_far_ahead_of_the_others_goes_on_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has trained eight epochs when the run stops; on the resume the other begins."""
    monkeypatch.setattr("ensemble.controller.TICK_S", 0.0)
    run_dir = tmp_path / "run"
    slow = {"lr": 0.2, "step_s": 0.15}

    def stop_late(event: dict[str, Any]) -> None:
        if event["type"] == "epoch" and event["member"] == "member-0" and event["epoch"] == 7:
            run.stop()

    members: list[Any] = [{"lr": 0.1}, slow]
    alone = an_ensemble(members, epochs=9, sharing="independent", resources=NARROW)
    run = ensemble.submit(alone, run_dir, "local", on_event=stop_late)
    assert run.wait().stopped
    before = fold(read_events(run_dir / "events.jsonl")).members
    assert before["member-0"].epoch > before["member-1"].epoch + 4

    shared = an_ensemble(members, epochs=9, hang_timeout_s=5.0, resources=NARROW)
    began = time.monotonic()
    finished: dict[str, float] = {}

    def note(event: dict[str, Any]) -> None:
        if event["type"] == "finished":
            finished[event["member"]] = time.monotonic() - began

    result = ensemble.submit(shared, run_dir, "local", on_event=note).wait()
    assert [row["state"] for row in result.members] == ["finished"] * 2
    assert finished["member-0"] < finished["member-1"] / 2, "it has not waited for the one that is far behind"


def test_a_stop_reaches_members_that_wait_at_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ensemble.controller.TICK_S", 0.0)
    monkeypatch.setattr("ensemble.attempts.LINGER_S", 6.0)  # later than the others are given to stop
    late = {"lr": 0.1, "fault": "hang", "after": 1, "marker": str(tmp_path / "none")}
    declared = an_ensemble([{"lr": 0.1}, {"lr": 0.2}, late], epochs=200, capacity=64, resources=NARROW)
    run = ensemble.submit(declared, tmp_path / "run", "local")
    until = time.monotonic() + 30
    while not (tmp_path / "none").exists() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(1.0)  # the others have read what the ring holds, and wait
    run.cancel("member-2")
    run.stop()
    asked = time.monotonic()
    result = run.wait()
    states = [row["state"] for row in result.members]
    assert states[:2] == ["stopped", "stopped"] and states[2] == "cancelled"
    assert time.monotonic() - asked < 25, "the one that hangs is killed after a while, the others stop at once"
    stopped = [event["t"] for event in events(tmp_path / "run", "stopped")]
    asked_at = time.time() - (time.monotonic() - asked)
    assert max(stopped) - asked_at < 5
