"""Directories for sockets: nobody can take their names first; what killed processes left goes with the next."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from kit.execute_members import an_ensemble, no_sample, samples

import ensemble
from ensemble.executors.node_services import NodeServices
from ensemble.executors.private_directory import LONGEST_SOCKET, PrivateDirectory, remove_stale
from pipelines import PipelineError

HOLD = """
import sys
from ensemble.executors.private_directory import PrivateDirectory
held = PrivateDirectory(sys.argv[1], 20)
(held.path / "feeder-0").touch()
print(held.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _temporary(short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All temporary files of a test but those in `tmp_path` lie there, and none is left."""
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr("tempfile.tempdir", str(short))


def here() -> list[Path]:
    return sorted(Path(os.environ["TMPDIR"]).iterdir())


def start_owners(*prefixes: str) -> tuple[list[subprocess.Popen[str]], list[Path]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    owners = [subprocess.Popen([sys.executable, "-c", HOLD, each], **pipes) for each in prefixes]  # type: ignore
    return owners, [Path(each.stdout.readline().strip()) for each in owners]


def test_what_a_killed_process_left_is_removed_by_the_next_and_nothing_else_is() -> None:
    [killed], [left] = start_owners("held-")
    at_work, not_ours = PrivateDirectory("held-", 20), Path(os.environ["TMPDIR"]) / "held-by-a-user"
    not_ours.mkdir()
    assert here() == sorted([left, at_work.path, not_ours]), "who is at work keeps what it has"
    killed.kill()
    killed.wait()
    cleared: list[Path] = []
    after = PrivateDirectory("held-", 20, cleared.append)
    assert cleared == [left] and here() == sorted([at_work.path, after.path, not_ours])
    assert stat.S_IMODE(after.path.stat().st_mode) == 0o700
    not_ours.rmdir()
    names = {at_work.path.name, after.path.name}
    at_work.close()
    again = PrivateDirectory("held-", 20)
    assert again.path.name not in names, "nobody can take it first"
    again.close()
    after.close()


def test_a_run_with_any_executor_removes_what_killed_drivers_loggers_and_agents_left_and_nothing_else(
    tmp_path: Path,
) -> None:
    owners, left = start_owners("ensemble-", "ensemble-logger-", "ensemble-page-", "ensemble-dry-run-")
    at_work = PrivateDirectory("ensemble-logger-", None)
    inherited = PrivateDirectory("ensemble-logger-", None)
    assert inherited.lock is not None
    heir = subprocess.Popen(["sleep", "600"], pass_fds=(inherited.lock,), text=True)
    inherited._unlock()  # as the kernel does at the end of its owner
    others = PrivateDirectory("ensemble-", None)
    others._unlock()
    is_others = os.geteuid() == 0
    if is_others:
        os.chown(others.path, 65534, 65534)
    for owner in owners:
        owner.kill()
        owner.wait()
    assert here() == sorted([*left, at_work.path, inherited.path, others.path])
    ensemble.submit(an_ensemble([{"lr": 0.1}], epochs=1), tmp_path / "run", executor="inline").wait()
    assert here() == sorted([at_work.path, inherited.path, *([others.path] if is_others else [])])
    heir.kill()
    heir.wait()
    remove_stale("ensemble-")
    assert inherited.path not in here()
    at_work.close()
    others.close()


def test_where_the_path_is_too_long_for_sockets_another_is_taken_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with caplog.at_level(logging.WARNING), selectors.DefaultSelector() as selector:
        services = NodeServices("a", an_ensemble(), selector, lambda event: None)
        address = services.start_feeder(12, expect=0, capacity=64)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as member:
            member.connect(address)
        services.close()
    assert len(os.fsencode(address)) <= LONGEST_SOCKET and not list(long.iterdir())
    assert len([line for line in caplog.messages if str(long) in line and "too long" in line]) == 1


def test_where_a_stream_has_no_fields_no_feeder_is_left() -> None:
    with selectors.DefaultSelector() as selector:
        services = NodeServices("a", an_ensemble(train=samples(96, 0).map(no_sample)), selector, print)
        before = psutil.Process().children()
        try:
            with pytest.raises(PipelineError, match="no sample"):
                services.start_feeder(0, expect=0, capacity=64)
            assert psutil.Process().children() == before
        finally:
            services.close()
