"""What a run shows to other users of its machine, who look at its files, sockets and processes as it goes on."""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.finished_runs import of_kind
from kit.leftovers import find_processes_below, wait_until

ROOT = Path(__file__).parents[2]
OTHER = 170_000 + os.getpid() % 10_000
SECRET = secrets.token_hex(16)
SPEC = """
import time
from pathlib import Path
import numpy as np
from ensemble import Ensemble, Member, Recipe, Resources
from pipelines import Pipeline, sources

def model(params):
    import torch
    return torch.nn.Linear(4, 3)

def loss(model, batch):
    import torch
    if not Path({fast!r}).exists():
        time.sleep(0.2)
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")

def samples(count):
    rng = np.random.default_rng(0)
    arrays = dict(x=rng.normal(size=(count, 4)).astype(np.float32), label=rng.integers(0, 3, count))
    return Pipeline(sources.arrays(**arrays), seed=0)

def spec(password):
    assert len(password) > 32
    cores = Resources(cpus_per_worker=0.5, gpus_per_worker=0.0)
    return Ensemble(
        name="shown", recipe=Recipe(model=model, loss=loss),
        members=[Member({{"lr": 0.1}}), Member({{"lr": 0.2}}, workers=2)],
        train=samples(96), valid=samples(48), epochs=200, batch_size=32, resources=cores,
    )
"""
RUN = "-m ensemble.cli run shown.py --executor local --dashboard-port 0"
RUN += " --notify @../private/webhook --set password=@../private/password"


@pytest.fixture
def base() -> Iterator[Path]:
    """Where everybody may enter, also `home`, `work` and `tmp`, and nobody `private`."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, who looks as another user (setpriv)")
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    base.chmod(0o755)
    for name, mode in (("home", 0o755), ("work", 0o755), ("private", 0o700), ("tmp", 0o1777)):
        (base / name).mkdir()
        (base / name).chmod(mode)  # whatever the umask of the tests is
    (base / "work" / "shown.py").write_text(SPEC.format(fast=str(base / "work" / "fast")))
    (base / "private" / "password").write_text(f"{SECRET}{SECRET}\n")
    (base / "private" / "webhook").write_text(f"http://127.0.0.1:9/{SECRET}\n")
    try:
        yield base
    finally:
        for process in find_processes_below(base / "tmp"):
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(base)


def find_as_other(base: Path, *tests: str, paths: Sequence[str] = ()) -> set[str]:
    """Paths from there on, or of these, for which these tests of `find` hold, asked by the other user."""
    user = ["setpriv", "--reuid", str(OTHER), "--regid", str(OTHER), "--clear-groups"]
    where = [*paths, "-maxdepth", "0"] if paths else [str(base)]
    found = subprocess.run([*user, "find", *where, *tests], capture_output=True, text=True, cwd="/")
    return {path.removeprefix(str(base)) for path in found.stdout.splitlines()}


def ask(host: str, port: int) -> set[int | None]:
    """The statuses with which it answers requests for pages, None for no answer."""
    statuses = set[int | None]()
    for path in ("/", "/metrics", "/api/jobs/", "/logs/"):
        connection = http.client.HTTPConnection(host, port, timeout=5)
        try:
            connection.request("GET", path)
            statuses.add(connection.getresponse().status)
        except (OSError, http.client.HTTPException):
            statuses.add(None)
        finally:
            connection.close()
    return statuses


@pytest.mark.more  # on Ray: tests/executors/ray/test_ray_runs.py has the modes of folders and the token
def test_a_run_without_ray_shows_others_its_command_line_alone(base: Path) -> None:
    run_dir, output = base / "work" / "runs" / "shown", base / "private" / "output"
    own = {"HOME": str(base / "home"), "TMPDIR": str(base / "tmp"), "PYTHONPATH": str(ROOT)}
    with open(output, "ab") as file:
        pipes: dict[str, Any] = {"stdout": file, "stderr": file, "cwd": base / "work", "umask": 0o022}
        environment = {**os.environ, **own, "PYTHONDONTWRITEBYTECODE": "1"}
        run = subprocess.Popen([sys.executable, *RUN.split()], env=environment, **pipes)

    def has_trained() -> bool:
        assert run.poll() is None, output.read_text()
        return len({event["member"] for event in of_kind(run_dir, "epoch")}) == 2

    wait_until(has_trained, "both members have trained")
    assert find_as_other(base, "-readable") == {"", "/home", "/work", "/tmp", "/work/shown.py", "/work/runs"}
    assert find_as_other(base, "-writable") == {"/tmp"}
    processes = find_processes_below(base / "tmp")
    assert len(processes) > 4
    answers, used = list[tuple[str, set[int | None]]](), set[str]()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            assert SECRET not in command
            opened = [file.path for file in process.open_files() if "w" in file.mode or "a" in file.mode]
            used |= {*opened, *(each.path for each in process.memory_maps() if each.path.startswith("/dev/shm/"))}
            used |= {f"/proc/{process.pid}/{name}" for name in ("environ", "fd", "cwd")}
            for connection in process.net_connections("all"):
                assert not str(connection.laddr).startswith("@"), "names of abstract sockets are everybody's"
                used |= {connection.laddr} if connection.family == socket.AF_UNIX else set()
                if connection.status == psutil.CONN_LISTEN:
                    assert connection.laddr.ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
                    answers.append((command, ask(*connection.laddr)))
    for how in ("-readable", "-writable"):  # nor anything that they use outside the run's folder
        assert find_as_other(Path("/"), how, paths=sorted(used - {""})) == set()
    page = [statuses for command, statuses in answers if "ensemble.cli dashboard" in command]
    ranks = [statuses for command, statuses in answers if "forkserver" in command]
    assert page == [{401}] and ranks and len(page) + len(ranks) == len(answers)
    assert all(statuses == {None} for statuses in ranks), "gloo: no answer to who is no rank"
    (base / "work" / "fast").touch()
    assert run.wait(600) == 0, output.read_text()  # that others have called at its ports has harmed nobody
    assert len(of_kind(run_dir, "finished")) == 2 and len(of_kind(run_dir, "started")) == 2
