"""Nodes that Ray's autoscaler adds on this machine: real raylets, started by Ray's provider for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FakeMultiNodeProvider

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
    provider = {"type": "external", "module": "autoscaler_nodes.Provider", **dict.fromkeys(on, True)}
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
