"""Runs that share a cluster of two nodes, which has room for one member of two workers at a time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from finished_runs import finished_hashes, of_kind
from sharing_child import declared
from started_cluster import HERE, StartedCluster, make_cluster
from two_nodes import expect_weights, wait_for_nodes

pytestmark = [pytest.mark.ray, pytest.mark.more]

LONG = [{"lr": 0.1, "step_s": 0.2}]
EPOCHS = 150  # of a second a step until there is a marker
ACTORS = """import ray; ray.init(log_to_driver=False)
print(ray.util.list_named_actors(all_namespaces=True))
from ensemble.executors.ray.registry import decode_rows, read_rows
print([(row.name, row.claim.priority, row.running) for row in decode_rows(read_rows())])"""


class Sharing:
    """Drivers on a cluster, each with the directory of its run."""

    def __init__(self, cluster: StartedCluster, folder: Path) -> None:
        self.cluster, self.folder, self.drivers = cluster, folder, dict[str, subprocess.Popen[str]]()

    def start(self, name: str, **options: Any) -> Path:
        command = [sys.executable, str(HERE / "sharing_child.py"), str(self.folder / name), json.dumps(options)]
        self.drivers[name] = subprocess.Popen(
            command, env=self.cluster.environment, stderr=subprocess.PIPE, text=True
        )
        return self.folder / name

    def wait_until(self, holds: Callable[[], object]) -> None:
        until = time.monotonic() + 600
        while not holds():
            assert time.monotonic() < until
            for name, driver in self.drivers.items():
                if driver.poll():
                    pytest.fail(f"{name}: {driver.communicate()[1][-3000:]}")
            time.sleep(0.1)

    def end(self) -> None:
        for name, driver in self.drivers.items():
            _, said = driver.communicate(timeout=600)
            assert driver.returncode == 0, (name, said[-3000:])

    def ask(self) -> list[str]:
        """The named actors that are left, and the runs that know each other."""
        command = [sys.executable, "-c", ACTORS]
        done = subprocess.run(command, env=self.cluster.environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()


@pytest.fixture(scope="module")
def cluster() -> Iterator[StartedCluster]:
    with make_cluster() as made:
        made.start({})
        wait_for_nodes(made.environment, 2)
        yield made


@pytest.fixture
def sharing(cluster: StartedCluster, tmp_path: Path) -> Iterator[Sharing]:
    made = Sharing(cluster, tmp_path)
    yield made
    for driver in made.drivers.values():
        driver.kill()
        driver.wait()


def gives_back(run_dir: Path) -> bool:
    """Whether a run has a member, and offers nothing to its next one."""
    nodes = of_kind(run_dir, "node")
    return bool(of_kind(run_dir, "started")) and nodes[-1]["cpus"] == 0.0


def list_turns(*run_dirs: Path) -> list[str]:
    started = [
        (event["t"], run_dir.name, event["member"])
        for run_dir in run_dirs
        for event in of_kind(run_dir, "started")
    ]
    return [f"{name} {member}" for _, name, member in sorted(started)]


def test_runs_take_turns_also_when_the_one_that_keeps_the_registry_is_killed_and_leave_nothing(
    sharing: Sharing, tmp_path: Path
) -> None:
    first = sharing.start("first", members=LONG, epochs=1000)
    sharing.wait_until(lambda: of_kind(first, "started"))
    gates = {name: tmp_path / f"go-{name}" for name in "bc"}
    members = {
        name: [{"lr": 0.1, "fault": "wait", "after": 2, "marker": str(gate)}, {"lr": 0.2}]
        for name, gate in gates.items()
    }
    run_dirs = {name: sharing.start(name, members=members[name]) for name in "bc"}
    sharing.wait_until(lambda: all(of_kind(run_dir, "resources") for run_dir in run_dirs.values()))
    actors, rows = sharing.ask()
    assert "ray-ensemble-runs" in actors
    assert {name for name, _, _ in eval(rows)} == {"first", "b", "c"}
    killed = sharing.drivers.pop("first")
    killed.kill()
    killed.wait()
    for _ in gates:
        sharing.wait_until(
            lambda: [n for n, gate in gates.items() if gives_back(run_dirs[n]) and not gate.exists()]
        )
        next(gate for n, gate in gates.items() if gives_back(run_dirs[n]) and not gate.exists()).touch()
    sharing.end()
    turns = list_turns(*run_dirs.values())
    assert [turn[2:] for turn in turns] == ["member-0", "member-0", "member-1", "member-1"], turns
    assert all(len(finished_hashes(run_dir)) == 2 for run_dir in run_dirs.values())
    sharing.wait_until(lambda: sharing.ask() == ["[]", "[]"])


def test_a_higher_priority_has_a_member_paused_which_goes_on_to_the_same_weights(
    sharing: Sharing, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    marker = tmp_path / "paused"
    slow = [{"lr": 0.1, "fault": "slow", "marker": str(marker)}]
    low = sharing.start("low", members=slow, epochs=EPOCHS, checkpoint_every=10)
    sharing.wait_until(lambda: of_kind(low, "epoch"))
    high = sharing.start("high", members=[{"lr": 0.3}], priority=1)
    sharing.wait_until(lambda: of_kind(low, "made_way"))
    marker.touch()
    sharing.end()
    (made_way,) = of_kind(low, "made_way")
    assert made_way["member"] == "member-0" and "paused for run high of user" in made_way["detail"]
    (paused,) = of_kind(low, "paused")
    assert 0 < paused["epoch"] < EPOCHS, "it goes on from a checkpoint"
    assert of_kind(high, "finished")[0]["t"] < of_kind(low, "finished")[0]["t"]
    alone = expect_weights(tmp_path_factory, "local", lambda epochs: declared(slow, epochs))(EPOCHS)
    assert list(finished_hashes(low).values()) == list(alone.values())
