"""Runs of several members through `ensemble.submit` with the local executor, or as plain processes, and what is
measured of one."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import ensemble as api
from benchmarks.members import declare
from benchmarks.models import Net
from benchmarks.sc18.processes import process_tree
from ensemble.meter.cpu import cpu_seconds
from ensemble.spec import Ensemble, Member, Resources
from ensemble.store import RunDir, load_checkpoint
from gpu_cases.common import GpuEnergy, Row, Setting, check, follow_memory
from gpu_cases.networks import MADE_UP
from pipelines import Pipeline
from pipelines.environment.machine_limits import usable_cpus
from pipelines.ipc.child_processes import end_with_parent

#: Roles of CPU time that grow with the samples; the others belong to the start and the end of a run.
WORK = ("train", "prepare", "feed", "batch")


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
            if self.start_up_cpu_s is None:  # the feeder's so far, which it may not have reported yet
                self.start_up_cpu_s = sum(cpu_seconds(pid) or 0.0 for pid in {pid for pid, _ in self.cpu_s})
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


#: What is in the last checkpoint of a member: its weights, and the size of the file in bytes.
Kept = tuple[dict[str, torch.Tensor], int]


def train(
    setting: Setting, declared: Ensemble, *, memory: bool = False, kept: list[Kept] | None = None
) -> dict[str, Any]:
    """Run an ensemble to its end; returns its figures and, as `reasons`, why some are None.

    Args:
        memory: also measure the peaks of memory.
        kept: receives what each member has kept.
    """
    watch = Watch(len(declared.members or ()), declared.epochs, GpuEnergy(setting))
    total, peaks = GpuEnergy(setting), Row(reasons={})
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        if memory:
            peaks = stack.enter_context(follow_memory(setting))
        run = api.submit(declared, path, executor="local", on_event=watch)
        run.wait()
        total_j = total.read()
        watch.failures += [_read_logs(path)] if watch.failures else []
        figures = compute_figures(watch, total, total_j)
        for member in run.state.members.values() if kept is not None else ():
            file = RunDir(path).valid_checkpoint(member)
            weights = load_checkpoint(file, parts=("model",), mapped=True)["model"]
            kept.append((weights, file.stat().st_size))
    return {**figures, **peaks, "reasons": figures["reasons"] | peaks["reasons"]}


def train_plain(
    setting: Setting, members: int, epochs: int, train_one: Callable[..., Iterator[int]], *arguments: Any
) -> dict[str, Any]:
    """Train members as plain processes; returns figures as `train` does.

    Args:
        train_one: `train_one(number, *arguments)` trains one member. It yields 0 when it is ready, then the number
            of samples of each epoch at its end.
    """
    watch, total = Watch(members, epochs, GpuEnergy(setting)), GpuEnergy(setting)
    context, pipes = mp.get_context("spawn"), list[Connection]()
    watch({"type": "placed", "t": time.time()})
    for number in range(members):
        ours, theirs = context.Pipe(duplex=False)
        context.Process(target=_report, args=(theirs, number, train_one, arguments)).start()
        theirs.close()
        pipes.append(ours)
    while pipes:
        for pipe in wait(pipes):
            try:
                watch(pipe.recv())
            except EOFError:
                pipes.remove(pipe)
    return compute_figures(watch, total, total.read())


def _report(
    pipe: Connection, number: int, train_one: Callable[..., Iterator[int]], arguments: Sequence[Any]
) -> None:
    """Train a member and send the events that `Watch` takes; CPU time is also that of the process's children."""
    end_with_parent()
    torch.set_num_threads(1)
    began, ready_s = time.time(), 0.0
    for epoch, samples in enumerate(train_one(number, *arguments), -1):
        cpu_s = sum(cpu_seconds(pid) or 0.0 for pid in process_tree(os.getpid()))
        event = {"member": f"member-{number}", "t": time.time(), "pid": os.getpid(), "role": "train"}
        if epoch < 0:
            pipe.send({"type": "started", **event})
            ready_s = cpu_s
        else:
            pipe.send({"type": "usage", "cpu_s": cpu_s - ready_s, **event})
            pipe.send({"type": "epoch", "epoch": epoch, "samples": samples, "wall_s": event["t"] - began, **event})
        began = event["t"]
    pipe.send({"type": "finished", **event})


def compute_figures(watch: Watch, total: GpuEnergy, total_j: float | None) -> dict[str, Any]:
    """The figures of members that have ended and, as `reasons`, why some are None. Raises if one has failed."""
    members, energy = watch.members, watch.energy
    if watch.failures or len(watch.finished) < members:
        raise RuntimeError(f"{len(watch.finished)} of {members} members finished: {watch.failures}")
    assert watch.launched is not None
    made_s = max(watch.finished.values()) - watch.launched
    samples = sum(event["samples"] for event in watch.epochs_ended)
    begins_s = min(event["t"] - event["wall_s"] for event in watch.epochs_ended)
    ends_s = max(event["t"] for event in watch.epochs_ended)
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
        "cores": cpu_s / (ends_s - begins_s),
        "reasons": {
            "samples_per_s": APART,
            "together_s": APART,
            "watts": energy.reason or APART,
            "joules_per_model": total.reason or "NVML gave no value",
            "joules_per_1000_samples": energy.reason or APART,
        },
    }


def compare_weights(setting: Setting, what: str, one: Sequence[Kept], other: Sequence[Kept]) -> Row:
    """A check that members have learnt the same: to the bit on a CPU, within 0.1 % on a GPU.

    Args:
        one: whose weights all are compared; `other` may have more.
    """
    own, theirs = ([weights for weights, _ in side] for side in (one, other))
    names = [(member, name) for member, weights in enumerate(own) for name in weights]
    pairs = [(own[member][name].double(), theirs[member][name].double()) for member, name in names]
    same = bool(pairs) and all(torch.equal(*pair) for pair in pairs)
    apart = sum(float((first - second).square().sum()) for first, second in pairs)
    error = (apart / sum(float(first.square().sum()) for first, _ in pairs)) ** 0.5
    return check(what, same or (setting.on_gpu and error < 1e-3), same_bits=same, relative_error=error)


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
    params: dict[str, Any] | None = None,
    **options: Any,
) -> Ensemble:
    """Members of one network on made-up images that differ in their seeds only, and share the machine.

    Args:
        alone: see `share_of_machine`.
        params: hyperparameters of another recipe, which is among the options.
        options: of `Ensemble`.
    """
    return declare(
        name,
        net,
        data,
        data,
        [Member(params or net.params(MADE_UP), seed=seed) for seed in range(members)],
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
