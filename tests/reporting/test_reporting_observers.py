"""The observers of a run: real processes and real training, with a logger that dies, hangs, fails or is slow."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.event_dicts import fold, read_events, typed
from kit.execute_members import an_ensemble
from kit.leftovers import wait_until
from kit.run_events import list_run
from logger_readers import LIMIT, find_observers, read_tensorboard, write_log

import ensemble
from ensemble import SpecError
from ensemble.cli.parser import main
from ensemble.reporting.loggers import webhook as sender
from ensemble.reporting.loggers.observers import Observers
from ensemble.spec import resolve_loggers, resolve_notify
from ensemble.spec.spec_file import load_spec
from ensemble.store import RunDir, write_request

SECRET = "T0KEN-that-nobody-may-read"
WAIT_S = 300.0  # only ends a test that hangs
EVENTS = list_run(members=4, epochs=3)
LAST = typed(EVENTS[-1])
MANY_S = 600.0  # for observers that end by themselves


class Webhook(ThreadingHTTPServer):
    """A server on the loopback that takes alerts; `answers` says how the next ones are answered."""

    daemon_threads = True

    def __init__(self) -> None:
        self.got: queue.Queue[dict[str, Any]] = queue.Queue()
        self.answers: list[int | str | None] = []  # a status, a redirection, or None: never
        self.asked = 0
        super().__init__(("127.0.0.1", 0), Alert)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/hook/{SECRET}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def next(self) -> dict[str, Any]:
        return self.got.get(timeout=WAIT_S)


class Alert(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        answer = self.server.answers.pop(0) if self.server.answers else 204
        if answer is None:
            time.sleep(WAIT_S)
            return
        if answer == 204:
            self.server.got.put(json.loads(body))
        self.send_response(307 if isinstance(answer, str) else answer)
        self.send_header("Location", str(answer))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as served:
        yield served
        served.shutdown()


def train(run_dir: Path, on_event: Any = None, loggers: tuple[str, ...] = ("tensorboard",)) -> Any:
    ensemble.submit(an_ensemble(epochs=4, loggers=loggers), run_dir, "inline", on_event).wait()
    return fold(read_events(run_dir / "events.jsonl"))


def list_trained(state: Any) -> dict[str, Any]:
    return {
        name: (member.weights_sha256, member.attempts, [epoch.metrics for epoch in member.history])
        for name, member in state.members.items()
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return list_trained(train(tmp_path_factory.mktemp("undisturbed") / "run", loggers=()))


def check_tensorboard(run_dir: Path, state: Any) -> None:
    scalars = read_tensorboard(run_dir / "tensorboard")
    for name, member in state.members.items():
        losses = {epoch.epoch: epoch.train_loss for epoch in member.history}
        assert scalars[name]["train/loss"] == pytest.approx(losses, rel=1e-6)


def test_observers_that_are_killed_twice_do_not_touch_training_and_log_each_epoch_once(
    tmp_path: Path, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMIT, MANY_S)
    monkeypatch.setattr("ensemble.controller.controller.TICK_S", 0.0)  # so that a death is noticed soon
    run_dir, killed = RunDir(tmp_path / "run"), list[int]()

    def kill(event: dict[str, Any]) -> None:
        if event["type"] != "epoch" or event["epoch"] not in (1, 3) or event["member"] != "member-0":
            return
        wait_until((run_dir.loggers / "tensorboard.json").exists, "nothing is written")
        process = wait_until(find_observers, "there is no process")
        process.kill()
        process.wait()
        killed.append(process.pid)

    state = train(run_dir.path, kill)
    assert len(set(killed)) == 2 and list_trained(state) == undisturbed
    news = [event for event in read_events(run_dir.events) if event["type"] == "logger"]
    assert (news[0]["logger"], news[0]["state"]) == ("process", "failing") and "it died" in news[0]["detail"]
    assert read_events(run_dir.events)[-1]["notes"] == []
    check_tensorboard(run_dir.path, state)


def test_observers_that_stand_still_while_members_train_write_all_at_the_end(
    tmp_path: Path, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMIT, MANY_S)
    stopped = list[psutil.Process]()

    def stand_still(event: dict[str, Any]) -> None:
        if event["type"] == "epoch" and not stopped:
            stopped.append(wait_until(find_observers, "there is no process"))
            stopped[0].suspend()
        elif event["type"] == "combined":
            stopped[0].resume()

    state = train(tmp_path / "run", stand_still)
    assert stopped and list_trained(state) == undisturbed
    check_tensorboard(tmp_path / "run", state)


def block_tensorboard(run_dir: RunDir) -> Path:
    """Put a pipe in the place of a member's event file: to open it takes for ever, as nobody reads it."""
    folder = run_dir.path / "tensorboard" / "member-1"
    folder.mkdir(parents=True)
    pipe = folder / f"events.out.tfevents.{int(EVENTS[0]['t'])}.{EVENTS[0]['run_id']}"
    os.mkfifo(pipe)
    return pipe


def end_apart(observers: Observers) -> tuple[list[str], threading.Thread]:
    lines = list[str]()
    ender = threading.Thread(target=lambda: lines.extend(observers.end_loggers(LAST, members=1000)))
    ender.start()
    return lines, ender


def test_a_logger_that_sleeps_for_ever_holds_back_neither_another_nor_the_end_and_is_resumed(
    webhook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = write_log(tmp_path / "run", EVENTS[:-1])
    run_dir.requests.mkdir()
    pipe = block_tensorboard(run_dir)
    observers = Observers(run_dir, resolve_loggers(["tensorboard"]), [webhook.url])
    observers.start()
    lines, ender = end_apart(observers)
    assert webhook.next()["kind"] == "run_ended"
    write_request(run_dir, "stop", at_once=True)  # as the second Ctrl-C of somebody who does not wait
    ender.join()
    assert lines == ["tensorboard: has not ended before the run was to end at once; the log's end is missing"]
    assert find_observers() is None
    for path in (pipe, *run_dir.requests.iterdir()):
        path.unlink()
    monkeypatch.setattr(LIMIT, MANY_S)
    last = Observers(run_dir, resolve_loggers(["tensorboard"]))
    last.start()
    assert last.end_loggers(LAST, members=1) == []
    check_tensorboard(run_dir.path, fold(EVENTS))


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_logger_that_fails_says_so_once_and_goes_on_when_it_can(
    webhook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    monkeypatch.setattr(LIMIT, MANY_S)
    run_dir = write_log(tmp_path / "run", EVENTS[:-1])
    (run_dir.path / "tensorboard").write_text("no directory")
    observers = Observers(run_dir, resolve_loggers(["tensorboard"]), [webhook.url])
    observers.start()
    [event] = wait_until(observers.read, "nothing is said")
    assert (event["logger"], event["state"]) == ("tensorboard", "failing") and "tried again" in event["detail"]
    if is_killed:
        wait_until(find_observers, "there is no process").kill()
    (run_dir.path / "tensorboard").unlink()
    news: list[dict[str, Any]] = []
    while not any(event["logger"] == "tensorboard" for event in news):
        news += wait_until(observers.read, "it does not go on")
    restarted = [("process", "failing"), ("process", "works")] if is_killed else []
    assert [(event["logger"], event["state"]) for event in news] == [*restarted, ("tensorboard", "works")]
    assert observers.end_loggers(LAST, members=4) == []
    assert webhook.next()["kind"] == "run_ended"
    check_tensorboard(run_dir.path, fold(EVENTS))


def test_a_process_that_always_dies_at_the_end_is_given_up_and_said(tmp_path: Path) -> None:
    run_dir = write_log(tmp_path / "run", EVENTS[:-1])
    block_tensorboard(run_dir)  # so that it never ends by itself
    observers = Observers(run_dir, resolve_loggers(["tensorboard"]))
    observers.start()
    lines, ender = end_apart(observers)
    killed = set[int]()
    while ender.is_alive():
        if (process := find_observers()) is not None and process.pid not in killed:
            killed.add(process.pid)
            process.kill()
    assert len(killed) == 3 and len(lines) == 1 and lines[0].startswith("tensorboard: the process died; see ")


def end_run(run_dir: RunDir, webhook: Webhook, last: dict[str, Any]) -> list[str]:
    observers = Observers(run_dir, (), resolve_notify([webhook.url]))
    observers.start()
    return observers.end_loggers(typed(last), members=8)


def test_a_webhook_that_fails_twice_is_told_at_the_third_try_only_once(webhook: Webhook, tmp_path: Path) -> None:
    run_dir = write_log(tmp_path / "run", EVENTS[:-1])
    webhook.answers = [503, 500]
    assert end_run(run_dir, webhook, EVENTS[-1]) == []
    message = webhook.next()
    assert message["run"] == "digits" and message["kind"] == "run_ended" and webhook.asked == 3
    assert message["text"] == "digits: ended: 4 finished" and message["time"].endswith("+00:00")
    assert end_run(run_dir, webhook, EVENTS[-1]) == [] and webhook.asked == 3, "one that was killed just then"
    last = {"t": EVENTS[-1]["t"], "type": "run_stopped", "reason": "Ctrl-C"}
    assert end_run(write_log(tmp_path / "stopped", EVENTS[:-1]), webhook, last) == []
    message = webhook.next()
    assert message["kind"] == "run_stopped" and message["text"].startswith("digits: stopped (Ctrl-C): ")


def test_what_is_no_address_is_refused_without_naming_what_may_be_secret() -> None:
    for address in (f"ftp://host/{SECRET}", SECRET, [f"https:///{SECRET}"], 7):
        with pytest.raises(SpecError, match="http") as raised:
            resolve_notify(address)
        assert SECRET not in str(raised.value)
    assert resolve_notify(None) == () and resolve_notify("https://host/x") == ("https://host/x",)


def test_a_webhook_that_redirects_is_silent_or_is_not_there_is_given_up(webhook: Webhook) -> None:
    with Webhook() as other, socket.create_server(("127.0.0.1", 0)) as taken:
        webhook.answers = [other.url, None]
        mute = f"http://127.0.0.1:{taken.getsockname()[1]}/{SECRET}"  # accepts, and says nothing
        nobody = f"http://127.0.0.1:9/{SECRET}"  # the port `discard`
        refusals = [(webhook.url, 60.0, "answered with status 307"), (nobody, 60.0, "cannot be reached")]
        refusals[1:1] = [(webhook.url, 0.2, r"did not answer within 0\.2 s"), (mute, 0.2, "did not answer")]
        for url, limit_s, why in refusals:
            with pytest.raises(sender.DeliveryError, match=why) as refusal:
                sender.post(url, b"{}", limit_s=limit_s)
            assert SECRET not in str(refusal.value)
        assert other.asked == 0
        other.shutdown()


def check_secret(run_dir: Path) -> None:
    """The token of the address is in no file of a run, and in no command line that others can read."""
    assert [path for path in run_dir.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()] == []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            assert SECRET not in " ".join(process.cmdline()), process


SPEC = """
from ensemble import Recipe
from kit.execute_members import an_ensemble, faulty_model, loss

def spec(fault="build", marker=""):
    recipe = Recipe(model=faulty_model, loss=loss, task="classification")
    return an_ensemble([{"lr": 0.1, "fault": fault, "after": 2, "marker": marker}], recipe=recipe)
"""


def write_spec(folder: Path, webhook: Webhook) -> list[str]:
    for name, text in {"run_faults.py": SPEC, "webhook": webhook.url}.items():
        (folder / name).write_text(text + "\n")
    options = ["--run-dir", f"{folder}/run", "--executor", "inline", "--notify", f"@{folder}/webhook"]
    return ["run", f"{folder}/run_faults.py", *options]


def test_a_run_that_fails_says_so_and_keeps_the_secret(webhook: Webhook, tmp_path: Path) -> None:
    command = write_spec(tmp_path, webhook)
    assert main([*command[:-1], f"@{tmp_path}/none"]) == 2
    webhook.answers = [500]
    assert main(command) == 1, "no member finishes"
    message = webhook.next()
    assert message["kind"] == "run_failed" and message["text"].endswith("no member finished: 1 failed")
    check_secret(tmp_path / "run")
    submitted = load_spec(str(tmp_path / "run_faults.py")), tmp_path / "submitted", "inline"
    ensemble.submit(*submitted, notify=webhook.url).wait()
    assert webhook.next()["kind"] == "run_failed"
    check_secret(tmp_path / "submitted")


def test_a_controller_that_dies_before_it_reads_a_message_is_lost(webhook: Webhook, tmp_path: Path) -> None:
    run_dir = write_log(tmp_path / "run", EVENTS[:-1])
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ensemble.reporting.loggers.observer_main", str(run_dir.path), str(tmp_path)]
    declared = {"observers": {"webhook-1": {"kind": "webhook", "options": {"url": webhook.url}}}}
    subprocess.run(command, input=json.dumps(declared).encode(), stdout=writer, timeout=WAIT_S, check=True)
    os.close(writer)
    assert webhook.next()["kind"] == "run_lost" and webhook.asked == 1


@pytest.mark.more
def test_a_run_that_is_killed_and_resumed_repeats_nothing(webhook: Webhook, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ensemble.cli", *write_spec(tmp_path, webhook)]
    command += ["--set", "fault=wait", "--set", f"marker={tmp_path}/marker"]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'tests' / 'support'}"}
    with subprocess.Popen(command, env=environment) as first:
        lock = tmp_path / "run" / "loggers" / "observers.lock"
        wait_until(lambda: lock.exists() or first.poll() is not None, "it does not start")
        assert first.poll() is None
        first.kill()
    lost = webhook.next()
    assert lost["kind"] == "run_lost" and "ensemble resume" in lost["text"]
    (tmp_path / "marker").touch()
    with subprocess.Popen(command, env=environment) as second:
        ended = webhook.next()
        assert second.wait(WAIT_S) == 0
    assert ended["kind"] == "run_ended" and "1 finished" in ended["text"] and webhook.got.empty()
    check_secret(tmp_path / "run")
