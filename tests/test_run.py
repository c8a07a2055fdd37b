"""Handles on a run with real members: what one asks, another sees; weights are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kit.execute_members import an_ensemble
from kit.finished_runs import of_kind, once, read_state
from kit.leftovers import wait_until

import ensemble
from ensemble import SpecError
from ensemble.driven_run import DrivenRun
from ensemble.store import EventLog, RunDir, StoreError, receive_requests


def test_a_paused_run_waits_until_another_shell_lets_it_go_on_and_its_weights_stay_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ensemble.controller.controller.TICK_S", 0.02)
    path = tmp_path / "run"
    members = [{"lr": 0.1}, {"lr": 0.2}]

    def another_shell() -> None:
        other = ensemble.attach(path)
        assert isinstance(run, DrivenRun) and not isinstance(other, DrivenRun)
        wait_until(lambda: {row["state"] for row in other.status()} == {"paused"}, "a pause")
        with pytest.raises(StoreError, match="is in progress"):
            ensemble.submit(an_ensemble([{"lr": 0.5}, {"lr": 0.2}], epochs=2), path, executor="inline")
        with pytest.raises(StoreError, match=r"is in progress \(process .*ensemble\.attach"):
            ensemble.resume(path)
        with pytest.raises(SpecError, match="did you mean 'member-1'"):
            other.cancel("member-11")
        other.resume("member-1").wait()
        with pytest.raises(StoreError, match=r"member-1 (is not paused|has ended already)"):
            other.resume("member-1").wait()
        wait_until(lambda: other.status()[1]["state"] == "finished", "the end of the one that was resumed")
        other.stop().wait()

    pause = once("epoch", lambda: run.pause(), "member-0")
    run = ensemble.submit(an_ensemble(members, epochs=2), path, executor="inline", on_event=pause)
    with ThreadPoolExecutor(1) as shell:
        asked = shell.submit(another_shell)
        asked.add_done_callback(lambda done: run.stop() if done.exception() else None)  # else it waits for ever
        assert run.wait().stopped == "asked to"
        asked.result()
    assert [row["state"] for row in run.status()] == ["paused", "finished"]
    ensemble.resume(path).wait()
    assert [row["state"] for row in run.status()] == ["finished", "finished"]
    with pytest.raises(StoreError, match="the run has ended"):
        ensemble.attach(path).pause("member-0").wait()
    assert not any(RunDir(path).requests.iterdir())
    ensemble.submit(an_ensemble(members, epochs=2), tmp_path / "alone", executor="inline").wait()
    alone = read_state(tmp_path / "alone").members
    assert all(read_state(path).members[name].weights_sha256 == alone[name].weights_sha256 for name in alone)


def test_a_request_that_was_received_is_waited_for_and_one_that_was_not_is_withdrawn(tmp_path: Path) -> None:
    """What takes a controller long, such as reading a large checkpoint, is not said to be undone."""
    run_dir = RunDir.create(tmp_path, an_ensemble([{"lr": 0.1}]))
    with EventLog(run_dir.events) as log:
        log.append("run_started", name="executed", pid=os.getpid(), host=socket.gethostname())
        with pytest.raises(StoreError, match="nothing was done"):
            ensemble.attach(tmp_path).pause().wait(timeout_s=0.0)
        assert receive_requests(run_dir, set()) == []
        request = ensemble.attach(tmp_path).pause()
        (received,) = receive_requests(run_dir, set())
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.append(request.wait(timeout_s=0.0)))
        waiting.start()
        waiting.join(timeout=0.5)
        log.append("request", request=received["id"], verb="pause", member=None, done=True, message="pausing")
        waiting.join()
    assert found[0]["message"] == "pausing"


def test_a_result_says_as_text_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = ensemble.submit(an_ensemble([{"lr": 0.1}, {"lr": 0.2}], epochs=1), tmp_path, "inline").wait()
    wide, narrow = result.summary(everything=True, width=1000), result.summary(width=90)
    assert "\x1b" not in wide
    for words in ("member-0", "member-1", "CPU time", str(tmp_path)):
        assert words in wide
    assert "CPU time" not in narrow and max(map(len, narrow.splitlines())) <= 90


def test_files_that_are_no_requests_end_no_run_and_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ensemble.controller.controller.TICK_S", 0.0)
    requests = RunDir(tmp_path).requests
    bad: dict[str, Any] = {
        "pause-list": {"v": 2, "t": 1.0, "verb": "pause", "member": ["x"]},
        "add-strange": {"v": 2, "t": 1.0, "verb": "add", "declared": {"params": {}, "threads": {"a": [1]}}},
        "add-nothing": {"v": 2, "t": 1.0, "verb": "add", "declared": 3},
        "add-weird": {"v": 2, "t": 1.0, "verb": "add", "declared": {"params": [[]], "optimizer": [1]}},
    }

    def write(event: dict[str, Any]) -> None:
        if event["type"] == "started":
            (requests / "stop-folder.json").mkdir()
            (requests / "stop-\udce9.json").write_bytes(b"\xe9")
            for name, request in bad.items():
                (requests / f"{name}.json").write_text(json.dumps(request))

    run = ensemble.submit(an_ensemble([{"lr": 0.1}], epochs=2), tmp_path, executor="inline", on_event=write)
    assert [row["state"] for row in run.wait().members] == ["finished"]
    answers = {event["request"]: event for event in of_kind(tmp_path, "request")}
    assert set(answers) == {*bad, "stop-folder", "stop-\udce9"} and not any(e["done"] for e in answers.values())
    assert not list(requests.glob("*.json"))


def test_a_run_can_end_when_its_package_was_replaced_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ensemble.submit(an_ensemble([{"lr": 0.1}], epochs=1), tmp_path / "run", executor="inline")
    monkeypatch.setitem(sys.modules, "ensemble.controller.ending", None)  # it cannot be imported any more
    assert [row["state"] for row in run.wait().members] == ["finished"]
