"""How long a run takes to get over a death: `python tests/faults/faults_recovery.py [--deaths N] [--nodes N]`.

From a member's death, or that of a whole Ray node, to the next step, in parts:

| part | until |
|---|---|
| noticed | the member's failure is in the log |
| placed | the next attempt is |
| begun | the member's function runs, the model is made and loaded |
| stepped | its first batch is there, and the step begins |

The steps are timed by the members themselves. Of a node's death the last member that was on it counts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from faults_cluster import CHILD_PATH, Nodes

from ensemble.store import StoreError, read_events

PARTS = ("noticed", "placed", "begun", "stepped")
Event = dict[str, Any]


class Driven:
    """A driver at work on members that train for long."""

    def __init__(self, directory: Path, environment: dict[str, str], **told: Any) -> None:
        self.run_dir, self.account = directory / "run", directory / "account"
        usual = {"widths": (1,) * 4, "epochs": 4000, "step_s": 0.02, "capacity": 64, "retries": 1000}
        command = [sys.executable, str(Path(__file__).with_name("faults_driver.py")), str(self.run_dir)]
        self._process = subprocess.Popen(
            [*command, json.dumps(usual | told)], env=environment, stdout=subprocess.DEVNULL
        )

    def events(self, kind: str) -> list[Event]:
        """All of a kind so far."""
        try:
            return [event for event in read_events(self.run_dir / "events.jsonl") if event["type"] == kind]
        except StoreError:
            return []

    def wait_for(self, what: Any, limit_s: float = 120.0) -> Any:
        """The first thing that is not nothing; AssertionError after a while."""
        until = time.monotonic() + limit_s
        while not (found := what()):
            assert self._process.poll() is None and time.monotonic() < until, "the run does not go on"
            time.sleep(0.05)
        return found

    def wait_until_all_train(self) -> None:
        """All four members have told of an epoch."""
        self.wait_for(lambda: len({event["member"] for event in self.events("epoch")}) == 4)

    def lines(self, member: str, after: float) -> list[dict[str, Any]]:
        """What a member has put down since then."""
        path = self.account / f"{member}-0.jsonl"
        known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in known if line["t"] > after]

    def recovery(self, member: str, killed: float) -> dict[str, float]:
        """When the parts were over, in seconds from the death on; waits for the last of them."""

        def parts() -> dict[str, float]:
            mine = [e for kind in ("failed", "placed") for e in self.events(kind) if e["member"] == member]
            failed = [event["t"] for event in mine if event["type"] == "failed" and event["t"] > killed]
            # one may be placed on a dead node again before that is known: the attempt that went on counts
            placed = [event["t"] for event in mine if event["type"] == "placed" and event["t"] > killed]
            begun = [line["t"] for line in self.lines(member, killed) if "begins" in line]
            stepped = [line["t"] for line in self.lines(member, begun[-1]) if "at" in line] if begun else []
            if not (failed and placed and stepped):
                return {}
            times = (failed[0], placed[-1], begun[-1], stepped[0])
            return dict(zip(PARTS, (each - killed for each in times), strict=True))

        found: dict[str, float] = self.wait_for(parts)
        return found

    def close(self) -> None:
        """End the run."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=120)


def of_members(directory: Path, environment: dict[str, str], executor: str, deaths: int) -> list[dict[str, float]]:
    """Kill one member after the other."""
    driven = Driven(directory, environment, executor=executor)
    found = []
    try:
        driven.wait_until_all_train()
        for number in range(deaths):
            member = f"member-{number % 4}"
            pid = driven.events("started")[
                -1 - [e["member"] for e in reversed(driven.events("started"))].index(member)
            ]
            killed = time.time()
            os.kill(pid["pid"], signal.SIGKILL)
            found.append(driven.recovery(member, killed))
            driven.wait_for(lambda: any(e["t"] > time.time() - 1.0 for e in driven.events("epoch")))
    finally:
        driven.close()
    return found


def of_nodes(directory: Path, nodes: Nodes, deaths: int) -> list[dict[str, float]]:
    """Kill one node after the other, of as many as it takes; the last member of each counts."""
    found = []
    for number in range(deaths):
        nodes.have(3)
        driven = Driven(directory / str(number), nodes.environment, executor="ray", sharing="node", cpus=0.4)
        try:
            driven.wait_until_all_train()
            pids = {event["member"]: event["pid"] for event in driven.events("started")}
            on = {node: {process.pid for process in nodes.of(node)} for node in nodes.alive if node}
            victim = next(node for node, there in on.items() if there & set(pids.values()))
            hit = [member for member, pid in pids.items() if pid in on[victim]]
            killed = time.time()
            nodes.kill(victim)
            each = [driven.recovery(member, killed) for member in hit]
            found.append({part: max(times[part] for times in each) for part in PARTS})
        finally:
            driven.close()
    return found


def show(what: str, found: list[dict[str, float]]) -> None:
    """Medians, and the range of the whole."""
    medians = {part: statistics.median(each[part] for each in found) for part in PARTS}
    steps = ", ".join(f"{part} {seconds:.2f}" for part, seconds in medians.items())
    whole = sorted(each["stepped"] for each in found)
    print(
        f"{what}, n={len(found)}, seconds after the death: {steps} ({whole[0]:.2f} to {whole[-1]:.2f})", flush=True
    )


def main() -> None:
    """Measure on this machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--deaths", type=int, default=5, help="of members, on each executor")
    parser.add_argument("--nodes", type=int, default=3, help="deaths of whole Ray nodes")
    asked = parser.parse_args()
    local = {**os.environ, "PYTHONPATH": CHILD_PATH}
    with tempfile.TemporaryDirectory(prefix="faults-") as text:
        directory = Path(text)
        show("a member, local", of_members(directory / "local", local, "local", asked.deaths))
        nodes = Nodes(3)
        try:
            show("a member, ray", of_members(directory / "ray", nodes.environment, "ray", asked.deaths))
            if asked.nodes:
                show("a node, ray", of_nodes(directory, nodes, asked.nodes))
        finally:
            nodes.close()


if __name__ == "__main__":
    main()
