"""Starts Ray twice, by `ray.init` and then by `RayConnection`, and says what came of the second, as JSON."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import ray  # before `RayConnection`: what Ray reads from the environment it has read
from ray.util import get_node_ip_address

from ensemble.executors.ray import _compat
from ensemble.executors.ray.session import LOOPBACK, RayConnection

OTHERS = ("log_monitor.py", "autoscaler/_private/monitor.py", "dashboard/dashboard.py")


def own_handler(signum: int, frame: Any) -> None: ...


def seen(place: Path) -> dict[str, Any]:
    daemons = psutil.Process().children()
    commands = [" ".join(daemon.cmdline()) for daemon in daemons]
    [node] = ray.nodes()
    return {
        "daemons": sorted(word for word in ("gcs_server", "raylet") if any(f"/{word}" in c for c in commands)),
        "in our group": [d.name() for d in daemons if os.getpgid(d.pid) == os.getpgid(0)],
        "others": sorted(word for word in OTHERS if any(word in command for command in commands)),
        "spare workers": [d.pid for d in psutil.Process().children(recursive=True) if "ray::IDLE" in d.cmdline()],
        "own handler": signal.getsignal(signal.SIGTERM) is own_handler,
        "address": node["NodeManagerAddress"],
        "in its place": any(place.rglob("raylet.out")),
    }


def free_cpus() -> tuple[float, float]:
    """CPUs of the node that are free before an actor has taken one for good, and once it has."""

    @ray.remote(num_cpus=1)
    class Tenant:
        def there(self) -> bool:
            return True

    [node] = ray.nodes()
    before = _compat.list_free_resources()[node["NodeID"]]["CPU"]
    tenant = Tenant.options(lifetime="detached", name="tenant").remote()
    ray.get(tenant.there.remote())
    while (after := _compat.list_free_resources()[node["NodeID"]].get("CPU", 0.0)) == before:
        time.sleep(0.05)
    return before, after


def drain() -> tuple[dict[str, float | None], dict[str, float | None]]:
    """The nodes that are drained before, and after Ray was told that this one ends at the Unix time 4e9."""
    # The tenant of `free_cpus` keeps the node busy: one that is idle leaves at once, and the list with it.
    from ray._private.worker import global_worker

    client: Any = global_worker.gcs_client  # type: ignore[attr-defined]
    if not hasattr(client, "get_draining_nodes"):  # Ray below 2.60
        return {}, {"this": 4e9}
    [node] = ray.nodes()
    before = _compat.list_draining_nodes(300.0)
    preemption = 2  # DRAIN_NODE_REASON_PREEMPTION of autoscaler.proto
    client.drain_node(node["NodeID"], preemption, "notice", 4_000_000_000_000)
    while not (after := _compat.list_draining_nodes(300.0)):
        time.sleep(0.05)  # the head says so when its node has agreed
    return before, {"this" if ray_id == node["NodeID"] else ray_id: t for ray_id, t in after.items()}


def thread_state(pid: int, thread: int) -> str:
    """The state of a thread, as /proc has it: "T" where it is stopped."""
    return Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]


def stop_head() -> list[bool]:
    """Whether the head answers: before it is stopped, while it is, and when it goes on."""
    [head] = [each for each in psutil.Process().children() if each.name() == "gcs_server"]
    answers = [_compat.is_head_answering(300.0)]
    head.send_signal(signal.SIGSTOP)
    while any(thread_state(head.pid, thread.id) != "T" for thread in head.threads()):
        time.sleep(0.01)  # each of its threads stops by itself
    answers.append(_compat.is_head_answering(1.0))
    head.send_signal(signal.SIGCONT)
    return [*answers, _compat.is_head_answering(300.0)]


def main(place: Path) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, own_handler)
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    _compat.start_head(place, LOOPBACK, num_cpus=1, object_store_memory=80 * 2**20, **quiet)
    ray.shutdown()
    signal.signal(signal.SIGTERM, own_handler)

    before, session = set(os.environ), RayConnection()
    assert session.directory is not None
    try:
        shown = {**seen(session.directory), "free": free_cpus(), "draining": drain()}
        shown |= {"grows": _compat.is_autoscaler_growing(), "answers": stop_head()}
    finally:
        session.close()
    shown["later address"] = get_node_ip_address()
    return {**shown, "variables": [name for name in os.environ if "CLUSTER" in name and name not in before]}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
