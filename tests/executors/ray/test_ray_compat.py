"""The private API of Ray in `ensemble/executors/ray/_compat.py`: what Ray does without it, and with it."""

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
NO_LONGER = "needed no longer? " + LOOK


def test_ray_does_what_it_is_made_to_do_and_still_needs_to_be_made_to(short: Path) -> None:
    """A process starts Ray by `ray.init` and then, with another token, by `RayConnection`."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    paths = os.pathsep.join([str(HERE.parents[2]), str(HERE.parents[1] / "support")])
    own = {"HOME": str(short), "TMPDIR": str(short), "PYTHONPATH": paths}
    own |= {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(HERE / "compat_child.py"), str(short / "r")]
    done = subprocess.run(command, env={**usual, **own}, capture_output=True, text=True)
    subprocess.run(["rm", "-rf", *map(str, short.iterdir())], check=True)
    assert done.returncode == 0, done.stderr + LOOK.format("reset_token")
    said = json.loads(done.stdout.splitlines()[-1])
    bare, ours = said["by itself"], said["session"]
    assert ours["daemons"] == ["gcs_server", "raylet"], "a second Ray, of another token, answers"
    assert bare["address"] != "127.0.0.1", NO_LONGER.format("expect_single_node")
    assert ours["address"] == "127.0.0.1", LOOK.format("expect_single_node, make_head_arguments")
    assert ours["in its place"], LOOK.format("make_head_arguments")
    assert {"gcs_server", "raylet"} <= set(bare["in our group"]), NO_LONGER.format("separate_process_groups")
    assert ours["in our group"] == [], LOOK.format("separate_process_groups")
    assert not bare["own handler"], NO_LONGER.format("keep_signal_handlers")
    assert ours["own handler"], LOOK.format("keep_signal_handlers")
    assert len(bare["others"]) == 3, NO_LONGER.format("start_core_daemons_only")
    assert ours["others"] == [], LOOK.format("start_core_daemons_only")
    assert ours["spare workers"] == [], LOOK.format("make_head_arguments")
    before, after = said["free"]
    assert before - after == 1.0, LOOK.format("free_resources")
    assert said["draining"] == [{}, {"this": 4e9}], LOOK.format("list_draining_nodes")
    assert said["answers"] == [True, False, True], LOOK.format("is_head_answering")
    assert not said["grows"], LOOK.format("is_autoscaler_growing")
    assert (said["variables"], said["later address"] != "127.0.0.1") == ([], True), (
        "a later Ray may have several nodes"
    )
