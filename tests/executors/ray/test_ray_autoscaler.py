"""A cluster without nodes for members: Ray's autoscaler adds them, and removes them when they are idle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit.finished_runs import of_kind, read_state
from kit.leftovers import wait_until
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FakeMultiNodeProvider
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


WORKER = {"CPU": 1, "memory": 2**32, "object_store_memory": 80 * 2**20}


class Provider(FakeMultiNodeProvider):
    """Ray's provider takes `memory`, which every node offers, for a resource of the user's."""

    def create_node_with_resources_and_labels(
        self, node_config: Any, tags: Any, count: int, resources: dict[str, Any], labels: Any
    ) -> None:
        given = {name: amount for name, amount in resources.items() if name != "memory"}
        super().create_node_with_resources_and_labels(node_config, tags, count, given, labels)


def write_config(path: Path, gcs_address: str, most: int) -> Path:
    """A configuration of the autoscaler: a head without cores, and up to `most` nodes of one core each.

    Ray's own for this provider is not in its wheel, so that each key is here.
    """
    on = ("use_node_id_as_ip", "disable_node_updaters", "disable_launch_config_check", "launch_multiple")
    provider = {"type": "external", "module": "test_ray_autoscaler.Provider", **dict.fromkeys(on, True)}
    provider |= {"head_node_id": FAKE_HEAD_NODE_ID, "gcs_address": gcs_address}
    known: dict[str, Any] = {"ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}}
    known["worker"] = {"resources": WORKER, "node_config": {}, "min_workers": 0, "max_workers": most}
    commands = [f"{name}setup_commands" for name in ("", "head_", "worker_")]
    commands += ["initialization_commands", "head_start_ray_commands", "worker_start_ray_commands"]
    lists = [*commands, "cluster_synced_files", "rsync_exclude", "rsync_filter"]
    config: dict[str, Any] = {name: [] for name in lists}
    config |= {"cluster_name": "grows", "max_workers": most, "provider": provider, "available_node_types": known}
    config |= {"head_node_type": "ray.head.default", "upscaling_speed": 1.0, "idle_timeout_minutes": 0.1}
    config |= {"auth": {}, "docker": {}, "file_mounts": {}, "file_mounts_sync_continuously": False}
    path.write_text(json.dumps(config))
    return path


def make_environment(version: int) -> dict[str, str]:
    ours = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
    head = {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID, "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID}
    return {**ours, "RAY_enable_autoscaler_v2": str(int(version == 2)), **(head if version == 2 else {})}
