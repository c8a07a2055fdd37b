"""The head of a cluster dies, or does not answer for a while: real raylets, real signals."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kit.event_dicts import fold, read_events
from kit.leftovers import wait_until
from started_cluster import StartedCluster, make_cluster

from ensemble.executors.ray.loop import read_patience
from ensemble.store import RunState

SPEC = """
from kit.execute_members import an_ensemble
from ensemble import Resources

def spec(step_s: float = 0.0):
    members = [{"lr": lr, "step_s": step_s} for lr in (0.1, 0.2)]
    return an_ensemble(members, epochs=40, gate_timeout_s=240.0, resources=Resources(cpus_per_worker=0.9))
"""


@pytest.fixture
def cluster() -> Iterator[StartedCluster]:
    with make_cluster() as made:
        made.start({})
        yield made


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "spec.py").write_text(SPEC)
    return tmp_path / "spec.py"


def read_state(run_dir: Path) -> RunState:
    return fold(read_events(run_dir / "events.jsonl"))


def start_run(cluster: StartedCluster, spec: Path, run_dir: Path) -> subprocess.Popen[str]:
    """Start a run, and wait until its members on both nodes have trained for two epochs."""
    driver = cluster.run("run", spec, "--run-dir", run_dir, "--set", "step_s=0.1")

    def are_training() -> bool:
        if not (run_dir / "events.jsonl").exists():
            return False
        members = list(read_state(run_dir).members.values())
        return len({member.node for member in members}) == 2 and all((each.epoch or 0) >= 1 for each in members)

    wait_until(lambda: driver.poll() is not None or are_training(), "the members do not train")
    assert driver.poll() is None, driver.communicate()
    return driver


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("dies", ["the server", "the node"])
def test_a_run_whose_head_dies_ends_in_order_and_is_finished_on_another_cluster(
    dies: str, cluster: StartedCluster, spec: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    driver = start_run(cluster, spec, run_dir)
    try:
        [head], ours = cluster.find("gcs_server"), cluster.find_members()
        assert len(ours) >= 2 * 3, "an agent, a feeder and a rank on each node"
        killed = time.monotonic()
        head.kill()
        if dies == "the node":
            raylet = min(cluster.find("raylet/raylet"), key=psutil.Process.create_time)
            for each in [*raylet.children(recursive=True), raylet]:
                each.kill()
        _, said = driver.communicate()
        ended_s = time.monotonic() - killed
    finally:
        driver.kill()
    assert driver.returncode == 75, said
    assert "the head of the Ray cluster does not answer" in said and f"ensemble resume {run_dir}" in said
    _, left = psutil.wait_procs(ours, timeout=300)
    assert not left
    gone_s = time.monotonic() - killed
    print(f"{dies} of the head killed: the run ended after {ended_s:.1f} s, its last process after {gone_s:.1f} s")
    before = read_state(run_dir)
    assert before.ended is not None and before.ended.type == "run_stopped"
    assert all(member.checkpoint is not None for member in before.members.values())

    cluster.stop()
    cluster.start({})
    after = cluster.run("resume", run_dir)
    _, said = after.communicate()
    assert after.returncode == 0, said
    state = read_state(run_dir)
    assert all(member.state == "finished" for member in state.members.values())
    resumed = [event for event in read_events(run_dir / "events.jsonl") if event["type"] == "started"]
    assert len(resumed) == 4, "each member was started twice"


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_goes_on_when_the_head_has_not_answered_for_ten_seconds(
    cluster: StartedCluster, spec: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    driver = start_run(cluster, spec, run_dir)
    try:
        [head] = cluster.find("gcs_server")
        head.send_signal(signal.SIGSTOP)
        time.sleep(10)
        trained = [member.epoch for member in read_state(run_dir).members.values()]
        head.send_signal(signal.SIGCONT)
        _, said = driver.communicate()
    finally:
        driver.kill()
    assert driver.returncode == 0, said
    members = read_state(run_dir).members.values()
    assert [member.attempts for member in members] == [1, 1] and None not in trained
    assert all(member.state == "finished" for member in members)


def test_an_operator_who_lets_ray_wait_longer_for_a_head_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_gcs_rpc_server_reconnect_timeout_s", raising=False)
    assert read_patience() == 60.0
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    assert read_patience() == 600.0
