"""The processes of a run look for modules where the one that started them does, not in the working directory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kit.leftovers import wait_until

from ensemble.executors.spawn import ForkServer, make_worker_command
from pipelines.ipc.child_processes import child_environment


def end_of_fork_server(log: Path) -> int:
    server = ForkServer(log.parent)
    maps = Path(f"/proc/{server.process.pid}/maps")
    wait_until(lambda: "libtorch" in maps.read_text(), "it imports")  # once its executor is gone, it ends
    server.control.close()
    return server.process.wait(timeout=120)


def end_of_worker(log: Path) -> int:
    ours, theirs = socket.socketpair()
    with theirs, open(log, "wb") as output:
        command, fds = make_worker_command(theirs.fileno(), os.getpid()), (theirs.fileno(),)
        process = subprocess.Popen(command, pass_fds=fds, env=child_environment(), stderr=output)
    ours.close()
    process.wait(timeout=120)
    return "before it sent a job" not in log.read_text()


@pytest.mark.parametrize("end_of", [end_of_fork_server, end_of_worker])
def test_a_module_in_the_working_directory_takes_no_other_ones_place(
    end_of: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert callable(end_of) and end_of(tmp_path / "log") == 0
    assert not (tmp_path / "executed").exists()
