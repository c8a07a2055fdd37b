"""What a run shows to other users of its machine: a run as one user, looked at by another.

Neither has a name. Whatever lies in root's home, such as this interpreter, the first one may read all the same.
The umask and the mode of the home are the usual ones, 022 and 0755.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import other_user
import psutil
import pytest
from kit.finished_runs import of_kind
from kit.leftovers import wait_until

ROOT = Path(__file__).parents[2]
OWNER, OTHER = 150_000 + os.getpid() % 10_000, 170_000 + os.getpid() % 10_000
SECRET = secrets.token_hex(16)
AS_OWNER = [
    *f"setpriv --reuid {OWNER} --regid {OWNER} --clear-groups --inh-caps +dac_read_search".split(),
    *("--ambient-caps", "+dac_read_search", "--bounding-set", "-all,+dac_read_search"),
]
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
    """Where everybody may enter, also `home` and `work`, and nobody `private`; all is the owner's."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, who becomes one user and the other (setpriv)")
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    for name in ("home", "work", "private"):
        (base / name).mkdir()
    (base / "work" / "shown.py").write_text(SPEC.format(fast=str(base / "work" / "fast")))
    (base / "private" / "password").write_text(f"{SECRET}{SECRET}\n")
    (base / "private" / "webhook").write_text(f"http://127.0.0.1:9/{SECRET}\n")
    (base / "private").chmod(0o700)
    for path in (base, *base.rglob("*")):
        os.chown(path, OWNER, OWNER)
    base.chmod(0o755)
    try:
        yield base
    finally:
        processes = other_user.find_processes(OWNER)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=60)
        shutil.rmtree(base)


def look(base: Path) -> dict[str, str]:
    """Checks what the other user gets at, of all that there is; what commands that listen answer."""
    processes = other_user.find_processes(OWNER)
    names, addresses = other_user.find_sockets(processes)
    assert len(names) > 0 and len(processes) > 4
    targets: dict[str, Any] = {"sockets": sorted(names), "addresses": sorted(addresses)}
    targets["processes"] = [process.pid for process in processes]
    targets["paths"] = sorted({str(path) for path in other_user.find_paths(OWNER, base)})
    found = other_user.try_all(OTHER, targets)
    usual = ["", "/work", "/home", "/work/shown.py", "/work/runs"]
    assert found["paths"] == {f"{base}{path}": "read" for path in usual}, "nothing else, nothing written"
    assert found["sockets"] == []
    seen = {path.rpartition("/")[2] for path in found["processes"]}
    assert seen == {"cmdline"}, "not the environment, the memory, the files of a process"
    assert not any(SECRET in text for text in found["processes"].values())
    return {f"{addresses[at]} at {at[0]}:{at[1]}": found["addresses"][f"{at[0]}:{at[1]}"] for at in addresses}


@pytest.mark.more  # on Ray: tests/executors/ray/test_ray_runs.py has the modes of folders and the token
def test_a_run_without_ray_shows_others_its_command_line_alone(base: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"HOME": str(base / "home"), "PYTHONPATH": str(ROOT), "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    run_dir, output = base / "work" / "runs" / "shown", base / "private" / "output"
    with open(output, "ab") as file:
        pipes: dict[str, Any] = {"stdout": file, "stderr": file, "cwd": base / "work", "umask": 0o022}
        run = subprocess.Popen([*AS_OWNER, sys.executable, *RUN.split()], env={**os.environ, **own}, **pipes)

    def has_trained() -> bool:
        assert run.poll() is None, output.read_text()
        return len({event["member"] for event in of_kind(run_dir, "epoch")}) == 2

    wait_until(has_trained, "both members have trained")
    answers = look(base)
    page = [statuses for command, statuses in answers.items() if "ensemble.cli dashboard" in command]
    ranks = [statuses for command, statuses in answers.items() if "forkserver" in command]
    assert [set(statuses.split()) for statuses in page] == [{"401"}]
    assert all(re.search(r" at (::ffff:)?127\.0\.0\.1:\d+$", command) for command in answers)
    assert len(page) + len(ranks) == len(answers) and set(ranks) == {""}, "gloo: no answer to who is no rank"
    (base / "work" / "fast").touch()
    assert run.wait(600) == 0, output.read_text()  # that others have called at its ports has harmed nobody
    assert len(of_kind(run_dir, "finished")) == 2 and len(of_kind(run_dir, "started")) == 2
