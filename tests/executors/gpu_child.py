"""A driver on a node with GPUs that are none: NVML is a stand-in, and things befall its GPUs.

`gpu_child.py MODE RUN_DIR EXECUTOR` runs in the environment that `make_machine` makes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
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
    print("GPU", gpu, job.attempt, flush=True)
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


class Run:
    """A run that has ended, on a machine with these GPUs."""

    def __init__(self, folder: Path, gpus: str, state: str, executor: str, mode: str, *arguments: str) -> None:
        self._start(folder, make_machine(folder, gpus, state), executor, mode, *arguments)

    @classmethod
    def on_cluster(cls, folder: Path, environment: dict[str, str], mode: str, *arguments: str) -> Run:
        """A run on the cluster that the environment names."""
        run = cls.__new__(cls)
        run._start(folder, environment, "ray", mode, *arguments)
        return run

    def _start(self, folder: Path, environment: dict[str, str], executor: str, mode: str, *arguments: str) -> None:
        self.path = folder / "run"
        command = [sys.executable, str(HERE / "gpu_child.py"), mode, str(self.path), executor, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        self.said = done.stderr
        self.states = dict(re.findall(r"^(member-\d+) (\w+)$", done.stdout, re.M))
        self.events: list[Event] = list(read_events(self.path / "events.jsonl"))

    @property
    def state(self) -> RunState:
        return fold(self.events)

    def of_kind(self, kind: str, member: str | None = None) -> list[Event]:
        return [e for e in self.events if e["type"] == kind and member in (None, e.get("member"))]

    def given(self, member: str) -> list[set[str]]:
        """The GPUs that its ranks were given, by attempt: those that it was placed on."""
        said = re.findall(r"^GPU (\S*) (\d+)$", (self.path / "members" / member / "log.txt").read_text(), re.M)
        placed = [set(event["devices"]) for event in self.of_kind("placed", member)]
        for attempt, devices in enumerate(placed):
            assert sorted(devices) == sorted(gpu for gpu, number in said if int(number) == attempt)
        return placed

    def most_at_once(self, gpu: str) -> int:
        """The most attempts that held a GPU at one time."""
        spans = [s for m in self.state.members.values() for s in m.spans if gpu in s.devices]
        return max((sum(a.placed <= b.placed < (a.ended or 0) for a in spans) for b in spans), default=0)

    def find_quarantined(self, why: str) -> str:
        """The only GPU that has broken: member-0 had it at its first attempt, which used up no retry."""
        [quarantined] = self.of_kind("gpu_quarantined")
        gpu = str(quarantined["gpu"])
        assert why in quarantined["detail"] and quarantined["devices"] == [gpu]
        before, after = self.given("member-0")
        assert gpu in before and gpu not in after
        [failed] = self.of_kind("failed")
        assert failed["retry"] and failed["reason"] == "lost" and f"GPU {gpu} is quarantined" in failed["error"]
        assert gpu not in self.of_kind("node")[-1]["gpu_ids"]
        return gpu


class Driver:
    """Submits members, and changes the machine as the run goes on."""

    def __init__(self, run_dir: Path, executor: str) -> None:
        self.run_dir, self.executor = run_dir, executor
        self.seen: list[dict[str, Any]] = []

    def submit(self, members: list[Any], share: float, **options: Any) -> None:
        resources = Resources(cpus_per_worker=0.1, gpus_per_worker=share, memory_gb=0.1)
        shared = {"devices": "cuda", "sharing": "independent", "valid": None, "retries": 0}
        declared = an_ensemble(members, resources=resources, **shared)
        run = ensemble.submit(declared, self.run_dir, executor=self.executor, **options)
        for row in run.wait().members:
            print(row["member"], row["state"], flush=True)

    def count(self, kind: str) -> int:
        return sum(event["type"] == kind for event in self.seen)

    def happens(self, line: str) -> None:
        with open(os.environ["STAND_IN_STATE"], "a") as state:
            state.write(line + "\n")

    def ends(self, name: str) -> None:
        (self.run_dir / name).touch()

    # -- what is driven -----------------------------------------------------------------------------------------

    def freed(self) -> None:
        """GPU-1 is half somebody else's, GPU-0 wholly; then it is freed while a member runs."""

        def react(event: dict[str, Any]) -> None:
            self.seen.append(event)
            if event["type"] == "started" and self.count("started") == 1:
                self.happens("GPU-0 held 0")
            if event["type"] == "started" and self.count("started") == 3:
                self.ends("go")

        holds = {"holds": 30, "until": "go"}
        self.submit([{"lr": 0.1 + n, **holds} for n in range(3)], 0.5, on_event=react)

    def taken(self) -> None:
        """Somebody takes a part of the only GPU, and gives it back when no member is left that runs."""

        def react(event: dict[str, Any]) -> None:
            self.seen.append(event)
            if event["type"] == "started" and self.count("started") == 1:
                self.happens("GPU-0 held 45")
            if event["type"] == "node" and self.count("node") == 2:
                self.ends("go")
            if event["type"] == "finished" and self.count("finished") == 1:
                self.happens("GPU-0 held 1")

        self.submit([{"lr": 0.1 + n, "holds": 30, "until": "go"} for n in range(2)], 1.0, on_event=react)

    def modes(self) -> None:
        def react(event: dict[str, Any]) -> None:
            self.seen.append(event)
            if event["type"] == "started" and self.count("started") == 5:
                self.ends("go")

        self.submit([{"lr": 0.1 + n, "until": "go"} for n in range(6)], 0.25, on_event=react)

    def instances(self) -> None:
        def react(event: dict[str, Any]) -> None:
            self.seen.append(event)
            if event["type"] == "started" and self.count("started") == 4:
                self.ends("go")

        wide = Member({"lr": 9.0}, workers=2)
        self.submit([wide, *({"lr": 0.1 + n, "until": "go"} for n in range(4))], 1.0, on_event=react)

    def active(self) -> None:
        """Two members keep a GPU busy, and a third one another, until all of that was seen in one event."""

        def react(event: dict[str, Any]) -> None:
            members = {m for part in event.get("parts", ()) for _, m, _ in part["activity"] or ()}
            if {"member-0", "member-1", "member-2"} <= members:
                self.ends("go")

        uses = ({"lr": 0.1 + n, "holds": 1, "uses": 40 - 10 * n, "until": "go"} for n in range(3))
        self.submit(list(uses), 0.5, on_event=react)

    def ended(self) -> None:
        """A member keeps a GPU busy and ends at once; another runs until the activity was seen."""

        def react(event: dict[str, Any]) -> None:
            if any(part.get("activity") for part in event.get("parts", ())):
                self.ends("go")

        self.submit([{"lr": 0.1, "uses": 40}, {"lr": 0.2, "holds": 1, "until": "go"}], 0.5, on_event=react)

    def haunted(self) -> None:
        """A process of the run is listed where the run has none, until the node says that it trusts no more."""

        def react(event: dict[str, Any]) -> None:
            self.seen.append(event)
            if event["type"] == "node" and self.count("node") == 2:
                self.ends("go")

        self.submit([{"lr": 0.1, "holds": 1, "uses": 40, "haunts": True, "until": "go"}], 0.5, on_event=react)

    def breaks(self, befalls: str, fails: str, workers: str) -> None:
        """The GPU of a member breaks; the others' members end when that is known."""

        def react(event: dict[str, Any]) -> None:
            self.seen.append(event)
            if event["type"] in ("gpu_quarantined", "failed"):
                self.ends("go")

        broken = {"lr": 9.0, "befalls": befalls, "fails": fails == "fails", "rank": int(workers) - 1}
        members = [Member(broken, workers=int(workers)), *({"lr": 0.1 + n, "until": "go"} for n in range(2))]
        self.submit(members, 1.0, on_event=react)


if __name__ == "__main__":
    mode, path, chosen, *rest = sys.argv[1:]
    getattr(Driver(Path(path), chosen), mode)(*rest)
