"""Alerts: what is said of a run, once for each cause, by webhook and by command, also through crashes."""

from __future__ import annotations

import json
import os
import queue
import signal
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
from event_dicts import typed
from execute_members import an_ensemble, faulty_model, loss
from logger_readers import write_log
from run_events import list_run

import ensemble
from ensemble import Notify, Recipe, SpecError
from ensemble.cli.parser import main
from ensemble.reporting.alerts import Alert, AlertGate, AlertReader
from ensemble.reporting.loggers import alerts as sender
from ensemble.reporting.loggers.processes import LoggerProcesses
from ensemble.spec import resolve_notify
from ensemble.store import RunDir

SECRET = "T0KEN-that-nobody-may-read"
WAIT_S = 300.0  # only ends a test that hangs


class Webhook(ThreadingHTTPServer):
    """A server on the loopback that takes alerts; `answers` says how the next ones are answered."""

    daemon_threads = True

    def __init__(self) -> None:
        self.got: queue.Queue[dict[str, Any]] = queue.Queue()
        self.answers: list[int | str | None] = []  # a status, a redirection, or None: never
        self.asked = 0
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                webhook.asked += 1
                answer = webhook.answers.pop(0) if webhook.answers else 204
                if answer is None:
                    time.sleep(WAIT_S)
                elif isinstance(answer, str):
                    self.send_response(307)
                    self.send_header("Location", answer)
                    self.end_headers()
                else:
                    if answer < 300:
                        webhook.got.put(json.loads(body))
                    self.send_response(answer)
                    self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook/{SECRET}"

    def next(self) -> dict[str, Any]:
        return self.got.get(timeout=WAIT_S)


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as served:
        yield served
        served.shutdown()


# -- what is said --------------------------------------------------------------------------------------


def event(kind: str, t: float, **fields: Any) -> Any:
    return typed({"type": kind, "t": t, **fields})


def begin(members: int = 4, **started: Any) -> list[Any]:
    header = {"name": "digits", "members": members, "objective": "accuracy", "direction": "max", "epochs": 9}
    found = [event("run_started", 0.0, **header, **started)]
    for i in range(members):
        member = {"member": f"member-{i}"}
        found += [event("member", 0.0, number=i, epochs=9, **member)]
        found += [
            event(kind, 1.0, attempt=0, **member, **({"node": "n"} if kind == "placed" else {}))
            for kind in ("placed", "started")
        ]
    return found


def read(reader: AlertReader, events: list[Any]) -> list[Alert]:
    return [alert for each in events for alert in reader.read(each)]


def epoch(member: int, number: int, t: float, **fields: Any) -> Any:
    return event("epoch", t, attempt=0, member=f"member-{member}", epoch=number, wall_s=10.0, **fields)


def test_each_thing_that_matters_is_said_once() -> None:
    reader = AlertReader()
    assert read(reader, begin()) == []
    fine = {"metrics": {"accuracy": 0.5}, "train_loss": 1.0}
    assert read(reader, [epoch(i, 0, 11.0, **fine) for i in range(4)]) == []
    far = read(reader, [epoch(0, n, 20.0 + n, metrics={"accuracy": 0.1}, train_loss=30.0) for n in (1, 2)])
    assert [(each.kind, each.who) for each in far] == [("diverged", ("member-0",))] and "30" in far[0].text
    nan = read(reader, [epoch(1, 1, 22.0, metrics={"accuracy": None})])
    assert [each.text for each in nan] == ["member-1: diverged: accuracy is not a number after epoch 2"]
    assert (
        read(reader, [event("failed", 23.0, member="member-2", attempt=0, error="x", reason="lost", retry=True)])
        == []
    )
    assert read(reader, [event("finished", 23.0, member="member-1", attempt=0, epoch=1)]) == []
    read(reader, [event("failed", 24.0, member="member-2", attempt=0, error="x", reason="error")])
    assert reader.look(60.0) == []
    stalled = [alert for now in (80.0, 80.5) for alert in reader.look(now)]
    assert [(each.kind, each.who) for each in stalled] == [("stalled", ("member-3",))], "who trains on makes steps"
    ended = read(reader, [event("run_finished", 99.0)])
    assert [(each.kind, each.once) for each in ended] == [("run_ended", True)] and "1 finished" in ended[0].text
    assert reader.look(1e6) == []


def test_a_member_that_has_fitted_its_data_has_not_diverged() -> None:
    reader = AlertReader()
    read(reader, begin(1))
    losses = enumerate((2.0, 1e-6, 2e-5, 1.9, 2.1))
    far = read(reader, [epoch(0, n, 20.0 + n, train_loss=value) for n, value in losses])
    assert ["2.1 after epoch 5" in each.text for each in far] == [True]


def test_a_run_of_which_no_member_finished_has_failed_and_a_budget_is_said_at_its_marks() -> None:
    reader = AlertReader()
    read(reader, begin(1, budget={"hours": 1.0}))
    said = [
        alert.text for now in range(0, 3601, 20) for alert in reader.look(float(now)) if alert.kind == "budget"
    ]
    assert [text.split(" of the budget")[0] for text in said] == ["80%", "100%"]
    read(reader, [event("failed", 3601.0, member="member-0", attempt=0, error="x", reason="error")])
    [failed] = read(reader, [event("run_finished", 3602.0)])
    assert failed.kind == "run_failed"


def test_errors_that_differ_by_numbers_are_one_cause() -> None:
    reader, gate = AlertReader(), AlertGate()
    read(reader, begin())
    for i in range(4):
        error = {"error": f"loss is nan at step {i}, learning rate 0.{i}3", "reason": "nan"}
        gate.add(reader.read(event("failed", 9.0, member=f"member-{i}", attempt=0, **error)))
    alert = gate.next(10.0)
    assert alert is not None and len(alert.who) == 4 and "4 × failed (nan): loss is nan at step 0" in alert.text
    gate.confirm(alert, 10.0)
    assert gate.next(11.0) is None


def test_no_cause_is_said_twice_within_a_minute_and_what_comes_meanwhile_is_joined() -> None:
    gate = AlertGate()
    cause = [Alert("failed", "failed: x", "failed: x", float(i), (f"member-{i}",)) for i in range(5)]
    gate.add(cause[:1])
    first = gate.next(0.0)
    assert first is not None and first.text == "member-0: failed: x"
    gate.confirm(first, 0.0)
    gate.add(cause[1:])
    gate = AlertGate(json.loads(json.dumps(gate.keep())))  # as after a crash
    assert gate.next(59.0) is None
    second = gate.next(60.0)
    assert second is not None and second.text == "member-1, member-2, member-3, member-4: 4 × failed: x"
    once = Alert("run_ended", "end", "ended", 1.0, (), True)
    gate.confirm(second, 60.0)
    gate.add([once])
    gate.confirm(once, 61.0)
    gate.add([once])
    assert gate.next(1e9) is None


def test_what_cannot_be_told_is_refused_without_naming_what_may_be_secret() -> None:
    for given in (f"ftp://host/{SECRET}", SECRET):
        with pytest.raises(SpecError, match="http") as found:
            resolve_notify(given)
        assert SECRET not in str(found.value)
    with pytest.raises(SpecError, match="either a url or a command"):
        Notify()
    assert SECRET not in repr(Notify(url=f"https://host/{SECRET}"))


# -- by webhook and command ----------------------------------------------------------------------------


def test_a_webhook_that_fails_twice_gets_it_at_the_third_try(
    webhook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "BACK_OFF_S", 0.01)
    webhook.answers = [503, 500]
    logger = sender.AlertLogger(RunDir(tmp_path), {"url": webhook.url, "page": "http://host/"})
    reader = logger.make_reader()
    points = [point for each in list_run() for point in reader.read(typed(each))]
    logger.open(reader.state, {})
    ids = logger.write(points)
    got = webhook.next()
    assert got["kind"] == "diverged" and got["text"].startswith("digits: member-6: failed (nan): loss is nan")
    assert got["run"] == "digits" and got["members"] == ["member-6"] and got["page"] == "http://host/"
    assert got["time"].endswith("+00:00") and webhook.asked == 3 + webhook.got.qsize()
    again = sender.AlertLogger(RunDir(tmp_path), {"url": webhook.url})
    again.make_reader()
    again.open(reader.state, json.loads(json.dumps(ids)))
    asked = webhook.asked
    again.write([point for point in points if isinstance(point, Alert) and point.once])
    assert webhook.asked == asked


def test_a_redirection_is_followed_on_the_same_host_only(webhook: Webhook) -> None:
    webhook.answers = ["/elsewhere"]
    sender.post(webhook.url, b"{}")
    assert webhook.next() == {}
    with Webhook() as other:
        webhook.answers = [other.url]
        with pytest.raises(sender.DeliveryError, match="redirects to another host") as found:
            sender.post(webhook.url, b"{}")
        assert other.asked == 0 and SECRET not in str(found.value)
        other.shutdown()
    webhook.answers = ["/a", "/b", "/c", "/d", "/e"]
    with pytest.raises(sender.DeliveryError, match="without end"):
        sender.post(webhook.url, b"{}")


def test_a_webhook_that_never_answers_or_is_not_there_is_given_up(webhook: Webhook) -> None:
    webhook.answers = [None]
    with pytest.raises(sender.DeliveryError, match=r"did not answer within 0\.2 s") as found:
        sender.post(webhook.url, b"{}", limit_s=0.2)
    assert SECRET not in str(found.value)
    with socket.create_server(("127.0.0.1", 0)) as taken:  # accepts, and says nothing
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/{SECRET}"
        with pytest.raises(sender.DeliveryError, match="did not answer"):
            sender.post(url, b"{}", limit_s=0.2)
    with pytest.raises(sender.DeliveryError, match="cannot be reached") as found:
        sender.post(url, b"{}")
    assert SECRET not in str(found.value)


def test_a_command_gets_it_on_its_standard_input_without_a_shell_and_in_bounded_time(tmp_path: Path) -> None:
    write = "import sys; open(sys.argv[1], 'w').write(sys.argv[2] + sys.stdin.read())"
    sender.run_command([sys.executable, "-c", write, str(tmp_path / "got"), "$(id);"], b'{"run": 1}')
    assert (tmp_path / "got").read_text() == '$(id);{"run": 1}'
    with pytest.raises(sender.DeliveryError, match=r"ended with exit status 3"):
        sender.run_command([sys.executable, "-c", f"import sys; sys.exit(3); {SECRET!r}"], b"{}")
    with pytest.raises(sender.DeliveryError, match="cannot be run"):
        sender.run_command([str(tmp_path / "nothing")], b"{}")
    pid_file = str(tmp_path / "pid")
    child = "import subprocess as s; p = s.Popen(['sleep', '600']); "
    child += f"open({pid_file!r}, 'w').write(str(p.pid)); p.wait()"
    with pytest.raises(sender.DeliveryError, match="took more than"):
        sender.run_command([sys.executable, "-c", child], b"{}", limit_s=2.0)
    if (tmp_path / "pid").exists():  # else it had not begun within the time
        pid = int((tmp_path / "pid").read_text())
        until = time.monotonic() + WAIT_S
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until


def test_what_was_held_back_is_sent_before_the_run_ends_and_a_command_gets_it_by_lines(tmp_path: Path) -> None:
    got = tmp_path / "alerts.jsonl"
    logger = sender.AlertLogger(RunDir(tmp_path), {"command": ["tee", "-a", str(got)]})
    reader = logger.make_reader()
    points = read(reader, begin())
    logger.open(reader.state, {})
    for i in range(3):
        failed = event("failed", 9.0 + i, member=f"member-{i}", attempt=0, error="x", reason="error")
        logger.write(points + read(reader, [failed]))
    kept = logger.lose()
    said = [json.loads(line) for line in got.read_text().splitlines()]
    members = [["member-0"], ["member-1", "member-2"], []]
    assert [each["members"] for each in said] == members and said[-1]["kind"] == "run_lost"
    assert kept["held"] == []


# -- real runs -----------------------------------------------------------------------------------------


def check_secret(run_dir: Path) -> None:
    """The token of the address is in no file of a run, and in no command line that others can read."""
    for path in run_dir.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    for process in psutil.process_iter():
        try:
            assert SECRET not in " ".join(process.cmdline()), process
        except psutil.Error:
            continue


def test_a_run_that_fails_says_so_and_keeps_the_secret(webhook: Webhook, tmp_path: Path) -> None:
    recipe = Recipe(model=faulty_model, loss=loss)
    failing = an_ensemble([{"lr": 0.1, "fault": "build"}, {"lr": 0.2, "fault": "build"}], recipe=recipe)
    webhook.answers = [500]
    ensemble.submit(failing, tmp_path / "run", executor="inline", notify=webhook.url).wait()
    got = [webhook.next(), webhook.next()]
    assert [each["kind"] for each in got] == ["failed", "run_failed"]
    assert "this model cannot be built" in got[0]["text"] and got[1]["text"].endswith(
        "no member finished: 2 failed"
    )
    check_secret(tmp_path / "run")


SPEC = """
from ensemble import Recipe
from execute_members import an_ensemble, faulty_model, loss

def spec():
    return an_ensemble([{"lr": 0.1, "fault": "build"}], recipe=Recipe(model=faulty_model, loss=loss))
"""


def test_the_command_line_names_files_with_the_addresses(webhook: Webhook, tmp_path: Path) -> None:
    for name, text in {"spec.py": SPEC, "webhook": webhook.url, "page": "https://host/?token=1"}.items():
        (tmp_path / name).write_text(text + "\n")
    command = ["run", str(tmp_path / "spec.py"), "--run-dir", str(tmp_path / "run"), "--executor", "inline"]
    assert main([*command, "--notify", f"@{tmp_path}/none"]) == 2
    options = ["--notify", f"@{tmp_path}/webhook", "--notify-page", f"@{tmp_path}/page"]
    assert main([*command, *options]) == 1, "no member finishes"
    got = [webhook.next(), webhook.next()]
    assert [(each["kind"], each["page"]) for each in got] == [
        ("failed", "https://host/?token=1"),
        ("run_failed", "https://host/?token=1"),
    ]
    check_secret(tmp_path / "run")


SCRIPT = """
import sys
import ensemble
from ensemble import Recipe
from execute_members import an_ensemble, faulty_model, loss
members = [{"lr": 0.1, "fault": "build"}, {"lr": 0.1, "fault": "wait", "after": 2, "marker": sys.argv[2]}]
declared = an_ensemble(members, recipe=Recipe(model=faulty_model, loss=loss))
ensemble.submit(declared, sys.argv[1], executor="inline", notify=sys.stdin.readline().strip()).wait()
"""


@pytest.mark.more
def test_a_run_that_is_killed_and_resumed_repeats_nothing(webhook: Webhook, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(tmp_path / "marker")]
    path = os.pathsep.join(sys.path)

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
        )
        assert process.stdin is not None
        process.stdin.write(webhook.url + "\n")
        process.stdin.flush()
        return process

    with start() as first:
        assert webhook.next()["kind"] == "failed"
        first.send_signal(signal.SIGKILL)
    lost = webhook.next()
    assert lost["kind"] == "run_lost" and "ensemble resume" in lost["text"]
    (tmp_path / "marker").touch()
    with start() as second:
        again, ended = webhook.next(), webhook.next()
        assert second.wait(WAIT_S) == 0
    assert again["kind"] == "failed", "it was tried again, which is not held back beyond the end"
    assert ended["kind"] == "run_ended" and "1 finished" in ended["text"]
    assert webhook.got.empty()
    check_secret(tmp_path / "run")


def test_who_is_told_of_a_run_for_the_first_time_hears_nothing_of_its_past(
    webhook: Webhook, tmp_path: Path
) -> None:
    events = list_run()
    resumed = [events[0] | {"resumed": True, "t": events[-1]["t"] + 5}]
    run_dir = write_log(tmp_path / "run", [*map(typed, events), *map(typed, resumed)])
    processes = LoggerProcesses(run_dir, [], resolve_notify([webhook.url]))
    processes.start()
    assert processes.end(typed(events[-1] | {"t": events[-1]["t"] + 9}), members=8) == []
    assert webhook.next()["kind"] == "run_ended" and webhook.got.empty()
