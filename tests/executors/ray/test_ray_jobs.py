"""`ensemble submit`: runs as jobs of a real Ray head, started for these tests, with token authentication."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kit.finished_runs import of_kind, read_state
from kit.free_ports import find_free_ports
from kit.leftovers import wait_until
from started_cluster import StartedCluster, make_cluster

from ensemble.executors.ray.jobs import build_entrypoint, choose_submission_id, find_token
from ensemble.spec import SpecError

SPEC = """
import helper

def spec(epochs: int = 2):
    return helper.declared(epochs)
"""
HELPER = """
import os, time
import numpy as np
from ensemble import Ensemble, Recipe, Resources
from pipelines import Pipeline, sources

HOLD = os.environ.get("HOLD", "")

def model(params):
    import torch
    return torch.nn.Linear(4, 3)

def loss(net, batch):
    import torch
    time.sleep(0.3 if os.path.exists(HOLD) else 0)
    return torch.nn.functional.cross_entropy(net(batch["x"]), batch["label"], reduction="none")

def declared(epochs):
    x = np.random.default_rng(0).normal(size=(96, 4)).astype(np.float32)
    return Ensemble(name="job", recipe=Recipe(model=model, loss=loss), members=[{"lr": 0.1}, {"lr": 0.2}],
                    epochs=epochs, batch_size=32, train=Pipeline(sources.arrays(x=x, label=np.arange(96) % 3)),
                    resources=Resources(cpus_per_worker=0.5))
"""

# Prints what Ray shows of the job ensemble-good, and the names of all actors.
SHOW = """
import json, sys
from ray.job_submission import JobSubmissionClient
from ray.util.state import list_actors
metadata = JobSubmissionClient(sys.argv[1]).get_job_info("ensemble-good").metadata
print(json.dumps({"metadata": metadata, "actors": [actor.name for actor in list_actors(sys.argv[1])]}))
"""


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="module")
def cluster(hold: Path) -> Iterator[StartedCluster]:
    """A head that takes jobs; its clients name its address, and know the file of its token."""
    dashboard, agent = find_free_ports(2)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with make_cluster(PATH=path, HOLD=str(hold)) as made:
        ports = {"dashboard_port": dashboard, "dashboard_agent_listen_port": agent}
        made.start(cpus=2, include_dashboard="true", dashboard_host="127.0.0.1", **ports)
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", dashboard)) == 0, "the job server")
        for variable in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
            del made.environment[variable]
        made.url = f"http://127.0.0.1:{dashboard}"
        yield made


def call(cluster: StartedCluster, *arguments: object) -> tuple[int, str, str]:
    with cluster.run(*arguments) as process:
        out, err = process.communicate()
    return process.returncode, out, err


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "helper.py").write_text(HELPER)
    (folder / "job.py").write_text(SPEC)
    return folder / "job.py"


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_is_a_job_of_its_name_that_goes_on_where_it_was_stopped(
    cluster: StartedCluster, hold: Path, spec: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    submit = ("submit", spec, "--address", cluster.url, "--run-dir", run_dir, "--set", "epochs=30")
    hold.touch()
    first = cluster.run(*submit, "--follow")
    wait_until(lambda: of_kind(run_dir, "epoch") or first.poll() is not None, "an epoch")
    assert first.poll() is None, first.communicate()
    code, out, err = call(cluster, *submit)
    assert (code, out, err) == (0, "ensemble-job\n", "ensemble: the job ensemble-job is running already\n")
    code, out, err = call(cluster, *submit, "--set", "epochs=3")
    assert (code, out) == (2, "") and "give another --name" in err and "epochs=..." in err
    assert err.count("\n") == 1 and "epochs=30" not in err
    assert call(cluster, "stop", run_dir)[0] == 0
    said, err = first.communicate()
    assert first.returncode == 1, said + err  # no member has finished
    assert said.startswith("ensemble-job\n") and "stopped" in said
    assert {m.state for m in read_state(run_dir).members.values()} == {"stopped"}

    hold.unlink()
    code, out, err = call(cluster, *submit, "--follow")
    assert code == 0, out + err
    assert out.startswith("ensemble-job.2\n") and "2/2 finished" in out
    state = read_state(run_dir)
    assert {(m.state, m.attempts) for m in state.members.values()} == {("finished", 2)}


@pytest.mark.more
@pytest.mark.ray
def test_a_job_ends_with_the_status_of_its_run_and_mistakes_are_one_line(
    cluster: StartedCluster, spec: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    to = ("submit", spec, "--address", cluster.url, "--run-dir", run_dir)
    code, out, err = call(cluster, *to, "--name", "good", "--dashboard-port", "0", "--follow")
    assert code == 0, out + err
    assert out.startswith("ensemble-good\n") and "2/2 finished" in out
    shown = r"live page: http://127\.0\.0\.1:\d+/ on \S+ \(the address with its token: (\S+)\)"
    page = re.search(shown, out)
    assert page is not None and "token=" not in out, "what Ray shows leads to its page, without it"
    assert not Path(page[1]).exists(), "it goes with the page"
    state = read_state(run_dir)
    assert state.executor == "ray" and {member.state for member in state.members.values()} == {"finished"}
    asks = [sys.executable, "-c", SHOW, cluster.url]
    with_mode = {**cluster.environment, "RAY_AUTH_MODE": "token"}
    answer = subprocess.run(asks, env=with_mode, capture_output=True, text=True, check=True)
    shown = json.loads(answer.stdout.splitlines()[-1])
    assert shown["metadata"] == {
        "ensemble": "good", "run_dir": str(run_dir), "progress": f"ensemble status {run_dir}",
        "live_page": f"ensemble dashboard {run_dir}",
    }  # fmt: skip
    [agent] = [name for name in shown["actors"] if name.startswith("run/")]
    assert re.fullmatch(rf"run/{re.escape(socket.gethostname())}/agent-[0-9a-f]+", agent)
    code, out, _ = call(cluster, *to, "--name", "bad", "--set", "epoks=1", "--follow")
    assert code == 2 and "did you mean 'epochs'" in out

    (tmp_path / "token").write_text(secrets.token_hex(32))
    stranger = replace(
        cluster, environment={**cluster.environment, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    )
    code, _, err = call(stranger, *to)
    assert code == 2 and "requires a token" in err and err.count("\n") == 1
    nowhere = f"http://127.0.0.1:{find_free_ports(1)[0]}"
    code, _, err = call(cluster, "submit", spec, "--address", nowhere)
    assert code == 2 and f"no Ray answers at {nowhere}" in err and err.count("\n") == 1


def test_the_command_names_the_spec_as_the_job_sees_it_and_a_secret_by_its_file(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_submission_id("a b/c", []) == "ensemble-a-b-c"
    assert choose_submission_id("x", ["ensemble-x", "ensemble-x.2", None, "other"]) == "ensemble-x.3"
    monkeypatch.chdir(tmp_path)
    said = build_entrypoint(spec, tmp_path, Path("/runs/a b"), ["epochs=2"])
    assert said == "python -m ensemble.cli run work/job.py --run-dir '/runs/a b' --set epochs=2"
    with pytest.raises(SpecError, match="--working-dir"):
        build_entrypoint(spec, tmp_path / "elsewhere", Path("/runs/a"), [])
    with pytest.raises(SpecError, match="there is no spec file"):
        build_entrypoint(tmp_path / "nope.py", tmp_path, Path("/runs/a"), [])
    given = ["password=@secret.txt", "other=@/etc/x", "at=@@home"]
    said = build_entrypoint(spec, tmp_path, Path("/runs/a"), given)
    assert said.endswith(f"--set password=@{tmp_path}/secret.txt --set other=@/etc/x --set at=@@home")


def test_a_token_is_looked_for_where_ray_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(variable, raising=False)
    assert find_token() is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("t")
    assert find_token() == str(tmp_path / ".ray" / "auth_token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "x")
    assert find_token() == "RAY_AUTH_TOKEN_PATH"


@pytest.mark.more
@pytest.mark.ray
def test_rays_own_submission_runs_an_ensemble_too(cluster: StartedCluster, spec: Path, tmp_path: Path) -> None:
    """As users of `ray job submit` do it, who name no address to the run."""
    run_dir = tmp_path / "run"
    submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", cluster.url, "--"]
    submit += [sys.executable, "-m", "ensemble.cli", "run", str(spec), "--run-dir", str(run_dir)]
    without = {**cluster.environment, "RAY_AUTH_MODE": "disabled"}
    assert subprocess.run(submit, env=without, capture_output=True).returncode != 0 and not run_dir.exists()
    with_mode = {**cluster.environment, "RAY_AUTH_MODE": "token"}

    def is_taken() -> subprocess.CompletedProcess[str] | None:
        done = subprocess.run(submit, env=with_mode, capture_output=True, text=True)
        # a head answers before the agent that starts its jobs does
        return done if "No available agent" not in done.stderr else None

    done = wait_until(is_taken, "the head takes jobs")
    assert done.returncode == 0 and "succeeded" in done.stdout + done.stderr, done.stdout + done.stderr
    state = read_state(run_dir)
    assert state.executor == "ray" and {m.state for m in state.members.values()} == {"finished"}
