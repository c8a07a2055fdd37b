"""Runs on a machine with GPUs that are none: NVML is a stand-in, and things befall its GPUs as a run goes on.

This file is the run's driver, too: `gpu_child.py RUN_DIR EXECUTOR JSON` in the environment of `make_machine`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit import nvml_stand_in
from kit.event_dicts import fold, read_events
from kit.execute_members import an_ensemble

import ensemble
from ensemble import Member, Resources
from ensemble.store import RunState

Event = dict[str, Any]

#: A `sitecustomize` for which workers do not train. By its hyperparameters a rank says which GPU it was given,
#: holds memory of it, reports what befalls it at its first attempt, and is done when a file is there.
WORKER = """
import os, signal, sys, time, types

def run(job, ensemble, send, inbox, clock):
    from pathlib import Path

    gpu, params, here = os.environ["CUDA_VISIBLE_DEVICES"], job.identity.params, Path(job.run_dir)
    who = {"member": job.identity.member, "attempt": job.attempt}
    log = here / "members" / job.identity.member / "log.txt"
    print("GPU", gpu, os.environ["CUDA_DEVICE_ORDER"], job.attempt, flush=True)
    while log.read_text().count(f" {job.attempt}\\n") < job.identity.workers:
        time.sleep(0.01)

    def note(what, on=gpu):
        with open(os.environ["STAND_IN_STATE"], "a") as state:
            state.write(f"{on} {what}\\n")

    if "holds" in params:
        note(f"process {os.getpid()} {params['holds']}")
    if "uses" in params:
        note(f"util {os.getpid()} {params['uses']}")
    if "haunts" in params:  # as where the driver's process ids are those of another namespace
        note(f"util {os.getpid()} 50", on={"GPU-0": "GPU-1", "GPU-1": "GPU-0"}[gpu])
    if job.rank == 0:
        send({"type": "started", **who, "first_epoch": 0})
    if "befalls" in params and job.attempt == 0:
        if job.rank == params.get("rank", 0):
            note(params["befalls"])
        if job.rank == 0 and params["fails"]:  # it notices before the driver's report is read
            while params["befalls"] not in Path(os.environ["STAND_IN_STATE"]).read_text():
                time.sleep(0.01)
            send({"type": "failed", **who, "error": "CUDA error", "reason": "error", "retry": True})
            return "failed"
        signal.pause()
    while "until" in params and not (here / params["until"]).exists():
        time.sleep(0.01)
    if "until" in params and "uses" in params:  # the stand-in does not see that a process has ended
        note(f"util {os.getpid()} 0")
    if job.rank == 0:
        send({"type": "finished", **who, "epoch": 1, "metrics": {}, "weights_sha256": "0" * 64})
    return "finished"

if "ensemble.executors.forkserver" in sys.orig_argv:
    if "FORKS_REPORTED_AFTER_S" in os.environ:
        os.register_at_fork(after_in_parent=lambda: time.sleep(float(os.environ["FORKS_REPORTED_AFTER_S"])))
    sys.modules["ensemble.train.worker"] = types.SimpleNamespace(run=run)
"""

HERE = Path(__file__).parent


def make_machine(folder: Path, gpus: str, state: str = "") -> dict[str, str]:
    """The environment of a machine with these GPUs, of which that much has happened already."""
    (folder / "sitecustomize.py").write_text(WORKER)
    (folder / "state").write_text(state)
    usual = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    paths = os.pathsep.join(map(str, (folder, HERE.parents[1], HERE, HERE.parent / "support")))
    stand_in = {"STAND_IN_GPUS": gpus, "STAND_IN_STATE": str(folder / "state")}
    return {**usual, **nvml_stand_in.build(folder), **stand_in, "PYTHONPATH": paths}


def several(count: int, **params: Any) -> list[dict[str, Any]]:
    return [{"lr": 0.1 + n, **params} for n in range(count)]


class Run:
    """A run that has ended, on a machine: its members' hyperparameters, also their `workers` and `share`.

    Each step is a condition, "started 3" (the third such event), "active member-0" (it is seen to keep a GPU busy)
    or "missing ..." (what Ray lacks), and what is done then: a line for the stand-in, or a file to be made.
    """

    def __init__(
        self, folder: Path, machine: dict[str, str], executor: str, members: Sequence[dict[str, Any]],
        *steps: tuple[str, str], share: float = 1.0, devices: str = "cuda",
    ) -> None:  # fmt: skip
        self.path = folder / "run"
        told = json.dumps({"members": members, "steps": steps, "share": share, "devices": devices})
        command = [sys.executable, str(HERE / "gpu_child.py"), str(self.path), executor, told]
        done = subprocess.run(command, env=machine, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        self.said = done.stderr
        self.events: list[Event] = list(read_events(self.path / "events.jsonl"))
        self.states = {member.id: member.state for member in self.state.members.values()}

    @property
    def state(self) -> RunState:
        return fold(self.events)

    def of_kind(self, kind: str, member: str | None = None) -> list[Event]:
        return [e for e in self.events if e["type"] == kind and member in (None, e.get("member"))]

    def given(self, member: str) -> list[set[str]]:
        """The GPUs that its ranks were given, by attempt: those that it was placed on; "" where it has none."""
        log = (self.path / "members" / member / "log.txt").read_text()
        said = re.findall(r"^GPU (\S*) PCI_BUS_ID (\d+)$", log, re.M)  # CUDA counts as NVML does
        placed = [{gpu or "" for gpu in event["devices"]} for event in self.of_kind("placed", member)]
        for attempt, devices in enumerate(placed):
            assert sorted(devices) == sorted(gpu for gpu, number in said if int(number) == attempt)
        return placed

    def given_once(self) -> dict[str, set[str]]:
        """Of all members, which have finished at their first attempt."""
        members = self.state.members.values()
        assert {(member.state, member.attempts) for member in members} == {("finished", 1)}, self.said
        return {member.id: self.given(member.id)[0] for member in members}


def is_met(when: str, event: Event, count: int) -> bool:
    kind, words = when.split(" ", 1)
    if kind == "active":
        active = {member for part in event.get("parts", ()) for _, member, _ in part.get("activity") or ()}
        return set(words.split()) <= active
    if kind == "missing":
        return str(event.get("missing", "")).startswith(words)
    return event["type"] == kind and count == int(words)


def main(run_dir: Path, executor: Any, told: dict[str, Any]) -> None:
    seen = Counter[str]()

    def react(event: Event) -> None:
        seen[event["type"]] += 1
        for _, what in [step for step in told["steps"] if is_met(step[0], event, seen[event["type"]])]:
            if " " not in what:
                (run_dir / what).touch()
                continue
            with open(os.environ["STAND_IN_STATE"], "a") as state:
                state.write(what + "\n")

    members = []
    for params in told["members"]:
        width, share = params.pop("workers", 1), params.pop("share", None)
        members.append(Member(params, workers=width, gpus_per_worker=share))
    resources = Resources(cpus_per_worker=0.1, gpus_per_worker=told["share"], memory_gb=0.2)
    usual = {"sharing": "independent", "valid": None, "retries": 0}
    declared = an_ensemble(members, resources=resources, devices=told["devices"], **usual)
    ensemble.submit(declared, run_dir, executor=executor, on_event=react).wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
