"""Estimates time, memory and energy of members and of a run from a few measured steps; each figure is an estimate.

A member alone takes steps x epochs x the measured seconds of a step, and those of evaluating the validation split
after each epoch and every split at the end. A run is played through with the packing of
the schedule (`ensemble.schedule.pack`): members start where they have room; those that train at one time on CPUs
share the cores, so that all of them slow down where together they keep more cores busy than there are. The imports
of processes and the preparation of all splits come on top of that. Checkpoints, the combination, the report,
waiting for data and the exchange between workers are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ensemble.spec import PREDICTED_SPLITS

if TYPE_CHECKING:
    from ensemble.schedule import Node
    from ensemble.spec import Ensemble, Identity

Table = list[dict[str, Any]]
MOST_PLAYED = 400
"""Members of a run that is played through; of more, the time is the work divided by the room."""

HOW = (
    "steps x epochs x seconds of a step and evaluations, measured alone on this machine, members packed as the "
    "schedule does, and the imports of processes; without checkpoints, combination, report and the exchange "
    "between workers"
)


def estimate_members(groups: Table, power: dict[str, Any]) -> None:
    """Add to each row what one of its members takes: `seconds`, `cpu_s`, `energy_j`; None where not known."""
    for row in groups:
        row |= dict.fromkeys(("seconds", "cpu_s", "energy_j"))
        if row["_figures"] is None:
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
    startup: tuple[float, float],
    is_serial: bool,
    shares: bool,
) -> dict[str, Any]:
    """What all members take together on one node.

    Args:
        groups: rows after `estimate_members`; of a search, of a few of its trials.
        prepare_s: CPU-seconds of preparing a sample.
        startup: seconds and CPU-seconds until the processes of the run have begun.
        is_serial: whether members train one after the other.
        shares: whether each sample is prepared once for all members.
    """
    from ensemble.schedule.needs import resolve_devices

    unknown: dict[str, Any] = dict.fromkeys(("seconds", "cpu_s", "energy_j", "memory_gb", "at_once"))
    begun = {"startup_s": startup[0], "startup_cpu_s": startup[1]}
    unknown |= {**begun, "origin": "unavailable", "energy_origin": "unavailable"}
    if any(row["_figures"] is None for row in groups):
        failed = next(row for row in groups if row["_figures"] is None)
        return unknown | {"how": f"the steps of {failed['members'][0]} could not be measured"}
    devices = resolve_devices(ensemble.devices, has_gpus=bool(node.gpus))
    known = _apply_profiles(groups, node, devices)
    samples = ensemble.samples
    epochs = [identity.epochs for identity, _ in known]
    scale = ensemble.search.expected_trials / len(known) if ensemble.search is not None else 1.0
    prepared = max(epochs) if shares else scale * sum(epochs)
    held_out = sum(len(split) for name in PREDICTED_SPLITS if (split := getattr(ensemble, name)) is not None)
    held_out *= 1 if shares else round(scale * len(known))  # each split is kept in memory once it is prepared
    prepare_cpu_s = (prepare_s or 0.0) * (samples * prepared + held_out)
    cpu_s = scale * sum(row["cpu_s"] for _, row in known) + prepare_cpu_s
    on_cpu = not any(row["gpu_memory_gb"] for row in groups)
    played = known * max(1, round(scale))
    if is_serial:
        seconds, at_once, memory_gb = sum(row["seconds"] for _, row in played) + prepare_cpu_s, 1, 0.0
        memory_gb = max(row["memory_gb"] for _, row in played)
    elif len(played) <= MOST_PLAYED:
        seconds, at_once, memory_gb = _play(played, node, devices, prepare_cpu_s, on_cpu=on_cpu)
    else:
        seconds, at_once, memory_gb = _divide(played, node, devices, cpu_s, on_cpu=on_cpu)
    seconds += startup[0]
    energy_j = _estimate_energy(power, [row for _, row in played], prepare_cpu_s + startup[1], seconds)
    return {
        **begun,
        "seconds": seconds,
        "cpu_s": cpu_s + startup[1],
        "energy_j": energy_j,
        "memory_gb": memory_gb,
        "at_once": at_once,
        "origin": "estimated",
        "energy_origin": "unavailable" if energy_j is None else "estimated",
        "how": HOW,
    }


def _apply_profiles(groups: Table, node: Node, devices: str) -> list[tuple[Identity, dict[str, Any]]]:
    """Each member with what was measured in the place of what it left open, and its row."""
    from ensemble.schedule import Profile, apply_profile
    from ensemble.schedule.profiles import MemoryCap

    cap = MemoryCap([node], devices)
    found = []
    for row in groups:
        figures = row["_figures"]
        by_width = {
            name: {1: figures[name]} for name in ("step_s", "samples_per_s", "cpus", "gpus") if name in figures
        }
        rest = {name: figures[name] for name in ("memory_gb", "gpu_memory_gb", "gpu_size_gb") if name in figures}
        profile = Profile.from_dict({"shape": "", "device": "cpu", "members": row["members"], **by_width, **rest})
        for identity in row["_members"]:
            found.append((apply_profile(identity, profile, identity.workers, cap), row))
    return found


def _play(
    members: Sequence[tuple[Identity, dict[str, Any]]], node: Node, devices: str, prepare_s: float, *, on_cpu: bool
) -> tuple[float, int, float]:
    """Seconds until all have ended, most members at one time, and the most host memory of them in GiB."""
    from ensemble.schedule import pack

    rows = {f"played-{i}": row for i, (_, row) in enumerate(members)}
    waiting = [replace(identity, member=f"played-{i}") for i, (identity, _) in enumerate(members)]
    left = {name: row["seconds"] for name, row in rows.items()}
    running: list[Any] = []
    total_work = sum(left.values()) or 1.0
    now, most, memory_gb = 0.0, 0, 0.0
    while waiting or running:
        placed = pack(waiting, running, [node], devices)
        names = {one.member for one in placed}
        running += placed
        waiting = [one for one in waiting if one.member not in names]
        if not running:  # none fits beside none: `check_fit` has refused that
            break
        most = max(most, len(running))
        memory_gb = max(memory_gb, sum(rows[one.member]["memory_gb"] * one.identity.workers for one in running))
        busy = sum(rows[one.member]["cpus"] * one.identity.workers for one in running)
        speed = min(1.0, node.cpus / busy) if busy else 1.0
        step = min(left[one.member] for one in running)
        now += step / speed
        for one in running:
            left[one.member] -= step
        running = [one for one in running if left[one.member] > 1e-9 * total_work]
    least = (sum(row["cpu_s"] for row in rows.values()) + prepare_s) / node.cpus  # preparation takes cores, too
    return max(now, least), most, memory_gb


def _divide(
    members: Sequence[tuple[Identity, dict[str, Any]]], node: Node, devices: str, cpu_s: float, *, on_cpu: bool
) -> tuple[float, int, float]:
    """As `_play`, of many members: the work divided by the room, and no less than the longest member."""
    from ensemble.schedule import pack

    placed = pack([replace(one, member=f"played-{i}") for i, (one, _) in enumerate(members)], [], [node], devices)
    at_once = max(1, len(placed))
    longest = max(row["seconds"] for _, row in members)
    work = sum(row["seconds"] for _, row in members) / at_once
    memory_gb = at_once * max(row["memory_gb"] * one.workers for one, row in members)
    return max(longest, work, cpu_s / node.cpus), at_once, memory_gb


def _estimate_energy(
    power: dict[str, Any], rows: Sequence[dict[str, Any]], prepare_cpu_s: float, seconds: float
) -> float | None:
    """Joules of the run: those of its members and of preparation, and idle power in the meantime."""
    if any(row["energy_j"] is None for row in rows):
        return None
    prepare_j = _estimate_dynamic_j(power, prepare_cpu_s, None)
    idle_w = (power["idle_j"] or 0.0) / power["interval_s"] if power["interval_s"] else 0.0
    return float(sum(row["energy_j"] for row in rows) + (prepare_j or 0.0) + idle_w * seconds)
