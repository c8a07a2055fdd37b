"""What is trained while things break: small members that keep an account of every sample they train on.

In a module of its own, so that worker processes can import it.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kit.finished_runs import read_state
from kit.once import is_first

import ensemble
from ensemble import Ensemble, Member, Resources
from ensemble.store import RunState
from pipelines import Pipeline, sources

N = 90  # batches of 16 leave an uneven last one
BATCH = 16


class Account:
    """The samples that one rank has trained on, one JSON line a batch, written before the step that uses it."""

    def __init__(self, directory: Path, member: str, rank: int, begins: tuple[int, int]) -> None:
        path = directory / f"{member}-{rank}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.write(begins=begins)

    def write(self, **line: Any) -> None:
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")  # one write: whole, or not there


def lost_and_doubled(directory: Path, member: str, workers: int, epochs: int) -> tuple[int, int]:
    """Samples that a member missed, and samples that it trained on more than once in an epoch."""
    seen: dict[int, Counter[int]] = {}  # epoch -> how often each sample was trained on, over all ranks
    for rank in range(workers):
        lineage: list[tuple[list[int], list[int]]] = []
        for text in (directory / f"{member}-{rank}.jsonl").read_text().splitlines():
            line = json.loads(text)
            if "begins" in line:  # what this attempt goes back over is no part of the final weights
                lineage = [known for known in lineage if known[0] < line["begins"]]
            else:
                lineage.append((line["at"], line["index"]))
        for (epoch, _), index in lineage:
            seen.setdefault(epoch, Counter()).update(index)
    counts = [seen.get(epoch, Counter())[index] for epoch in range(epochs) for index in range(N)]
    return sum(count == 0 for count in counts), sum(max(0, count - 1) for count in counts)


def trouble(params: dict[str, Any], epoch: int, steps: int, rank: int) -> None:
    """What befalls a member at its step `after`, once: the marker file says that it has.

    A member that waits for the marker does so from epoch `from_epoch` on, in each attempt.
    """
    kind = params.get("fault")
    if kind in (None, "nan") or rank or epoch < params.get("from_epoch", 0):
        return
    marker = Path(params["marker"])
    while kind == "wait" and steps >= params["after"] and not marker.exists():
        time.sleep(0.01)
    if kind == "wait" or steps != params["after"] or not is_first(marker):
        return
    import torch

    if kind == "memory":  # the process may have no more
        import resource

        now = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (now + 2**28, now + 2**28))
    if kind == "kernel":  # the kernel has no more, and ends it
        (Path(params["cgroup"]) / "cgroup.procs").write_text(str(os.getpid()))
    kept = [torch.ones(2**24) for _ in range(64)]
    raise AssertionError(f"{kind}: 64 MiB were to be had {len(kept)} times")


def train(member: Any) -> None:
    import torch
    from torch import nn

    params = member.params
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))
    net, _ = member.prepare(net, torch.optim.SGD(net.parameters(), lr=params["lr"], momentum=0.9))
    where = member.position
    begins = where["epoch"], where["step"]
    account = Account(Path(params["account"]), member.identity.member, member.rank, begins)
    done = 0
    for epoch in member.epochs():
        for batch in member.batches():
            account.write(at=[epoch, member.position["step"]], index=batch["index"].tolist())
            done += 1
            trouble(params, epoch, done, member.rank)
            time.sleep(params["step_s"])
            with member.autocast():
                losses = nn.functional.cross_entropy(net(batch["x"]), batch["label"], reduction="none")
            if params.get("fault") == "nan" and done == params["after"]:
                losses = losses * float("nan")
            member.backward(losses)
            member.step()
        member.report(accuracy=float(epoch))
    for split in member.splits:
        with member.evaluating() as trained:
            rows = [(trained(batch["x"]).softmax(1), batch["index"].clone()) for batch in member.batches(split)]
        probabilities, index = (torch.cat(column) for column in zip(*rows, strict=True)) if rows else (None, None)
        member.predictions(split, probabilities, index)


def noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "x": sample["x"] + rng.normal(0, 0.1, 6).astype(np.float32)}


def pipeline(n: int = N, seed: int = 7) -> Pipeline:
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, n)
    x = rng.normal(size=(n, 6)).astype(np.float32)
    x[np.arange(n), label] += 2.0
    return Pipeline(sources.arrays(x=x, label=label), seed=seed)


def train_two(run_dir: Path, account: Path, on_event: Any = None) -> RunState:
    """Two members, one after the other, for three epochs; the same call goes on with what is there."""
    made = declared(account, (1, 1), step_s=0.0, epochs=3)
    ensemble.submit(made, run_dir, "inline", on_event=on_event).wait()
    return read_state(run_dir)


def declared_resources(cpus: float) -> Resources:
    """All of them, so that nothing is measured: what befalls a member is to befall it in training."""
    return Resources(cpus_per_worker=cpus, gpus_per_worker=0.0, memory_gb=0.3)


def declared(
    account: Path,
    widths: Sequence[int] = (1, 2, 1),
    *,
    step_s: float = 0.02,
    of_member: dict[int, dict[str, Any]] | None = None,
    **options: Any,
) -> Ensemble:
    """Members of these widths; their account is kept in a directory. They are not rehearsed: their faults are to
    befall them in training.

    Args:
        of_member: hyperparameters of single members, such as `fault`, `after`, `marker`.
    """
    account.mkdir(parents=True, exist_ok=True)
    members = []
    for number, width in enumerate(widths):
        params = {"lr": 0.05 * (1 + number), "step_s": step_s, "account": str(account)}
        members.append(Member(params | (of_member or {}).get(number, {}), workers=width))
    usual: dict[str, Any] = {"epochs": 6, "batch_size": BATCH, "train": pipeline().map(noise), "retries": 10}
    usual |= {"valid": pipeline(30, 8), "gate_timeout_s": 20.0, "hang_timeout_s": 60.0}
    usual |= {"checkpoint_every": 1, "resources": declared_resources(0.2), "rehearsal": None}
    return Ensemble(name="faults", recipe=train, members=members, **{**usual, **options})
