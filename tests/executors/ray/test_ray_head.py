"""The head of a cluster dies, or does not answer for a while: real raylets, real signals."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from kit.finished_runs import of_kind, read_state
from kit.leftovers import wait_until
from started_cluster import make_cluster

from ensemble.executors.ray.loop import read_patience

SPEC = """
from kit.execute_members import an_ensemble
from ensemble import Resources

def spec(step_s: float = 0.0):
    members = [{"lr": lr, "step_s": step_s} for lr in (0.1, 0.2)]
    return an_ensemble(members, epochs=40, gate_timeout_s=240.0, resources=Resources(cpus_per_worker=0.9))
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("dies", ["the server", "the node"])
def test_a_run_whose_head_dies_ends_in_order_and_is_finished_on_another_cluster(dies: str, tmp_path: Path) -> None:
    run_dir, spec = tmp_path / "run", tmp_path / "spec.py"
    spec.write_text(SPEC)

    def are_training() -> bool:
        """On both nodes, for two epochs."""
        members = read_state(run_dir).members.values() if (run_dir / "events.jsonl").exists() else ()
        return len({member.node for member in members}) == 2 and all((each.epoch or 0) >= 1 for each in members)

    with make_cluster() as cluster:
        cluster.start({})
        driver = cluster.run("run", spec, "--run-dir", run_dir, "--set", "step_s=0.1")
        try:
            wait_until(lambda: driver.poll() is not None or are_training(), "the members do not train")
            [head], ours = cluster.find("gcs_server"), cluster.find_members()
            assert len(ours) >= 2 * 3, "an agent, a feeder and a rank on each node"
            raylet = min(cluster.find("raylet/raylet"), key=psutil.Process.create_time)
            for each in [head, *([*raylet.children(recursive=True), raylet] if dies == "the node" else [])]:
                each.kill()
            _, said = driver.communicate()
        finally:
            driver.kill()
        assert driver.returncode == 75, said
        assert "the head of the Ray cluster does not answer" in said and f"ensemble resume {run_dir}" in said
        assert not psutil.wait_procs(ours, timeout=300)[1]
        before = read_state(run_dir)
        assert before.ended is not None and before.ended.type == "run_stopped"
        assert all(member.checkpoint is not None for member in before.members.values())

        cluster.stop()
        cluster.start({})
        after = cluster.run("resume", run_dir)
        _, said = after.communicate()
    assert after.returncode == 0, said
    assert all(member.state == "finished" for member in read_state(run_dir).members.values())
    assert len(of_kind(run_dir, "started")) == 4, "each member was started twice"


def test_an_operator_who_lets_ray_wait_longer_for_a_head_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_gcs_rpc_server_reconnect_timeout_s", raising=False)
    assert read_patience() == 60.0
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    assert read_patience() == 600.0
