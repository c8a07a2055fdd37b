"""Estimates time, memory and energy of members and of a run from a few measured steps; each figure is an estimate.

A member alone takes steps x epochs x the measured seconds of a step, and those of evaluating the validation split
after each epoch and every split at the end. A run is played through with the packing of
the schedule (`ensemble.schedule.pack`): members start where they have room; those that train at one time on CPUs
share the cores, so that all of them slow down where together they keep more cores busy than there are. The imports
of processes, those of the user's modules and the building of models among them, the preparation of all splits for
each wave of members, measuring, and the overheads of members and of the run come on top of that. Waiting for data
and the exchange between workers are not in it.
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

#: Seconds and CPU-seconds of what no trial step shows, in units of the imports of one process, which tell how fast
#: a machine is: of a run (feeder, combination, report), more of one on Ray (its start and end), and of a member
#: (its start, checkpoints, reports). Measured on runs of small models.
OVERHEADS = {"run": (1.0, 1.0), "ray": (2.5, 2.0), "member": (0.05, 0.15)}


HOW = (
    "steps x epochs x seconds of a step and evaluations, measured alone on this machine; members measured and "
    "packed as the schedule does; the imports of processes and the building of models, preparation for each wave "
    "of members, and typical overheads of a run and its members; without the exchange between workers"
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
    startup: dict[str, float],
    imports: int,
    executor: str,
    shares: bool,
) -> dict[str, Any]:
    """What all members take together on one node.

    Args:
        groups: rows after `estimate_members`; of a search, of a few of its trials.
        prepare_s: CPU-seconds of preparing a sample.
        startup: of one process: `seconds` until it has imported what all need, and the
            CPU-seconds of `measure_beginning`.
        imports: how many processes import what all need, one after the other; others are copies of the last.
        shares: whether each sample is prepared once for all members.
    """
    from ensemble.schedule.needs import resolve_devices

    names = ("seconds", "cpu_s", "energy_j", "memory_gb", "at_once", "overhead_s", "overhead_cpu_s")
    unknown: dict[str, Any] = dict.fromkeys(names)
    begun = {"startup_s": imports * startup["seconds"], "startup_cpu_s": imports * startup["preload"]}
    unknown |= {**begun, "origin": "unavailable", "energy_origin": "unavailable"}
    if any(row["_figures"] is None for row in groups):
        failed = next(row for row in groups if row["_figures"] is None)
        return unknown | {"how": f"the steps of {failed['members'][0]} could not be measured"}
    devices = resolve_devices(ensemble.devices, has_gpus=bool(node.gpus))
    known = _apply_profiles(ensemble, groups, node, devices)
    samples = ensemble.samples
    epochs = [identity.epochs for identity, _ in known]
    scale = ensemble.search.expected_trials / len(known) if ensemble.search is not None else 1.0
    held_out = sum(len(split) for name in PREDICTED_SPLITS if (split := getattr(ensemble, name)) is not None)
    played = known * max(1, round(scale))
    more_s, more_cpu_s = _sum_overheads(executor, len(played), startup, ensemble.prep_workers, shares=shares)
    measured = _select_measured(ensemble, groups, node, devices)
    measuring_s = scale * sum(row["measuring_s"] for row in measured)
    if executor == "inline":
        at_once, memory_gb = 1, max(row["memory_gb"] for _, row in played)
        seconds = sum(row["seconds"] for _, row in played)
    else:
        play = _play if len(played) <= MOST_PLAYED else _divide
        seconds, at_once, memory_gb = play(played, node, devices)
    # Members that start together share a stream; each split is kept in memory once it is prepared for them.
    waves = -(-len(played) // at_once)
    prepared = waves * max(epochs) if shares else scale * sum(epochs)
    held_out *= waves if shares else len(played)
    prepare_cpu_s = (prepare_s or 0.0) * (samples * prepared + held_out)
    cpu_s = scale * sum(row["cpu_s"] for _, row in known) + prepare_cpu_s
    if executor == "inline":
        seconds += prepare_cpu_s
    else:
        seconds = max(seconds, cpu_s / node.cpus)  # preparation takes cores, too
    overhead_s = more_s + measuring_s
    overhead_cpu_s = more_cpu_s + scale * sum(row["_measuring_cpu_s"] for row in measured)
    overhead_cpu_s += startup["load"] + startup["train"] if measured else 0.0
    seconds += begun["startup_s"] + overhead_s
    begun_cpu_s = begun["startup_cpu_s"] + overhead_cpu_s
    cpu_s += begun_cpu_s
    energy_j = _estimate_energy(power, [row for _, row in played], prepare_cpu_s + begun_cpu_s, seconds)
    return {
        **begun,
        "overhead_s": overhead_s,
        "overhead_cpu_s": overhead_cpu_s,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "energy_j": energy_j,
        "memory_gb": memory_gb,
        "at_once": at_once,
        "origin": "estimated",
        "energy_origin": "unavailable" if energy_j is None else "estimated",
        "how": HOW,
    }


def _select_measured(ensemble: Ensemble, groups: Table, node: Node, devices: str) -> Table:
    """The groups of which the run itself measures a member, one after the other."""
    from ensemble.schedule.profiles import select_unmeasured

    members = [identity for row in groups for identity in row["_members"]]
    coming = 0 if ensemble.search is None else ensemble.search.expected_trials
    measured = {one.member for one in select_unmeasured(members, [node], devices, {}, coming)}
    return [row for row in groups if measured & {identity.member for identity in row["_members"]}]


def _sum_overheads(
    executor: str, members: int, startup: dict[str, float], prep_workers: int, *, shares: bool
) -> tuple[float, float]:
    """Seconds and CPU-seconds of what no trial step shows: `OVERHEADS`, the user's imports, models to be built."""
    counts = {"run": 1, "ray": int(executor == "ray"), "member": members}
    seconds, cpu_s = (sum(counts[name] * OVERHEADS[name][i] for name in counts) for i in (0, 1))
    of_member = startup["load"] + startup["train"] + startup["build"]
    own = startup["load"] + of_member  # of the driver and a member, one after the other
    own_cpu_s = startup["load"] + members * of_member
    if executor == "inline":
        own_cpu_s = own = of_member + (members - 1) * startup["build"]
    elif shares:  # a feeder, its processes, and one that compares samples
        own_cpu_s += (1 + prep_workers) * startup["prepare"] + startup["load"]
    return seconds * startup["seconds"] + own, cpu_s * startup["preload"] + own_cpu_s


def _apply_profiles(
    ensemble: Ensemble, groups: Table, node: Node, devices: str
) -> list[tuple[Identity, dict[str, Any]]]:
    """Each member with what was measured in the place of what it left open, as the planner does, and its row."""
    from ensemble.schedule import Profile, apply_profile
    from ensemble.schedule.needs import uses_gpus
    from ensemble.schedule.profiles import MemoryCap, plan_core_shares

    cap = MemoryCap([node], devices)
    profiles: list[tuple[Identity, Profile, dict[str, Any]]] = []
    for row in groups:
        figures = row["_figures"]
        by_width = {
            name: {1: figures[name]} for name in ("step_s", "samples_per_s", "cpus", "gpus") if name in figures
        }
        rest = {
            name: figures[name]
            for name in ("prepare_s", "memory_gb", "gpu_memory_gb", "gpu_size_gb")
            if name in figures
        }
        profile = Profile.from_dict({"shape": "", "device": "cpu", "members": row["members"], **by_width, **rest})
        profiles += [(identity, profile, row) for identity in row["_members"]]
    members = [apply_profile(identity, profile, identity.workers, cap) for identity, profile, _ in profiles]
    on_gpus = any(uses_gpus(one, devices) for one in members) and bool(node.gpus)
    if ensemble.search is None and not on_gpus and all("cpus_per_worker" in one.auto for one in members):
        shares = plan_core_shares(
            [(identity, profile) for identity, profile, _ in profiles],
            ensemble.samples,
            cores=node.cpus,
            widest=max(1, int(node.cpus)),
        )
        assert shares is not None
        members = [replace(one, cpus_per_worker=shares.cpus[one.member]) for one in members]
    return [(one, row) for one, (_, _, row) in zip(members, profiles, strict=True)]


def _play(
    members: Sequence[tuple[Identity, dict[str, Any]]], node: Node, devices: str
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
    return now, max(1, most), memory_gb


def _divide(
    members: Sequence[tuple[Identity, dict[str, Any]]], node: Node, devices: str
) -> tuple[float, int, float]:
    """As `_play`, of many members: the work divided by the room, and no less than the longest member."""
    from ensemble.schedule import pack

    placed = pack([replace(one, member=f"played-{i}") for i, (one, _) in enumerate(members)], [], [node], devices)
    at_once = max(1, len(placed))
    longest = max(row["seconds"] for _, row in members)
    work = sum(row["seconds"] for _, row in members) / at_once
    memory_gb = at_once * max(row["memory_gb"] * one.workers for one, row in members)
    return max(longest, work), at_once, memory_gb


def _estimate_energy(
    power: dict[str, Any], rows: Sequence[dict[str, Any]], prepare_cpu_s: float, seconds: float
) -> float | None:
    """Joules of the run: those of its members and of preparation, and idle power in the meantime."""
    if any(row["energy_j"] is None for row in rows):
        return None
    prepare_j = _estimate_dynamic_j(power, prepare_cpu_s, None)
    idle_w = (power["idle_j"] or 0.0) / power["interval_s"] if power["interval_s"] else 0.0
    return float(sum(row["energy_j"] for row in rows) + (prepare_j or 0.0) + idle_w * seconds)
