"""Opens a cluster as a run does, and prints how long that took beyond the connection to Ray, in seconds."""

from __future__ import annotations

import sys
import time

from execute_members import an_ensemble

from ensemble import Resources
from ensemble.executors.ray import RayExecutor
from ensemble.executors.ray.agents import start_agent
from ensemble.executors.ray.lease_manager import LeaseManager
from ensemble.executors.ray.session import Session
from ensemble.store import RunDir


def open_cluster(run_dir: RunDir, nodes: int) -> float:
    """The time from a connection to the first answer of all agents."""
    began = time.monotonic()
    executor = RayExecutor()
    try:
        found = executor.open(run_dir, run_dir.load_ensemble(), lambda events: None)
        took_s = time.monotonic() - began
    finally:
        executor.close()
    assert len(found) == nodes, found
    return took_s


def request_all(run_dir: RunDir, count: int) -> float:
    """The time in which as many agents and leases are asked for as there are members."""
    import ray

    ensemble = run_dir.load_ensemble()
    session = Session()
    leases = LeaseManager(run_dir.path.name, "cpu", [ensemble.identify(number) for number in range(count)])
    [record] = session.nodes()
    # Their processes do not start here, so that the driver has the cores.
    elsewhere = {
        **record,
        "NodeID": "ab" * 28,
    }
    began = time.monotonic()
    actors = [start_agent(elsewhere, f"n{number}", run_dir, None, on_gpus=False) for number in range(count)]
    answers = [actor.describe.remote("127.0.0.1") for actor in actors]
    agents_s = time.monotonic() - began
    leases.replan()
    leases.collect()
    took_s = time.monotonic() - began
    print(f"agents {agents_s:.2f} s, leases {took_s - agents_s:.2f} s")
    for actor in actors:
        ray.kill(actor)
    leases.close()
    session.close()
    assert len(answers) == count
    return took_s


if __name__ == "__main__":
    what, path, nodes, count = sys.argv[1:]
    members = [{"lr": 0.1}] * int(count)
    needs = Resources(cpus_per_worker=0.9, gpus_per_worker=0.0, memory_gb=0.1)
    run_dir = RunDir.create(path, an_ensemble(members, devices="cpu", resources=needs))
    print(open_cluster(run_dir, int(nodes)) if what == "open" else request_all(run_dir, int(count)))
