"""How long a node's coming and going takes a run: figures are printed (`pytest -s`), bounds are generous."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from started_cluster import StartedCluster, make_cluster, wait_until

from ensemble.store import read_events

pytestmark = [pytest.mark.ray, pytest.mark.slow]

HERE = Path(__file__).parent
SPEC = """
from execute_members import an_ensemble
from ensemble import Resources

def spec(step_s: float):
    needs = Resources(cpus_per_worker=0.9, gpus_per_worker=0.0, memory_gb=0.5)
    members = [{"lr": lr, "step_s": step_s} for lr in (0.1, 0.2)]
    return an_ensemble(members, epochs=10_000, gate_timeout_s=240.0, resources=needs)
"""
#: Prints the time at which the cluster has so many nodes.
WATCHER = """
import sys, time, ray
ray.init(log_to_driver=False)
print("connected", flush=True)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(0.02)
print(time.time(), flush=True)
"""


def start_watcher(cluster: StartedCluster, nodes: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WATCHER, str(nodes)]
    watcher = subprocess.Popen(command, env=cluster.environment, stdout=subprocess.PIPE, text=True)
    assert watcher.stdout is not None and watcher.stdout.readline().strip() == "connected"
    return watcher


def find_first(run_dir: Path, since: float, wanted: Callable[[dict[str, Any]], bool]) -> float | None:
    """Seconds from a time to the first such event after it."""
    events = read_events(run_dir / "events.jsonl") if (run_dir / "events.jsonl").exists() else []
    return next((event["t"] - since for event in events if event["t"] > since and wanted(event)), None)


def test_members_use_a_node_that_joins_and_leave_one_that_is_lost(tmp_path: Path) -> None:
    spec, run_dir = tmp_path / "spec.py", tmp_path / "run"
    spec.write_text(SPEC)

    def describe(since: float, member: str, *kinds: str) -> dict[str, float]:
        """Seconds from a time to the first event of each kind; waits for the last."""

        def seen(kind: str) -> float | None:
            return find_first(
                run_dir, since, lambda event: event["type"] == kind and event.get("member", member) == member
            )

        wait_until(lambda: driver.poll() is not None or seen(kinds[-1]) is not None, f"no {kinds[-1]} of {member}")
        assert driver.poll() is None, driver.communicate()
        return {kind: round(seen(kind) or -1.0, 1) for kind in kinds}

    with make_cluster() as cluster:
        cluster.start()
        driver = cluster.run("run", spec, "--run-dir", run_dir, "--set", "step_s=0.05")
        try:
            describe(0.0, "member-0", "epoch")
            watcher = start_watcher(cluster, 2)
            cluster.start_node({}, "--address", f"127.0.0.1:{cluster.port}", "--num-cpus", "1")
            joined = float(watcher.communicate(timeout=60)[0])
            figures = describe(joined, "member-1", "node", "placed", "started", "epoch")
            print(f"a node joined; seconds to: {figures}")
            assert figures["epoch"] < 60

            joined_one = max(cluster.find("raylet/raylet"), key=psutil.Process.create_time)
            cluster.start_node({}, "--address", f"127.0.0.1:{cluster.port}", "--num-cpus", "1")
            lost = [joined_one, *joined_one.children(recursive=True)]
            killed = time.time()
            for each in lost:
                each.kill()
            figures = describe(killed, "member-1", "node_lost", "placed", "started", "epoch")
            print(f"a node was lost; seconds to: {figures}")
            assert figures["epoch"] < 60
        finally:
            driver.kill()
            driver.communicate()


@pytest.mark.parametrize("nodes", [1, 8])
def test_opening_a_cluster(nodes: int, tmp_path: Path) -> None:
    with make_cluster() as cluster:
        cluster.start(*[{}] * (nodes - 1))
        found = [measure_opening(cluster, tmp_path / f"run-{n}", nodes, nodes) for n in range(3)]
    print(f"{nodes} nodes opened: {statistics.median(found):.1f} s, median of {sorted(found)}")


def test_the_driver_asks_for_fifty_agents_and_leases_within_two_seconds(tmp_path: Path) -> None:
    """What is serial in the driver; the agents that are asked for are not awaited."""
    with make_cluster() as cluster:
        cluster.start(cpus=64)
        found = [measure_opening(cluster, tmp_path / f"run-{n}", 1, 50, "requests") for n in range(3)]
    print(f"50 agents and leases requested: {statistics.median(found):.2f} s, median of {sorted(found)}")
    assert statistics.median(found) < 2.0


def measure_opening(cluster: StartedCluster, run_dir: Path, nodes: int, count: int, what: str = "open") -> float:
    command = [sys.executable, str(HERE / "opening_child.py"), what, str(run_dir), str(nodes), str(count)]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return float(done.stdout.split()[-1])
