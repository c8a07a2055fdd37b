"""`ensemble run --dashboard`: the page of a run beside it, and what is left of it afterwards."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.event_dicts import fold, read_events
from kit.leftovers import wait_until
from test_cli import ENSEMBLE, SPEC, environment, refused

from ensemble.cli import dashboard
from ensemble.cli.dashboard import PORT
from ensemble.spec import SpecError

Event = dict[str, Any]


class Command:
    """`ensemble run --dashboard` in progress."""

    def __init__(self, folder: Path, *options: str) -> None:
        (folder / "tiny.py").write_text(SPEC)
        command = [*ENSEMBLE, "run", "tiny.py", "--executor", "local", "--run-dir", "run", *options]
        given = {**dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL), "stderr": subprocess.PIPE, "text": True}
        wide = environment() | {"COLUMNS": "250", "TERM": "dumb"}
        self.process = subprocess.Popen(command, cwd=folder, env=wide, start_new_session=True, **given)
        self.said = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            self.said += line

    def wait_for(self, text: str) -> re.Match[str]:
        wait_until(lambda: re.search(text, self.said) is not None or self.process.poll() is not None, text)
        found = re.search(text, self.said)
        assert found is not None, self.said
        return found

    def page(self) -> psutil.Process:
        (found,) = (p for p in psutil.Process(self.process.pid).children() if "dashboard" in p.cmdline())
        return found

    def end(self) -> int:
        status = self.process.wait(300.0)
        self._reader.join(300.0)
        return status


def log_in(command: Command) -> tuple[int, Callable[[], Any]]:
    """The port, and what gives the row of the run."""
    file = Path(command.wait_for(r"the address with its token: (\S+)\)")[1])
    found = re.search(r"http://127\.0\.0\.1:(\d+)(/\?token=\S+)", file.read_text())
    assert found is not None and "token=" not in command.said
    port, target = found.groups()

    def get(target: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=300.0)
        connection.request("GET", target, headers=headers)
        return connection.getresponse()

    answer = get(target, {})
    assert answer.status == 303
    session = {"Cookie": str(answer.getheader("set-cookie")).partition(";")[0]}
    return int(port), lambda: json.loads(get(f"{answer.getheader('location')}api/runs", session).read())[0]


@pytest.mark.more
def test_the_page_is_served_while_the_run_goes_on_and_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "hold").write_text("")
    settings = ("--set", f"hold={tmp_path / 'hold'}", "--set", "epochs=3")
    command = Command(tmp_path, "--dashboard-port", "0", *settings)
    _, row = log_in(command)
    page = command.page()
    wait_until(lambda: row()["state"]["word"] == "running", "the run is shown")
    assert row()["dir"] == str(tmp_path / "run")
    (tmp_path / "hold").unlink()
    assert command.end() == 0
    assert not page.is_running()
    assert "`ensemble dashboard" in command.said
    used = re.search(r"the live page used (\S+) s of CPU time, which the run's cost does not", command.said)
    assert used is not None and float(used[1]) > 0
    usage = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["type"] == "usage"]
    assert page.pid not in {event["pid"] for event in usage}


@pytest.mark.more
def test_a_page_does_not_outlive_its_run(tmp_path: Path) -> None:
    (tmp_path / "hold").write_text("")
    settings = ("--set", f"hold={tmp_path / 'hold'}", "--set", "epochs=1000")
    command = Command(tmp_path, "--dashboard-port", "0", *settings)
    port, row = log_in(command)
    page = command.page()
    wait_until(lambda: row()["state"]["word"] == "running", "it runs")
    command.process.send_signal(signal.SIGINT)
    command.process.wait(300.0)
    psutil.wait_procs([page], 300.0)
    assert not page.is_running()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    ended = fold(read_events(tmp_path / "run" / "events.jsonl")).ended
    assert ended is not None and ended.type == "run_stopped"
    assert command.end() == 130


BESIDE = """
import sys, time
from pathlib import Path
from ensemble.cli import dashboard
with dashboard.PageProcess(Path(sys.argv[1]), 0):
    print("served", flush=True)
    time.sleep(600)
"""


def test_a_page_ends_with_a_command_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BESIDE, str(tmp_path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as beside:
        assert beside.stdout is not None and beside.stdout.readline() == "served\n"
        (page,) = psutil.Process(beside.pid).children()
        (listens,) = {each.laddr for each in page.net_connections("inet") if each.status == psutil.CONN_LISTEN}
        beside.kill()
    psutil.wait_procs([page], 300.0)
    assert not page.is_running()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(listens)


def test_a_page_is_waited_for_however_long_it_takes(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(dashboard, "START_S", 0.01, raising=False)  # as a machine is that is too busy
    python = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(python))

    def become(script: str) -> None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)

    become("sleep 0.3; echo http://page/; cat")
    with dashboard.PageProcess(tmp_path / "run", 0):
        assert "http://page/" in capsys.readouterr().err
    for script, why in (("sleep 0.3; echo ensemble: no port; exit 2", "no port"), ("exit 3", "exit status 3")):
        become(script)
        with pytest.raises(SpecError, match=f"the live page cannot be served: .*{why}"):
            dashboard.PageProcess(tmp_path / "run", 0)


@pytest.mark.more
def test_a_port_that_is_taken_is_refused_where_it_was_asked_for_else_another_is_used(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port}" in refused("dashboard", tmp_path, "--port", port)
        command = Command(tmp_path, "--dashboard-port", str(port))
        assert command.end() == 2
        (line,) = command.said.splitlines()
        assert "the live page cannot be served" in line and f"port {port}" in line
        assert not (tmp_path / "run").exists()
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # if somebody has it already, that is as good
            taken.bind(("127.0.0.1", PORT))
            taken.listen()
        words = [*ENSEMBLE, "dashboard", str(tmp_path)]
        with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as server:
            first, second = server.stdout.readline(), server.stdout.readline()
            assert first.startswith(f"port {PORT} is taken; the page has ") and first.split()[-1] in second
            server.terminate()
        assert server.returncode == 0
