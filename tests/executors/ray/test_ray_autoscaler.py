"""A cluster without nodes for members: Ray's autoscaler adds them, and removes them when they are idle."""

from __future__ import annotations

from pathlib import Path

import pytest
from autoscaler_nodes import make_environment, write_config
from kit.finished_runs import of_kind, read_state
from kit.leftovers import wait_until
from started_cluster import make_cluster

SPEC = """
from kit.execute_members import an_ensemble
from ensemble import Resources

def spec(marker: str, cpus: float = 0.9):
    quick = [{"lr": lr} for lr in (0.1, 0.2)]
    waits = {"lr": 0.3, "fault": "wait", "after": 4, "marker": marker}
    needs = Resources(cpus_per_worker=cpus, gpus_per_worker=0.0, memory_gb=0.5)
    return an_ensemble([*quick, waits], epochs=2, gate_timeout_s=240.0, resources=needs)
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_nodes_are_added_for_members_that_wait_and_removed_when_idle(version: int, tmp_path: Path) -> None:
    spec, run_dir, marker = tmp_path / "spec.py", tmp_path / "run", tmp_path / "goes on"
    spec.write_text(SPEC)

    with make_cluster() as cluster:
        config = write_config(cluster.directory / "autoscaler.json", f"127.0.0.1:{cluster.port}", most=2)
        cluster.start(cpus=0, variables=make_environment(version), autoscaling_config=config)
        assert len(cluster.find("raylet/raylet")) == 1
        driver = cluster.run("run", spec, "--run-dir", run_dir, "--set", f"marker={marker}")
        try:
            wait_until(lambda: driver.poll() or len(of_kind(run_dir, "finished")) == 2, "nobody trains")
            raylets = len(cluster.find("raylet/raylet"))
            wait_until(lambda: driver.poll() or len(cluster.find("raylet/raylet")) == 2, "no node is removed")
            assert driver.poll() is None, driver.communicate()
            marker.touch()
            _, said = driver.communicate()
            assert driver.returncode == 0, said
        finally:
            driver.kill()
        wait_until(lambda: len(cluster.find("raylet/raylet")) == 1, "the last node is not removed")
    assert raylets <= 3
    members = read_state(run_dir).members.values()
    assert [(each.state, each.attempts) for each in members] == [("finished", 1)] * 3
    assert not of_kind(run_dir, "node_lost"), "what is given back is not lost"
