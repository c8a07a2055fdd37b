"""What the server of the live page serves, from a real process over real sockets."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import psutil
import pytest
from dashboard_process import Server, serve
from kit import run_events
from kit.leftovers import wait_until

from ensemble.reporting.dashboard.projection import RunView
from ensemble.store import RunDir
from ensemble.store.event_log import read_batches


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, one of them a level deeper, and with what is none."""
    path = tmp_path_factory.mktemp("runs")
    run_events.write_run(path / "digits", run_events.list_run(), range(8))
    run_events.write_run(path / "sweeps" / "first", run_events.search_run())
    for hidden in ("a/b/too-deep", ".hidden"):
        run_events.write_run(path / hidden, run_events.just_started())
    (path / "linked").symlink_to(path / "a" / "b" / "too-deep")
    (path / "notes.txt").write_text("no run")
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serve(folder) as server:
        yield server


def test_the_list_has_the_runs_up_to_two_levels_deep(server: Server, folder: Path) -> None:
    digits, sweep = server.get("/api/runs")
    assert [row["dir"] for row in (digits, sweep)] == [str(folder / "digits"), str(folder / "sweeps" / "first")]
    assert (digits["name"], sweep["name"], digits["objective"]) == ("digits", "sweep", "accuracy")
    assert digits["state"] == {"word": "finished, with failures", "tone": "warn"} and 0 < sweep["done"] < 1
    assert digits["counts"] == {"finished": 7, "failed": 1} and digits["best"]["member"] == "member-3"


def test_the_documents_are_those_of_the_projection(server: Server, folder: Path) -> None:
    view, at = RunView(RunDir(folder / "digits")), f"/api/runs/{server.key}"
    for events, offset in read_batches(folder / "digits" / "events.jsonl"):
        view.apply(events, offset)
    state, expected = server.get(f"{at}/state"), json.loads(json.dumps(view.state_document()))
    assert state["offset"] == (folder / "digits" / "events.jsonl").stat().st_size
    for document in (state, expected):
        document["run"]["actions_off"] = None
    assert state == expected
    assert server.get(f"{at}/curves") == json.loads(json.dumps(view.curves_document()))
    tables = server.get(f"{at}/tables")
    assert tables == json.loads(json.dumps(view.tables_document())) and len(tables["tables"]) == 2
    quality = server.get(f"{at}/quality")
    assert quality["missing"] is None and len(quality["tables"][0]["rows"]) == 1 + 7
    assert [name for name, *_ in server.get(f"{at}/importances")["importances"]]


def test_a_new_run_appears_in_the_list_and_in_its_stream(tmp_path: Path) -> None:
    run_events.write_run(tmp_path / "digits", run_events.list_run())
    with serve(tmp_path) as server, server.stream("/api/runs/events") as messages:
        assert len(messages.next()[2]) == 1
        run_events.write_run(tmp_path / "later", run_events.just_started())
        while [row["name"] for row in messages.next()[2]] != ["digits", "fresh"]:
            pass  # it may be seen before its log is
        shutil.rmtree(tmp_path / "later")
        wait_until(lambda: len(server.get("/api/runs")) == 1, "the run is gone from the list")


def test_the_files_of_the_page_are_served_to_be_asked_for_again(server: Server) -> None:
    status, headers, body = server.ask("/static/app.js")
    assert status == 200 and b"new App" in body
    assert headers["cache-control"] == "no-cache" and "javascript" in headers["content-type"]
    again, _, body = server.ask("/static/app.js", If_None_Match=headers["etag"])
    assert (again, body) == (304, b"")


def test_a_members_log_is_followed_from_near_its_end(tmp_path: Path) -> None:
    run = run_events.write_run(tmp_path / "run", run_events.list_run())
    log = run / "members" / "member-0" / "log.txt"
    log.parent.mkdir(parents=True)

    def replace(text: str, times: tuple[float, float] | None = None) -> None:
        whole = log.with_name("whole")  # the server never sees half of it
        whole.write_text(text)
        os.utime(whole, times)
        whole.rename(log)

    def append(data: bytes) -> None:
        with log.open("ab") as file:
            file.write(data)

    with serve(run) as server:
        target = f"/api/runs/{server.key}/members/member-0/log"
        with server.stream(target) as messages:
            replace("".join(f"line {n:06d}\n" for n in range(10_000)))
            event, id, data = messages.next()
            assert event is None and data["text"].startswith("line ") and data["from"] % 12 == 0
            assert id == data["to"] == 120_000 and data["text"].endswith("line 009999\n")
            append("\x1b[31mbar\r50%\r\nold\nold\nhälf".encode()[:-3])  # a colour, a bar, half a letter
            assert messages.next()[2]["text"] == "50%\nold  (× 2)\n"
            append("älf\n".encode()[1:])
            assert messages.next()[2]["text"] == "hälf\n"
            log.write_text("anew\n")
            assert messages.next()[2] == {"text": "anew\n", "from": 0, "to": 5}
            replace("anew\n10%\r20%", (0.0, 0.0))  # a bar at which the member was killed long ago
            assert messages.next()[2] == {"text": "20%\n", "from": 5, "to": 12}
        with server.stream(target, Last_Event_ID="2") as messages:
            assert messages.next()[2] == {"text": "ew\n", "from": 2, "to": 5}
        assert server.ask(target.replace("member-0", "member-99"))[0] == 404
        assert server.ask(target + "?from=-1")[0] == 400


def test_the_page_works_behind_a_proxy_that_serves_it_below_a_path_which_it_takes_away(tmp_path: Path) -> None:
    run = run_events.write_run(tmp_path / "run", run_events.list_run(until=20.0))
    with serve(run, "--prefix", "/team/run/", "--allow-host", "lab:4443", log_in=False) as server:
        assert server.url.startswith("http://lab:4443/team/run/?token=")
        [listening] = [c for c in psutil.Process(server.process.pid).net_connections() if c.status == "LISTEN"]
        server.port = listening.laddr.port
        token = server.url[server.url.index("/?") :]
        status, headers, _ = server.ask(token, cookie="", at_root=True, Host="lab:4443")
        cookie, _, attributes = headers["set-cookie"].partition("; ")
        assert status == 303 and headers["location"].startswith("/team/run/p/")
        assert f"Path={headers['location']};" in attributes
        root = headers["location"].removeprefix("/team/run")

        def ask(link: str) -> tuple[int, bytes]:
            return server.ask(urljoin(root, link), cookie=cookie, at_root=True, Host="lab:4443")[::2]

        status, body = ask("")
        links = re.findall(r'(?:src|href)="([^"#:]+)"', body.decode())
        assert status == 200 and "static/app.js" in links and b"<title>" in body
        assert [link for link in (*links, "api/runs", "metrics") if ask(link)[0] != 200] == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.more)])
def test_a_signal_ends_it_at_once_also_while_pages_are_connected(number: int, tmp_path: Path) -> None:
    run = run_events.write_run(tmp_path / "run", run_events.list_run())
    before = sorted(run.rglob("*"))
    with serve(run) as server:
        at = f"/api/runs/{server.key}/events"
        with server.stream(at) as messages, server.stream("/api/runs/events") as runs:
            assert len(runs.next()[2]) == 1 and "run" in messages.next()[2]
            server.process.send_signal(number)
            assert messages.next()[0] == "end"
        assert server.wait() == 0  # a second signal would end it as signals do
        assert not any("Traceback" in line for line in server.said), server.said
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))
    assert sorted(run.rglob("*")) == before


def test_somebody_who_may_only_read_the_run_sees_it_and_is_told_why_not_more(tmp_path: Path) -> None:
    run = run_events.write_run(tmp_path / "run", run_events.list_run(until=20.0))
    (run / "requests").mkdir(mode=0o500)
    under = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []  # root may all
    if under and shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv, with which root would give up its privileges")
    with serve(run, under=under) as server:
        state = server.get(f"/api/runs/{server.key}/state")
        assert len(state["members"]["rows"]) == 8
        assert state["run"]["actions"] == [] and "may only read" in state["run"]["actions_off"]
        status, _, body = server.ask(f"/api/runs/{server.key}/actions", "POST", {"verb": "stop"})
        assert status == 403 and b"may only read" in body
    assert list((run / "requests").iterdir()) == []
