"""Runs of several members through `ensemble.submit` with the local executor, and what is measured of one."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ensemble as api
from benchmarks.members import declare
from benchmarks.models import Net
from ensemble.spec import Ensemble, Member, Resources
from gpu_cases.common import GpuEnergy, Setting
from gpu_cases.networks import MADE_UP
from pipelines import Pipeline
from pipelines.environment.machine_limits import usable_cpus

#: Roles of CPU time that grow with the samples; the others belong to the start and the end of a run.
WORK = ("train", "prepare", "feed")


@dataclass
class Watch:
    """Follows the events of a run.

    All members train between the moment when the last of them has ended its first epoch and the moment when the
    first of them has ended its last one. Energy is read at both.
    """

    members: int
    epochs: int
    energy: GpuEnergy
    epochs_ended: list[dict[str, Any]] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=dict)
    finished: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    cpu_s: dict[tuple[int, str], float] = field(default_factory=dict)
    launched: float | None = None
    start_up_cpu_s: float | None = None
    together_j: float | None = None

    def __call__(self, event: dict[str, Any]) -> None:
        """Take one event of the run's log."""
        kind = event["type"]
        if kind == "usage" and event["role"] in WORK:
            self.cpu_s[event["pid"], event["role"]] = event["cpu_s"]
        elif kind == "placed":
            self.launched = self.launched or event["t"]
        elif kind == "started":
            self.started[event["member"]] = event["t"]
            if self.start_up_cpu_s is None:  # the feeder's, so far
                self.start_up_cpu_s = sum(self.cpu_s.values())
        elif kind == "finished":
            self.finished[event["member"]] = event["t"]
        elif kind == "failed":
            self.failures.append(f"{event['member']}: {event['error']}")
        elif kind == "epoch":
            self._end_epoch(event)

    def _end_epoch(self, event: dict[str, Any]) -> None:
        self.epochs_ended.append(event)
        first = [each for each in self.epochs_ended if each["epoch"] == 0]
        last = [each for each in self.epochs_ended if each["epoch"] == self.epochs - 1]
        if event["epoch"] == 0 and len(first) == self.members:
            self.energy.read()
        elif event["epoch"] == self.epochs - 1 and len(last) == 1:
            self.together_j = self.energy.read()

    def window(self) -> tuple[float, float] | None:
        """The time in which all members train; None where there is none."""
        first = [event["t"] for event in self.epochs_ended if event["epoch"] == 0]
        last = [event["t"] for event in self.epochs_ended if event["epoch"] == self.epochs - 1]
        if len(first) < self.members or not last or max(first) >= min(last):
            return None
        return max(first), min(last)

    def samples_in(self, begin: float, end: float) -> float:
        """Samples that the members trained on in a time, epochs at its edges in part."""
        total = 0.0
        for event in self.epochs_ended:
            start = event["t"] - event["wall_s"]
            inside = min(end, event["t"]) - max(begin, start)
            total += event["samples"] * max(0.0, inside) / event["wall_s"]
        return total


APART = "the members did not train at the same time long enough"


def train(setting: Setting, declared: Ensemble) -> dict[str, Any]:
    """Run an ensemble to its end; returns its figures and, as `reasons`, why some are None."""
    members = len(declared.members or ())
    energy = GpuEnergy(setting)
    watch = Watch(members, declared.epochs, energy)
    total = GpuEnergy(setting)
    with tempfile.TemporaryDirectory() as folder:
        run = api.submit(declared, Path(folder) / "run", executor="local", on_event=watch)
        run.wait()
        total_j = total.read()
        logs = _read_logs(Path(folder) / "run") if watch.failures else ""
    if watch.failures or len(watch.finished) < members:
        raise RuntimeError(f"{len(watch.finished)} of {members} members finished: {watch.failures[:1]} {logs}")
    assert watch.launched is not None
    made_s = max(watch.finished.values()) - watch.launched
    samples = sum(event["samples"] for event in watch.epochs_ended)
    cpu_s = sum(watch.cpu_s.values()) - (watch.start_up_cpu_s or 0.0)
    window = watch.window()
    together_s = window[1] - window[0] if window else None
    rate = watch.samples_in(*window) / together_s if window and together_s else None
    watts = watch.together_j / together_s if watch.together_j is not None and together_s else None
    return {
        "members": members,
        "models_per_min": 60 * members / made_s,
        "seconds": made_s,
        "first_start_s": min(watch.started.values()) - watch.launched,
        "samples_per_s": rate,
        "together_s": together_s,
        "watts": watts,
        "joules_per_model": total_j and total_j / members,
        "joules_per_1000_samples": watts and rate and 1000 * watts / rate,
        "cpu_seconds": cpu_s,
        "cpu_ms_per_sample": 1000 * cpu_s / samples,
        "reasons": {
            "samples_per_s": APART,
            "together_s": APART,
            "watts": energy.reason or APART,
            "joules_per_model": total.reason or "NVML gave no value",
            "joules_per_1000_samples": energy.reason or APART,
        },
    }


def _read_logs(run_dir: Path) -> str:
    """The ends of the members' logs."""
    return " | ".join(log.read_text()[-600:] for log in sorted(run_dir.glob("members/*/log.txt"))[:2])


def declare_alike(
    setting: Setting,
    name: str,
    net: Net,
    data: Pipeline,
    members: int,
    epochs: int,
    *,
    alone: bool = False,
    **options: Any,
) -> Ensemble:
    """Members of one network on made-up images that differ in their seeds only, and share the machine.

    Args:
        alone: see `share_of_machine`.
        options: of `Ensemble`.
    """
    return declare(
        name,
        net,
        data,
        data,
        [Member(net.params(MADE_UP), seed=seed) for seed in range(members)],
        epochs,
        batch_size=setting.choose(64, 32),
        valid=None,
        devices=setting.device,
        resources=share_of_machine(members, alone=alone),
        **options,
    )


def share_of_machine(members: int, *, alone: bool = False) -> Resources:
    """What each of several members that train at once takes: equal parts of the cores and of one GPU.

    Args:
        alone: a member has all of the GPU, so that members follow one another.
    """
    cores = usable_cpus()
    parts = 1 if alone else members
    return Resources(cpus_per_worker=cores / parts, gpus_per_worker=1 / parts, memory_gb=0.5)
