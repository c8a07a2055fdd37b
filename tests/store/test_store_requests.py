"""Requests as files that anybody may have written: each is handed out once; none stops the others."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from kit.event_dicts import lines

from ensemble.store import RunDir, StoreError, receive_requests, write_request


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.requests.mkdir()
    return run_dir


def text(**fields: object) -> str:
    return json.dumps({"v": 2, "t": 1.0, "verb": "pause", **fields})


BAD: dict[str, Callable[[Path], object]] = {
    "half-written": lambda path: path.write_text("{"),
    "a-list": lambda path: path.write_text("[1]"),
    "long-time": lambda path: path.write_text(text(t=10**400)),
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "not-utf8": lambda path: path.write_bytes(b'{"v":2,"t":1,"verb":"add","declared":{"params":{"tag":"\xe9"}}}'),
    "surrogate": lambda path: path.write_text(text(declared={"params": {"tag": "caf\udce9"}})),
    "not-a-number": lambda path: path.write_text(text(declared={"params": {"lr": float("nan")}})),
    "deep": lambda path: path.write_text("[" * 200_000),
    "member-list": lambda path: path.write_text(text(member=["x"])),
    "verb-number": lambda path: path.write_text(text(verb=3)),
    "longer-time": lambda path: path.write_text('{"v":2,"verb":"stop","t":1' + "0" * 5000 + "}"),
    "no-time": lambda path: path.write_text(text(t=float("inf"))),
    "newer": lambda path: path.write_text(text(v=3)),
    "large": lambda path: path.write_text(text(padding="x" * 2**20)),
    "directory": lambda path: (path.mkdir(), (path / "file").touch()),
    "fifo": os.mkfifo,
    "link": lambda path: path.symlink_to("/dev/zero"),
}
if os.geteuid() != 0:  # root reads what is closed to all
    BAD["locked"] = lambda path: (path.write_text(text()), path.chmod(0))


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_put_aside_with_the_reason_and_harms_no_other(run: RunDir, name: str) -> None:
    before = write_request(run, "cancel", member="member-3")
    BAD[name](run.requests / f"pause-{name}.json")
    after = write_request(run, "stop")
    bad, *good = receive_requests(run, set())
    assert [request["id"] for request in good] == [before.stem, after.stem]
    assert (bad["id"], bad["verb"]) == (f"pause-{name}", "pause")
    assert bad["unreadable"].startswith(f"the request pause-{name}.json cannot be read: ")
    assert os.path.lexists(run.requests / f"pause-{name}.unreadable"), "its writer may want to look at it"
    assert receive_requests(run, set()) == []


def test_what_cannot_be_put_aside_is_answered_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.requests / "stop-1.json").mkdir()
    monkeypatch.setattr(os, "replace", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    stuck: set[str] = set()
    assert [request["id"] for request in receive_requests(run, stuck)] == ["stop-1"]
    assert receive_requests(run, stuck) == [] and stuck == {"stop-1"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root writes for others")
def test_what_root_asks_belongs_to_the_owner_of_the_run(run: RunDir) -> None:
    os.chown(run.requests, 65534, 65534)
    found = write_request(run, "pause").stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (65534, 65534, 0o600)


def test_requests_are_taken_once_and_in_order(run: RunDir) -> None:
    assert receive_requests(run, set()) == []
    before = time.time()
    write_request(run, "cancel", member="member-3")
    write_request(run.path, "stop")
    (run.requests / ".stop-2.json.abc.tmp").write_text("{")
    taken = receive_requests(run, set())
    assert [request["verb"] for request in taken] == ["cancel", "stop"] and taken[0]["member"] == "member-3"
    assert before - 1 <= taken[0]["t"] <= time.time() + 1 and taken[0]["unreadable"] is None
    assert receive_requests(run, set()) == []
    with pytest.raises(StoreError, match="a plain word"):
        write_request(run, "../stop")


STOP = """
import os, sys
from ensemble.run import attach
from ensemble.store import StoreError
import ensemble.store.requests
os.setuid(65534)
try:
    attach(sys.argv[1]).stop()
except StoreError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("mode", [0o700, 0o755], ids=["private", "readable"])
def test_whoever_stops_another_users_run_is_told_whose_it_is(tmp_path: Path, mode: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        there = RunDir(Path(folder) / "run")
        there.requests.mkdir(parents=True, mode=0o700)
        there.events.write_bytes(lines([{"t": 1.0, "type": "run_started", "name": "theirs"}]))
        there.path.chmod(mode)
        command = [sys.executable, "-c", STOP, str(there.path)]
        said = subprocess.run(command, capture_output=True, text=True, cwd="/tmp")
    assert "root (uid 0)" in said.stdout and "only they and root" in said.stdout, said.stderr
    assert str(there.path) in said.stdout and "Errno" not in said.stdout
