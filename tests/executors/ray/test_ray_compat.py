"""The private API of Ray in `ensemble/executors/ray/_compat.py`: what Ray does with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.more]

HERE = Path(__file__).parent
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
    assert seen["address"] == "127.0.0.1", LOOK.format("expect_single_node, make_head_arguments")
    assert seen["in its place"] and seen["spare workers"] == [], LOOK.format("make_head_arguments")
    assert seen["in our group"] == [], LOOK.format("separate_process_groups")
    assert seen["own handler"], LOOK.format("keep_signal_handlers")
    assert seen["others"] == [], LOOK.format("start_core_daemons_only")
    before, after = seen["free"]
    assert before - after == 1.0, LOOK.format("free_resources")
    assert seen["draining"] == [{}, {"this": 4e9}], LOOK.format("list_draining_nodes")
    assert seen["answers"] == [True, False, True], LOOK.format("is_head_answering")
    assert not seen["grows"], LOOK.format("is_autoscaler_growing")
    assert seen["variables"] == [] and seen["later address"] != "127.0.0.1", "a later Ray may have several nodes"
