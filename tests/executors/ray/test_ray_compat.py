"""The private API of Ray in `ensemble/executors/ray/_compat.py`: what Ray does without it, and with it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.more]

HERE = Path(__file__).parent
LOOK = "look at {} in ensemble/executors/ray/_compat.py"


@pytest.fixture(scope="module")
def said() -> Iterator[dict[str, Any]]:
    """What a process says that starts Ray by `ray.init` and then, with another token, by `RayConnection`."""
    short = Path("/tmp") / f"t{secrets.token_hex(4)}"  # Ray's sockets lie below
    short.mkdir(mode=0o700)
    usual = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own = {
        "HOME": str(short),
        "TMPDIR": str(short),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), str(HERE.parents[1] / "support")]),
    }
    own |= {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(HERE / "compat_child.py"), str(short / "r")]
    done = subprocess.run(command, env={**usual, **own}, capture_output=True, text=True)
    try:
        assert done.returncode == 0, done.stderr + LOOK.format("reset_token")
        yield json.loads(done.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(short)


def test_ray_forgets_the_token_that_it_was_begun_with(said: dict[str, Any]) -> None:
    assert said["session"]["daemons"] == ["gcs_server", "raylet"], "a second Ray, of another token, answers"


def test_a_ray_of_our_own_is_where_and_what_it_was_told(said: dict[str, Any]) -> None:
    assert said["by itself"]["address"] != "127.0.0.1", "needed no longer? " + LOOK.format("expect_single_node")
    assert said["session"]["address"] == "127.0.0.1", LOOK.format("expect_single_node, make_head_arguments")
    assert said["session"]["in its place"], LOOK.format("make_head_arguments")


def test_rays_daemons_have_process_groups_of_their_own(said: dict[str, Any]) -> None:
    assert {"gcs_server", "raylet"} <= set(said["by itself"]["in our group"]), "needed no longer?"
    assert said["session"]["in our group"] == [], LOOK.format("separate_process_groups")


def test_ray_leaves_the_handler_of_sigterm_alone(said: dict[str, Any]) -> None:
    assert not said["by itself"]["own handler"], "needed no longer? " + LOOK.format("keep_signal_handlers")
    assert said["session"]["own handler"], LOOK.format("keep_signal_handlers")


def test_ray_starts_only_what_is_used(said: dict[str, Any]) -> None:
    assert len(said["by itself"]["others"]) == 3, "needed no longer? " + LOOK.format("start_core_daemons_only")
    assert said["session"]["others"] == [], LOOK.format("start_core_daemons_only")
    assert said["session"]["spare workers"] == [], LOOK.format("make_head_arguments")


def test_ray_says_what_of_a_node_is_free(said: dict[str, Any]) -> None:
    before, after = said["free"]
    assert before - after == 1.0, LOOK.format("free_resources")


def test_ray_says_which_nodes_it_drains(said: dict[str, Any]) -> None:
    assert said["draining"] == [{}, {"this": 4e9}], LOOK.format("list_draining_nodes")


def test_ray_says_in_time_whether_its_head_is_there_and_whether_it_grows(said: dict[str, Any]) -> None:
    assert said["answers"] == [True, False, True], LOOK.format("is_head_answering")
    assert not said["grows"], LOOK.format("is_autoscaler_growing")
