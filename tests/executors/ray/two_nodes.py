"""What the tests of members on two nodes share: how a driver is run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.event_dicts import fold, read_events
from started_cluster import HERE, StartedCluster

from ensemble.store import RunState

Event = dict[str, Any]


def wait_for_nodes(environment: dict[str, str], count: int) -> None:
    """Wait until so many nodes are alive."""
    asks = "import ray; ray.init(log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
    until = time.monotonic() + 300
    while True:
        done = subprocess.run([sys.executable, "-c", asks], env=environment, capture_output=True, text=True)
        if done.stdout.strip() == str(count):
            return
        assert time.monotonic() < until, done.stderr[-2000:]


def drive(
    cluster: StartedCluster,
    kind: str,
    run_dir: Path,
    *arguments: object,
    meanwhile: Callable[[list[Event]], bool] | None = None,
) -> RunState:
    """Run a driver to its end; `meanwhile` is shown the events until it says that it has seen enough."""
    command = [sys.executable, str(HERE / "driver_child.py"), kind, str(run_dir), *map(str, arguments)]
    if cluster.hosts:
        command = cluster.hosts.command(0, command)
    driver = subprocess.Popen(command, env=cluster.environment, stderr=subprocess.PIPE, text=True)
    log = run_dir / "events.jsonl"
    try:
        while meanwhile is not None and driver.poll() is None:
            if log.exists() and meanwhile(read_events(log)):
                meanwhile = None
            time.sleep(0.05)
        _, output = driver.communicate()
    finally:
        driver.kill()
    assert driver.returncode == 0, output
    assert meanwhile is None or meanwhile(read_events(log)), "the run was over before"
    return fold(read_events(log))
