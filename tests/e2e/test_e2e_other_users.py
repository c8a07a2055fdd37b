"""What a run shows to other users of its machine: each kind of run as one user, looked at by another.

Neither has a name. Whatever lies in root's home, such as this interpreter, the first one may read all the same.
The umask and the mode of the home are the usual ones, 022 and 0755.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import other_user
import psutil
import pytest
from kit.finished_runs import of_kind
from kit.free_ports import find_free_ports

pytestmark = pytest.mark.more

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
# Of a user who has the cluster's token: what a task of theirs reads of the run's directory, and as whom.
HOLDER = """
import json, os, sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
read = lambda path: (os.getuid(), open(path).readline())
print(json.dumps(ray.get(ray.remote(num_cpus=0)(read).remote(sys.argv[2]))))
"""
JOBS = """
import sys
from ray.job_submission import JobSubmissionClient
print([each.dict() for each in JobSubmissionClient(sys.argv[1]).list_jobs()])
"""


class Owner:
    """The user whose runs are looked at.

    Everybody may enter `base`, and its `home` and `work`; `secrets` are in no argument of a process.
    """

    def __init__(self, base: Path, environment: dict[str, str]) -> None:
        self.base, self.environment, self.secrets = base, environment, [SECRET]
        self.run_dir = base / "work" / "runs" / "shown"

    @property
    def output(self) -> str:
        return (self.base / "private" / "output").read_text()

    def start(self, *command: object) -> subprocess.Popen[bytes]:
        words, pipes = [*AS_OWNER, sys.executable, *map(str, command)], {"cwd": self.base / "work", "umask": 0o022}
        with open(self.base / "private" / "output", "ab") as output:
            return subprocess.Popen(words, env=self.environment, stdout=output, stderr=output, **pipes)  # type: ignore[call-overload, no-any-return]

    def call(self, *command: object) -> subprocess.CompletedProcess[str]:
        words = [*AS_OWNER, sys.executable, *map(str, command)]
        return subprocess.run(words, cwd=self.base / "work", env=self.environment, capture_output=True, text=True)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return of_kind(self.run_dir, kind) if (self.run_dir / "events.jsonl").exists() else []

    def look(self) -> dict[str, str]:
        """Checks what the other user gets at, of all that there is; what commands that listen answer."""
        processes = other_user.find_processes(OWNER)
        names, addresses = other_user.find_sockets(processes)
        assert len(names) > 0 and len(processes) > 4
        targets = {
            "sockets": sorted(names),
            "addresses": sorted(addresses),
            "processes": [p.pid for p in processes],
        }
        paths = sorted({str(path) for path in other_user.find_paths(OWNER, self.base)})
        found = other_user.try_all(OTHER, {"paths": paths, **targets})
        usual = ["", "/work", "/home", "/work/shown.py", "/work/runs"]
        assert found["paths"] == {f"{self.base}{path}": "read" for path in usual}, "nothing else, nothing written"
        assert found["sockets"] == []
        seen = {path.rpartition("/")[2] for path in found["processes"]}
        assert seen == {"cmdline"}, "not the environment, the memory, the files of a process"
        assert not any(secret in text for text in found["processes"].values() for secret in self.secrets)
        return {f"{addresses[at]} at {at[0]}:{at[1]}": found["addresses"][f"{at[0]}:{at[1]}"] for at in addresses}


@pytest.fixture
def owner() -> Iterator[Owner]:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, who becomes one user and the other (setpriv)")
    base = Path(tempfile.mkdtemp(prefix="o", dir="/tmp"))  # Ray's sockets lie below
    for name in ("home", "work", "private"):
        (base / name).mkdir()
    (base / "work" / "shown.py").write_text(SPEC.format(fast=str(base / "work" / "fast")))
    for name, text in {"password": f"{SECRET}{SECRET}\n", "webhook": f"http://127.0.0.1:9/{SECRET}\n"}.items():
        (base / "private" / name).write_text(text)
    (base / "private").chmod(0o700)
    for path in (base, *base.rglob("*")):
        os.chown(path, OWNER, OWNER)
    base.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**kept, "HOME": str(base / "home"), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    try:
        yield Owner(base, environment)
    finally:
        left = other_user.find_processes(OWNER)
        for each in left:
            with contextlib.suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(left, timeout=60)
        shutil.rmtree(base)


def wait_until(is_met: Callable[[], object], owner: Owner, *processes: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 600
    while not is_met():
        ended = [process for process in processes if process.poll() is not None]
        assert not ended and time.monotonic() < until, owner.output if ended else is_met
        time.sleep(0.2)


def has_trained(owner: Owner) -> bool:
    return len({event["member"] for event in owner.events("epoch")}) == 2


OPTIONS = ("--notify", "@../private/webhook", "--set", "password=@../private/password")


def test_a_run_without_ray_shows_others_its_command_line_alone(owner: Owner) -> None:
    run = owner.start(
        "-m", "ensemble.cli", "run", "shown.py", "--executor", "local", "--dashboard-port", "0", *OPTIONS
    )
    wait_until(lambda: has_trained(owner), owner, run)
    answers = owner.look()
    page = [statuses for command, statuses in answers.items() if "ensemble.cli dashboard" in command]
    ranks = [statuses for command, statuses in answers.items() if "forkserver" in command]
    assert [set(statuses.split()) for statuses in page] == [{"401"}]
    assert all(re.search(r" at (::ffff:)?127\.0\.0\.1:\d+$", command) for command in answers)
    assert len(page) + len(ranks) == len(answers) and set(ranks) == {""}, "gloo: no answer to who is no rank"
    (owner.base / "work" / "fast").touch()
    assert run.wait(600) == 0, owner.output  # that others have called at its ports has harmed nobody
    assert len(owner.events("finished")) == 2 and len(owner.events("started")) == 2


def check_ray(answers: dict[str, str]) -> None:
    """Pages ask for a token, but for the empty page of the dashboard; metrics, numbers of resources, do not."""
    for command, statuses in answers.items():
        if "dashboard.py" in command and statuses.startswith("200 401"):
            continue
        exports = "dashboard" in command.lower() or "autoscaler/_private/monitor.py" in command
        is_metrics = exports and set(statuses.split()) == {"200"}
        assert is_metrics or set(statuses.split()) <= {"401"}, f"{command}: {statuses}"


@pytest.mark.ray
def test_a_cluster_with_a_token_is_its_users_and_of_all_who_have_the_token(owner: Owner) -> None:
    token = secrets.token_hex(32)
    (owner.base / "private" / "token").write_text(token)
    port, client, dashboard, *agent = find_free_ports(5)
    owner.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(owner.base / "private" / "token")}
    options: list[object] = ["--port", port, "--node-ip-address", "127.0.0.1", "--num-cpus", 2]
    options += ["--dashboard-host", "127.0.0.1", "--dashboard-port", dashboard, "--disable-usage-stats"]
    options += ["--ray-client-server-port", client]
    options += ["--dashboard-agent-listen-port", agent[0], "--dashboard-agent-grpc-port", agent[1]]
    options += ["--temp-dir", owner.base / "private" / "r", "--object-store-memory", 80 * 2**20]
    started = owner.call("-m", "ray.scripts.scripts", "start", "--head", *options)
    assert started.returncode == 0, started.stderr
    url = f"http://127.0.0.1:{dashboard}"
    submit = ("-m", "ensemble.cli", "submit", "shown.py", "--address", url, *OPTIONS[2:])
    wait_until(lambda: owner.call(*submit, "--run-dir", owner.run_dir).returncode == 0, owner)
    wait_until(lambda: has_trained(owner), owner)
    owner.secrets.append(token)
    check_ray(owner.look())
    jobs = owner.call("-c", JOBS, url).stdout
    assert "shown.py" in jobs and SECRET not in jobs, "nor do those see it who have the token"
    stranger = {**owner.environment, "RAY_AUTH_TOKEN_PATH": "", "RAY_AUTH_TOKEN": "0" * 64}
    ask = [sys.executable, "-c", HOLDER, f"127.0.0.1:{port}", str(owner.run_dir / "events.jsonl")]
    refused = subprocess.run(ask, env=stranger, capture_output=True, text=True)
    assert refused.returncode != 0 and "AuthenticationError" in refused.stderr
    holder = subprocess.run(
        ask, env={**stranger, "RAY_AUTH_TOKEN": token}, capture_output=True, text=True, check=True
    )
    user, line = json.loads(holder.stdout)
    assert user == OWNER and "type" in json.loads(line), "who has the token is the cluster's user"
    (owner.base / "work" / "fast").touch()
    wait_until(lambda: owner.events("run_finished"), owner)
    assert len(owner.events("finished")) == 2
