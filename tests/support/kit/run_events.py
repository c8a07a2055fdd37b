"""Event logs of runs that never were, as a run would write them: the material of this folder's tests.

A small simulation with a fixed seed: members learn, are fed, use CPU, fail and come again.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np

from kit.event_dicts import lines

Event = dict[str, Any]

START = 1_760_000_000.0
CLASSES = 10
VERSIONS = {"python": "3.12.4", "torch": "2.13.0", "ray": "2.60.0", "optuna": "5.0.0", "ray_ensemble": "0.1.0"}


class Log:
    """Events appended in the order of their time."""

    def __init__(self) -> None:
        self.entries: list[Event] = []

    def add(self, t: float, kind: str, **fields: Any) -> None:
        self.entries.append({"v": 2, "t": START + t, "type": kind, **fields})

    def events(self) -> list[Event]:
        return sorted(self.entries, key=lambda e: e["t"])


def run_started(log: Log, name: str, mode: str, epochs: int, members: int, **fields: Any) -> None:
    head = {"name": name, "run_id": "r-1", "executor": "local", "mode": mode, "objective": "accuracy"}
    head |= {"direction": "max", "epochs": epochs, "members": members, "versions": VERSIONS, "revision": "4f2a91c"}
    log.add(0.0, "run_started", **head | {"host": "atlas", "pid": 4242, "resumed": False} | fields)


def identity(number: int, params: dict[str, Any], epochs: int, workers: int = 1) -> dict[str, Any]:
    what = {"member": f"member-{number}", "number": number, "params": params, "seed": number, "workers": workers}
    what |= {"threads": 1, "precision": "bf16", "epochs": epochs, "batch_size": 128, "cpus_per_worker": 1.0}
    return what | {"gpus_per_worker": 0.0, "memory_gb": None, "first_epoch": 0}


def list_run(members: int = 8, epochs: int = 6, seed: int = 7, until: float = math.inf) -> list[Event]:
    """A fixed list on two nodes in two cohorts; member-3 dies once and comes again, member-6 ends with NaN.

    `until` breaks the log off after so many seconds, as a running run's.
    """
    rng = random.Random(seed)
    log = Log()
    run_started(log, "digits", "list", epochs, members)
    for node in ("node-0", "node-1"):
        power = {"source": "12 W per busy core", "origin": "estimated"}
        log.add(0.1, "node", node=node, cpus=4, gpus=[], memory_gb=16.0, power=power)
    for i in range(members):
        params = {"width": 16 * 2 ** (i % 4), "lr": (0.1, 0.03)[i // 4 % 2], "optimizer": ("sgd", "adam")[i % 2]}
        log.add(0.2, "member", **identity(i, params, epochs, workers=2 if i % 4 == 3 else 1))
    at = {0: 0.5, 1: 0.0}
    for i in range(members):
        cohort, node = (0 if i < 5 else 1), f"node-{i % 2}"
        begin = at[0] if cohort == 0 else at[1] + 0.8
        end = simulate_member(log, rng, i, node, cohort, begin, epochs)
        at[1] = max(at[1], end) if cohort == 0 else at[1]
    feeders(log, epochs, members)
    last = max(e["t"] for e in log.entries) - START
    usage_and_power(log, rng, last)
    log.add(last + 0.6, "combined", **combined([f"member-{i}" for i in range(members) if i != 6]))
    log.add(last + 1.0, "run_finished", wall_s=last + 1.0, states={"finished": members - 1, "failed": 1})
    return [e for e in log.events() if e["t"] - START <= until]


def simulate_member(
    log: Log, rng: random.Random, i: int, node: str, cohort: int, begin: float, epochs: int
) -> float:
    """One member's events; returns when it ended."""
    name, workers = f"member-{i}", 2 if i % 4 == 3 else 1
    steps, pace = 40, 0.055 * (1 + 0.5 * (i % 4)) / workers
    t, epoch, attempt = begin, 0, 0
    place = {"node": node, "devices": list(range(workers)), "cohort": cohort, "feeder": "/run/f", "first_epoch": 0}
    while True:
        log.add(t, "placed", member=name, attempt=attempt, **place)
        t += 1.1 + 0.4 * rng.random()
        log.add(t, "started", member=name, attempt=attempt, pid=500 + i, epoch=epoch, step=0, startup_cpu_s=1.2)
        while epoch < epochs:
            wall = steps * pace * (0.9 + 0.2 * rng.random())
            if i == 3 and attempt == 0 and epoch == 3:
                error = "killed by signal 9 (SIGKILL)"
                log.add(t + wall / 2, "failed", member=name, attempt=0, error=error, reason="lost", retry=True)
                t, attempt = t + wall / 2 + 1.0, 1
                break
            if i == 6 and epoch == 4:
                error = "loss is nan at epoch 5, step 12, learning rate 0.03: lower it, or clip the gradient"
                log.add(t + wall / 2, "failed", member=name, attempt=0, error=error, reason="nan", retry=False)
                return t + wall / 2
            where = {"member": name, "attempt": attempt, "epoch": epoch}
            rate = 5000 / wall
            for step in (10, 20, 30):
                log.add(t + wall * step / steps, "progress", **where, step=step, steps=steps, samples_per_s=rate)
            t += wall
            log.add(t, "epoch", **where, **epoch_fields(rng, i, epoch, wall, private=6 if i == 5 else 0))
            epoch += 1
            path = f"members/{name}/checkpoint.safetensors"
            log.add(
                t, "checkpoint", member=name, attempt=attempt, epoch=epoch, step=0, path=path, weights_sha256="ab"
            )
        else:
            last = next(e for e in reversed(log.entries) if e["type"] == "epoch" and e["member"] == name)
            done = {"epoch": epochs, "metrics": last["metrics"], "weights_sha256": "ab"}
            log.add(t + 0.05, "finished", member=name, attempt=attempt, **done)
            return t + 0.05


def epoch_fields(rng: random.Random, i: int, epoch: int, wall: float, private: int = 0) -> dict[str, Any]:
    skill = 0.955 + 0.006 * (i % 4) + 0.004 * rng.random()
    accuracy = skill - 0.45 * math.exp(-0.9 * (epoch + 1)) + 0.004 * (rng.random() - 0.5)
    loss = 3.1 * (1 - accuracy) + 0.02 * rng.random()
    metrics = {"loss": loss, "accuracy": accuracy}
    share = {"shared_batches": 40 - private, "private_batches": private, "waited_s": 0.05 + 0.1 * rng.random()}
    done = {"step": 40, "samples": 5000, "wall_s": wall, "samples_per_s": 5000 / wall, "sync_s": 0.0}
    more = {"metrics": metrics, "train_loss": loss * 0.85, "lr": 0.1}
    more["skipped_steps"] = 1 if i == 2 and not epoch else 0
    return more | done | share


def feeders(log: Log, epochs: int, members: int) -> None:
    for cohort, (begin, many) in enumerate(((2.0, min(5, members)), (22.0, max(0, members - 5)))):
        for k in range(1, epochs + 1):
            count = {
                "prepared": 5000 * k,
                "consumed": 4950 * k * many,
                "skipped": 2 if k > 2 else 0,
                "restarts": 0,
            }
            count |= {"detached": cohort, "workers": 1, "capacity": 512, "ring_bytes": 512 * 12_300}
            levels = {"ring": 0.11, "workers": 0.97, "waiting": 0.63 if cohort == 0 else 0.08}
            log.add(begin + 2.2 * k, "feeder", node="node-0", cohort=cohort, fullness=levels, **count)


def usage_and_power(log: Log, rng: random.Random, last: float) -> None:
    roles = {"prepare": 0.55, "feed": 0.05, "orchestrate": 0.03}
    ended = {e["member"]: e["t"] - START for e in log.entries if e["type"] in ("finished", "failed")}
    placed: dict[str, float] = {}
    for event in log.entries:
        if event["type"] == "placed":
            placed.setdefault(event["member"], event["t"] - START)
    where = {e["member"]: e["node"] for e in log.entries if e["type"] == "placed"}
    steps = [2.0 * k for k in range(1, int(last / 2) + 1)] + [last]
    for t in steps:
        for offset, node in enumerate(("node-0", "node-1")):
            for k, (role, share) in enumerate(roles.items()):
                who = {"node": node, "role": role, "member": None, "rank": None, "pid": 100 + 10 * offset + k}
                who |= {} if role == "orchestrate" else {"cohort": 0}
                log.add(t, "usage", **who, cpu_s=share * t, origin="measured")
            busy = 1.2
            for name, begin in placed.items():
                if where[name] != node or t < begin:
                    continue
                spent = max(0.0, min(t, ended[name]) - begin - 1.2)
                who = {"node": node, "member": name, "rank": 0, "pid": 500 + int(name[7:])}
                log.add(t, "usage", **who, role="startup", cpu_s=min(1.2, t - begin), origin="measured")
                log.add(t, "usage", **who, role="train", cpu_s=0.93 * spent, origin="measured")
                busy += 0.8 if t < ended[name] else 0.0
            watts = 12.0 * busy * (0.92 + 0.16 * rng.random())
            source = {"origin": "estimated", "source": "12 W per busy core"}
            part = {"name": "cpu", "kind": "cpu", "energy_j": 2.0 * watts, "origin": "estimated"}
            figures = {"watts": watts, "energy_j": 2.0 * watts, "interval_s": 2.0, "parts": [part]}
            log.add(t, "power", node=node, **figures, **source)


def measured(events: list[Event], idle_w: float = 8.0) -> list[Event]:
    """The run with energy that was measured on nodes whose idle power is known."""
    source = {"origin": "measured", "source": "RAPL package-0"}
    last = dict.fromkeys(("node-0", "node-1"), START)

    def measure(event: Event) -> Event:
        if event["type"] != "power":
            return event
        part = {"name": "package-0", "kind": "cpu", "device": None, "energy_j": event["energy_j"]}
        interval_s, last[event["node"]] = event["t"] - last[event["node"]], event["t"]
        part |= {"origin": "measured", "idle_j": min(event["energy_j"], interval_s * idle_w)}
        return event | source | {"interval_s": interval_s, "busy_s": None, "parts": [part]}

    return [measure(event) for event in events]


def combined(members: list[str]) -> dict[str, Any]:
    """The `combined` event that these members' `predictions` give when they are averaged."""
    from ensemble.combine import find_math
    from ensemble.combine.methods import average_weights, mix
    from ensemble.spec.task import CLASSIFICATION

    math = find_math(CLASSIFICATION)
    alone = [predictions(int(member[7:])) for member in members]
    target = alone[0][2]
    pooled = math.calibrate(mix([p for p, _, _ in alone], average_weights(len(alone))), 0.6)
    each = [math.measure(p, target) for p, _, _ in alone]
    best = min(range(len(each)), key=lambda i: -each[i]["accuracy"])
    curves = {"ensemble": math.reliability(pooled, target), "best": math.reliability(alone[best][0], target)}
    mean = {name: float(np.mean([one[name] for one in each])) for name in each[0]}
    how = {"method": "average", "declared": "average", "code": None, "split": "test", "temperature": 0.6}
    how |= {"calibration": {"method": "temperature", "value": 0.6, "reason": None}, "left_out": {}}
    return how | {
        "candidates": members,
        "members": members,
        "weights": dict.fromkeys(members, 1 / len(members)),
        "best_member": members[best],
        "metrics": {"ensemble": math.measure(pooled, target), "best": each[best], "mean": mean},
        "reliability": {name: [list(point) for point in curve] for name, curve in curves.items()},
        "reason": None,
        "note": None,
    }


def search_run(trials: int = 24, epochs: int = 8, seed: int = 3) -> list[Event]:
    """A search whose pruner stops two thirds early; the last trial is still running."""
    rng = random.Random(seed)
    log = Log()
    run_started(log, "sweep", "search", epochs, trials)
    power = {"source": None, "origin": "unavailable"}
    log.add(0.1, "node", node="node-0", cpus=4, gpus=[], memory_gb=16.0, power=power)
    t = 0.5
    for i in range(trials):
        lr = 10 ** rng.uniform(-4, -0.5)
        params = {"lr": lr, "width": rng.choice((32, 64, 128)), "dropout": rng.uniform(0, 0.5), "momentum": 0.9}
        peak = 0.98 - 0.04 * abs(math.log10(lr) + 1.8) - 0.03 * params["dropout"] + 0.005 * rng.random()
        peak = 0.975 if i == trials - 1 else peak
        name = f"member-{i}"
        log.add(t, "member", **identity(i, params, epochs))
        place = {"node": "node-0", "devices": [0], "cohort": 0, "feeder": None, "first_epoch": 0}
        log.add(t + 0.1, "placed", member=name, attempt=0, **place)
        log.add(t + 0.6, "started", member=name, attempt=0, pid=500 + i, epoch=0, step=0, startup_cpu_s=0.5)
        now = t + 0.6
        for epoch in range(epochs):
            now += 0.8
            fields = epoch_fields(rng, i, epoch, 0.8)
            fields["metrics"] = {"accuracy": peak - 0.5 * math.exp(-0.7 * (epoch + 1)), "loss": 3 * (1 - peak)}
            log.add(now, "epoch", member=name, attempt=0, epoch=epoch, **fields)
            if epoch in (0, 2) and peak < (0.93, 0.955)[epoch // 2]:
                log.add(now + 0.01, "pruned", member=name, attempt=0, epoch=epoch)
                break
            if i == trials - 1 and epoch == 3:
                return log.events()
        else:
            done = {"epoch": epochs, "metrics": fields["metrics"], "weights_sha256": "ab"}
            log.add(now + 0.02, "finished", member=name, attempt=0, **done)
        t = now - 2.5 if i % 2 else now - 1.0
        t = max(t, 0.5)
    return log.events()


def minimizing(*further: str, origin: str = "estimated") -> list[Event]:
    """A search in which each second finished trial costs more than the one before."""
    events, finished = [], 0
    objectives = [{"name": name, "mode": "max" if name == "speed" else "min"} for name in further]
    for event in search_run():
        if event["type"] == "run_started":
            event |= {"further_objectives": objectives}
        events.append(event)
        if event["type"] == "finished":
            event |= {"metrics": {**event["metrics"], "speed": float(finished % 4)}}
            used = {"energy_j": 100.0 * (1 + finished % 3), "energy_origin": origin, "cpu_s": 7.5 * (1 + finished)}
            events.append({**event, "type": "cost", "metrics": None, **used})
            finished += 1
    return events


def just_started() -> list[Event]:
    """A run that has announced itself and no more."""
    log = Log()
    run_started(log, "fresh", "list", 3, 4)
    return log.events()


def predictions(number: int, rows: int = 2000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A member's probabilities [n, C], index [n] and target [n]: right mostly, a little too sure of itself."""
    truth = np.random.default_rng(0).integers(0, CLASSES, rows)
    hard = np.random.default_rng(1).exponential(1.0, rows)[:, None]
    shared = np.random.default_rng(2).normal(0, 1, (rows, CLASSES))
    logits = 0.5 * shared + np.random.default_rng(100 + number).normal(0, 1.1, (rows, CLASSES))
    logits[np.arange(rows), truth] += 6.6 + 0.15 * (number % 4) - 2.0 * hard[:, 0]
    powers = np.exp(1.8 * logits)
    probabilities = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
    return probabilities, np.arange(rows, dtype=np.int64), truth.astype(np.int64)


def write_run(path: Path, events: list[Event], predicted: range = range(0)) -> Path:
    """A run directory with these events and the saved predictions of these members."""

    from ensemble.store import RunDir
    from kit.kept_predictions import save_predictions

    path.mkdir(parents=True, exist_ok=True)
    run_dir = RunDir(path)
    run_dir.events.write_bytes(lines(events))
    for number in predicted:
        for split in ("valid", "test"):
            file = run_dir.predictions(f"member-{number}")
            file.parent.mkdir(parents=True, exist_ok=True)
            save_predictions(file, split, *predictions(number))
    return path
