"""Directories for sockets: nobody can take their names first; what killed processes left goes with the next."""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from execute_members import an_ensemble, no_sample, samples

from ensemble.executors.node_services import NodeServices
from ensemble.executors.private_directory import LONGEST_SOCKET, PrivateDirectory
from pipelines import PipelineError

HOLD = """
import sys
from ensemble.executors.private_directory import PrivateDirectory
held = PrivateDirectory("held-", 20)
(held.path / "feeder-0").touch()
print(held.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory of this test's for temporary files, with a short path."""
    short = Path("/tmp") / f"t{secrets.token_hex(4)}"
    short.mkdir()
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr("tempfile.tempdir", str(short))
    yield
    left = list(short.iterdir())
    short.rmdir() if not left else None
    assert not left


def here() -> list[Path]:
    return sorted(Path(os.environ["TMPDIR"]).iterdir())


def test_what_a_killed_process_left_is_removed_by_the_next_and_nothing_else_is() -> None:
    command = [sys.executable, "-c", HOLD]
    killed = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    left = Path(killed.stdout.readline().strip())
    at_work = PrivateDirectory("held-", 20)
    not_ours = Path(os.environ["TMPDIR"]) / "held-by-a-user"
    not_ours.mkdir()
    assert here() == sorted([left, at_work.path, not_ours]), "who is at work keeps what it has"

    killed.kill()
    killed.wait()
    cleared: list[Path] = []
    after = PrivateDirectory("held-", 20, cleared.append)
    assert cleared == [left]
    assert here() == sorted([at_work.path, after.path, not_ours])
    assert stat.S_IMODE(after.path.stat().st_mode) == 0o700
    not_ours.rmdir()
    at_work.close()
    after.close()


def test_a_name_that_others_could_know_is_not_used() -> None:
    first, second = PrivateDirectory("held-", 20), PrivateDirectory("held-", 20)
    names = {first.path.name, second.path.name}
    first.close()
    again = PrivateDirectory("held-", 20)
    assert again.path.name not in names
    again.close()
    second.close()


def test_another_agent_takes_over_the_directory_and_so_the_addresses_of_one_that_ended() -> None:
    with selectors.DefaultSelector() as selector:
        ended = NodeServices("a", an_ensemble(), selector, lambda event: None)
        ended._private._unlock()  # as the kernel does
        ended._meter.close()
        (ended.directory / "feeder-0").touch()
        after = NodeServices("a", an_ensemble(), selector, lambda event: None, ended.directory)
        assert after.directory == ended.directory
        bystander = NodeServices("b", an_ensemble(), selector, lambda event: None)
        assert after.directory.exists(), "it is in use again"
        bystander.close()
        after.close()


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
        services = NodeServices(
            "a", an_ensemble(train=samples(96, 0).map(no_sample)), selector, lambda event: None
        )
        before = psutil.Process().children()
        try:
            with pytest.raises(PipelineError, match="no sample"):
                services.start_feeder(0, expect=0, capacity=64)
            assert psutil.Process().children() == before
        finally:
            services.close()
