"""Estimates time, memory and energy of members and of a run from a few measured steps.

A member takes steps x epochs x the measured seconds of a step, and those of evaluating its splits. In a run as
many members train at once as have room (`ensemble.schedule.packing.pack`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ensemble.spec import PREDICTED_SPLITS

if TYPE_CHECKING:
    from ensemble.schedule.needs import Node
    from ensemble.spec import Ensemble, Identity

Table = list[dict[str, Any]]

HOW = (
    "steps x epochs x seconds of a step, evaluations and preparation, measured alone on this machine; without "
    "starting processes, measuring, checkpoints, the combination, the report and the exchange between workers"
)


def estimate_members(groups: Table, power: dict[str, Any]) -> None:
    """Add to each row what one of its members takes: `seconds`, `cpu_s`, `energy_j`; None where not known."""
    for row in groups:
        row |= dict.fromkeys(("seconds", "cpu_s", "energy_j"))
        if row["error"] is not None:
            continue
        seconds = row["steps"] * row["epochs"] * row["step_s"]
        workers = row["_members"][0].workers
        cpu_s = seconds * row["cpus"] * workers
        if row["_evaluation"] is not None:
            seconds += row["evaluations"] * row["_evaluation"]["evaluate_s"]
            cpu_s += row["evaluations"] * row["_evaluation"]["evaluate_cpu_s"] * workers
        on_gpu = bool(row["gpu_memory_gb"])
        row |= {"seconds": seconds, "cpu_s": cpu_s}
        row["energy_j"] = _estimate_dynamic_j(power, cpu_s, seconds * workers if on_gpu else None)


def _estimate_dynamic_j(power: dict[str, Any], cpu_s: float, gpu_s: float | None) -> float | None:
    """Joules beyond idle power, as while steps were trained: by CPU-seconds, or by the seconds of a GPU."""
    if power["energy_j"] is None:
        return None
    dynamic_j = power["energy_j"] - (power["idle_j"] or 0.0)
    if gpu_s is not None:
        return float(dynamic_j / power["interval_s"] * gpu_s) if power["interval_s"] else None
    return float(dynamic_j / power["busy_s"] * cpu_s) if power["busy_s"] else None


def estimate_run(
    ensemble: Ensemble,
    groups: Table,
    node: Node,
    prepare_s: float | None,
    power: dict[str, Any],
    *,
    is_inline: bool,
    shares: bool,
    repeats: bool,
    base_gb: float = 0.0,
) -> dict[str, Any]:
    """What all members take together on one node.

    Args:
        groups: rows after `estimate_members`; of a search, of a few of its trials.
        prepare_s: CPU-seconds of preparing a sample.
        is_inline: whether members train one after the other.
        shares: whether each sample is prepared once for all members that train at once.
        repeats: whether it is then prepared once for all epochs.
        base_gb: memory of the network that members share (`Recipe.base`), in GiB.
    """
    failed = next((row for row in groups if row["error"] is not None), None)
    if failed is not None:
        unknown = dict.fromkeys(("seconds", "cpu_s", "energy_j", "memory_gb", "base_gb", "at_once"))
        how = f"the steps of {failed['members'][0]} could not be measured"
        if ensemble.train is None:
            how = "what a train function takes that reads its own data is known once it has run"
        return {**unknown, "origin": "unavailable", "energy_origin": "unavailable", "how": how}
    members = [(identity, row) for row in groups for identity in row["_members"]]
    scale = ensemble.search.expected_trials / len(members) if ensemble.search is not None else 1.0
    count = round(scale * len(members))
    at_once = 1 if is_inline else min(count, _count_at_once(members, ensemble, node.without_base(base_gb)))
    held_out = sum(len(split) for name in PREDICTED_SPLITS if (split := getattr(ensemble, name)) is not None)
    epochs = [identity.epochs for identity, _ in members]
    times = -(-count // at_once) if shares else count
    in_all = times * (1 if repeats else max(epochs)) if shares else scale * sum(epochs)
    prepared = ensemble.samples * in_all + times * held_out
    prepare_cpu_s = (prepare_s or 0.0) * prepared
    cpu_s = scale * sum(row["cpu_s"] for _, row in members) + prepare_cpu_s
    work = scale * sum(row["seconds"] for _, row in members) / at_once
    if is_inline:
        seconds = work + prepare_cpu_s
    else:
        seconds = max(work, *(row["seconds"] for _, row in members), cpu_s / node.cpus)
    energy_j = None
    if all(row["energy_j"] is not None for _, row in members):
        idle_w = (power["idle_j"] or 0.0) / power["interval_s"] if power["interval_s"] else 0.0
        of_members = scale * sum(row["energy_j"] for _, row in members)
        energy_j = float(of_members + (_estimate_dynamic_j(power, prepare_cpu_s, None) or 0.0) + idle_w * seconds)
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "energy_j": energy_j,
        "memory_gb": base_gb + at_once * max(row["memory_gb"] * identity.workers for identity, row in members),
        "base_gb": base_gb,
        "at_once": at_once,
        "origin": "estimated",
        "energy_origin": "unavailable" if energy_j is None else "estimated",
        "how": HOW,
    }


def _count_at_once(members: Sequence[tuple[Identity, dict[str, Any]]], ensemble: Ensemble, node: Node) -> int:
    """How many members have room on the node, with what was measured in the place of what they left open: those of
    a list share the cores then.
    """
    from ensemble.schedule.needs import resolve_devices
    from ensemble.schedule.packing import pack

    most_cpus = node.cpus if ensemble.search is not None else node.cpus / len(members)
    needs = []
    for identity, row in members:
        measured = {"cpus_per_worker": min(row["cpus"], most_cpus), "memory_gb": row["memory_gb"]}
        needs.append(replace(identity, **{name: measured[name] for name in measured if name in identity.auto}))
    return max(1, len(pack(needs, [], [node], resolve_devices(ensemble.devices, has_gpus=bool(node.gpus)))))
