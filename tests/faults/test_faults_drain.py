"""Nodes of a cluster that are drained, as before a preemption: members go on elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from faults_cluster import Driver, Nodes
from kit.leftovers import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.more]

Event = dict[str, Any]
DEADLINE_S = 600
MEMBERS = 2  # on each node
ASKS = "import ray, json; ray.init(log_to_driver=False); print(json.dumps([n for n in ray.nodes() if n['Alive']]))"


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes(2)
    yield made
    made.close()


def drain(nodes: Nodes, ray_id: str) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--node-id", ray_id]
    command += ["--address", nodes.environment["RAY_ADDRESS"], "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message", "notice", "--deadline-remaining-seconds", str(DEADLINE_S)]
    subprocess.run(command, env=nodes.environment, check=True, capture_output=True)


def list_nodes(nodes: Nodes) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-c", ASKS], env=nodes.environment, capture_output=True, text=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_members_of_a_drained_node_go_on_elsewhere_from_the_step_they_had_reached(
    nodes: Nodes, tmp_path: Path
) -> None:
    marker, members = tmp_path / "drained", range(2 * MEMBERS)
    of_member = {number: {"fault": "wait", "after": 9, "marker": str(marker)} for number in members}
    told: dict[str, Any] = {"widths": [1] * len(members), "epochs": 30, "retries": 0, "cpus": 1 / MEMBERS}
    driver = Driver(tmp_path / "run", nodes.environment, executor="ray", of_member=of_member, **told)
    driver.wait_for(lambda: len({event["member"] for event in driver.list_events("checkpoint")}) == len(members))
    earlier = {(event["epoch"], event["step"]) for event in driver.list_events("checkpoint")}
    assert earlier == {(1, 0)}, "they wait in the midst of the epoch after"
    before = {event["member"]: event["node"] for event in driver.list_events("placed")}
    [other] = [known for known in list_nodes(nodes) if "node:__internal_head__" not in known["Resources"]]
    drain(nodes, other["NodeID"])
    driver.wait_for(lambda: bool(driver.list_events("node_draining")))
    marker.touch()
    [draining] = driver.list_events("node_draining")
    driver.wait_for(lambda: any(not event["cpus"] for event in driver.list_events("node")))
    [returned] = [event for event in driver.list_events("node") if not event["cpus"]]
    fed = {event["pid"] for event in driver.list_events("feeder") if event["node"] == draining["node"]}
    assert returned["node"] == draining["node"] and len(fed) == 1
    driver.wait_for(lambda: not any(map(psutil.pid_exists, fed)))
    assert not driver.list_events("combined"), "the feeder ends once its members have left, and not with the run"
    _, said = driver.end()

    seen = driver.list_events()
    leaving = {member for member, node in before.items() if node == draining["node"]}
    assert len(leaving) == MEMBERS and 0 < draining["deadline"] - draining["t"] < DEADLINE_S
    assert {member.state for member in driver.state.members.values()} == {"finished"}, said
    assert not driver.list_events("failed"), "no retry is used: there is none"

    after = seen[seen.index(draining) :]
    for member in leaving:
        mine = [event for event in after if event.get("member") == member]
        saved, started = (next(e for e in mine if e["type"] == kind) for kind in ("checkpoint", "started"))
        assert (started["epoch"], started["step"]) == (saved["epoch"], saved["step"]) > (1, 0)
        kinds = [event["type"] for event in mine]
        assert kinds.index("checkpoint") < kinds.index("paused") < kinds.index("placed") < kinds.index("started")
    assert draining["node"] not in {event["node"] for event in after if event["type"] == "placed"}
    wait_until(
        lambda: other["NodeID"] not in [known["NodeID"] for known in list_nodes(nodes)],
        "Ray ends the node: nothing is held there",
    )
