"""The private API of Ray in `ensemble/executors/ray/_compat.py`: what Ray does with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ensemble.executors.ray import _compat
from ensemble.executors.ray.session import RayConnection

pytestmark = [pytest.mark.ray, pytest.mark.more]

HERE = Path(__file__).parent
STARTS = {
    "ray._private.auto_init_hook.enable_auto_connect",
    "ray._private.node.Node.start_api_server",
    "ray._private.node.Node.start_log_monitor",
    "ray._private.node.Node.start_monitor",
    "ray._private.ray_constants.ENABLE_RAY_CLUSTER",
    "ray._private.services.ConsolePopen",
    "ray._raylet.AuthenticationTokenLoader",
}
ASKS = {
    "ray._private.state.available_resources_per_node",
    "ray._private.worker.global_worker.gcs_client.get_draining_nodes",
    "ray._private.worker.global_worker.gcs_client.internal_kv_exists",
    "ray.autoscaler.v2.sdk.get_cluster_status",
    "ray.experimental.internal_kv._internal_kv_get",
}
LOOK = "look at {} in ensemble/executors/ray/_compat.py"


def test_ray_does_what_it_is_made_to_do(short: Path) -> None:
    """A process starts Ray by `ray.init` and then, with another token, by `RayConnection`."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    paths = os.pathsep.join([str(HERE.parents[2]), str(HERE.parents[1] / "support")])
    own = {"HOME": str(short), "TMPDIR": str(short), "PYTHONPATH": paths}
    own |= {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(HERE / "compat_child.py"), str(short / "r")]
    done = subprocess.run(command, env={**usual, **own}, capture_output=True, text=True)
    subprocess.run(["rm", "-rf", *map(str, short.iterdir())], check=True)
    assert done.returncode == 0, done.stderr + LOOK.format("reset_token")
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["daemons"] == ["gcs_server", "raylet"], "a second Ray, of another token, answers"
    assert seen["address"] == "127.0.0.1", LOOK.format("expect_single_node, start_head")
    assert seen["in its place"] and seen["spare workers"] == [], LOOK.format("start_head")
    assert seen["in our group"] == [], LOOK.format("start_head")
    assert seen["own handler"], "Ray sets a handler in the main thread only, which does not start it"
    assert seen["others"] == [], LOOK.format("start_head")
    before, after = seen["free"]
    assert before - after == 1.0, LOOK.format("list_free_resources")
    assert seen["draining"] == [{}, {"this": 4e9}], LOOK.format("list_draining_nodes")
    assert seen["answers"] == [True, False, True], LOOK.format("is_head_answering")
    assert not seen["grows"], LOOK.format("is_autoscaler_growing")
    assert seen["variables"] == [] and seen["later address"] != "127.0.0.1", "a later Ray may have several nodes"


def ask(ray_id: str) -> dict[str, object]:
    free = _compat.list_free_resources()[ray_id]["CPU"] >= 1
    draining, grows = _compat.list_draining_nodes(60.0), _compat.is_autoscaler_growing()
    return {"answers": _compat.is_head_answering(60.0), "free": free, "draining": draining, "grows": grows}


@pytest.mark.parametrize("changed", [*sorted(STARTS), "process_group", "_temp_dir"])
def test_a_ray_with_other_private_names_or_arguments_starts_and_answers(
    changed: str, short: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is asked of a Ray that runs is removed in turn from the same one."""
    import ray
    from ray._private import services

    find, wanted, removed = _compat._find, set[str](), {changed}

    def find_others(path: str) -> Any:
        wanted.add(path)
        if path in removed:
            raise AttributeError(f"no {path}")
        return find(path)

    def refuse(use: Any, error: Exception) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if changed in options:
                raise error
            return use(*args, **options)

        return call

    monkeypatch.setattr(_compat, "_find", find_others)
    monkeypatch.setattr(ray, "init", refuse(ray.init, RuntimeError(f"Unknown keyword argument(s): {changed}")))
    monkeypatch.setattr(services, "ConsolePopen", refuse(services.ConsolePopen, TypeError(f"no {changed}")))
    monkeypatch.setenv("RAY_TMPDIR", str(short))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    _compat._log_off.cache_clear()
    with caplog.at_level("DEBUG", _compat.log.name):
        connection = RayConnection()
        try:
            [node] = connection.nodes()
            for path in sorted(ASKS):
                removed.add(path)
                assert ask(node["NodeID"]) == {"answers": True, "free": True, "draining": {}, "grows": False}
                removed.discard(path)
        finally:
            connection.close()
    assert wanted - {path.rpartition(".")[0] for path in STARTS} == STARTS | ASKS, "a name has no test"
    off = {record.getMessage() for record in caplog.records}
    assert all(any(path in line for line in off) for path in (changed, *ASKS)), off
    for path in short.iterdir():
        shutil.rmtree(path)
