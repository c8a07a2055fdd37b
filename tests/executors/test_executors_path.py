"""Where the processes of a run look for modules, and what importing the package loads and offers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kit.leftovers import wait_until

import ensemble
from ensemble.executors import EXECUTORS, make_executor
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


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = ("torch", "ray", "optuna", "pyarrow", "cv2", "sklearn", "rich", "numpy")
    uses = "import sys, ensemble; ensemble.Ensemble, ensemble.Search"
    script = f"{uses}; print([m for m in {heavy!r} if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_every_public_name_is_there_and_executors_are_made_by_their_names() -> None:
    for name in ensemble.__all__:
        assert getattr(ensemble, name) is not None
    assert set(ensemble.__all__) <= set(dir(ensemble))
    assert make_executor("inline").name == "inline" and EXECUTORS.names() == ["inline", "local", "ray"]
