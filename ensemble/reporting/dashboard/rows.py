"""The rows of a run's documents: members, their attempts, nodes, and what was used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.events import NodeChanged, Power
from ensemble.reporting.ranking import add_up, finite_or_none, metric, rounded
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.sections import cost as cost_section
from ensemble.reporting.sections import impact, time_to_solution
from ensemble.reporting.time_left import fraction_done, member_epochs, member_left_s

if TYPE_CHECKING:
    from ensemble.meter.ledger_rows import Total
    from ensemble.store.member import MemberState
    from ensemble.store.state import RunState

#: Significant digits of metrics, so that four decimals are those of the log's number.
DIGITS = 9
#: What `member_row` returns, in its order.
COLUMNS = (
    "id", "number", "state", "epoch", "epochs", "step", "steps", "done", "metric", "metrics", "further", "params",
    "options", "workers", "node", "place", "devices", "shares", "cohort", "attempts", "failures", "samples_per_s",
    "left_s", "waited", "synced", "memory_gb", "error", "reason", "advice", "first_epoch", "checkpoint", "lineage",
    "code", "private",
)  # fmt: skip
COST_COLUMNS = (
    "cpu_s", "energy_j", "origin", "full_cpu_s", "full_energy_j", "full_origin", "idle_j", "mean_w", "peak_w",
    "gpu_s",
)  # fmt: skip
_OPTIONS = (
    "precision", "optimizer", "schedule", "batch_size", "accumulate", "compression", "communicator", "seed",
)  # fmt: skip
_USUAL = {"accumulate": 1}

#: What helps against a failure, by its reason.
ADVICE = {
    "nan": "The loss was not a number. A lower learning rate, a warm-up or clipped gradients may help: clone the "
    "member with changes.",
    "oom": "It ran out of memory. A smaller batch with accumulation needs less; memory_gb or gpus_per_worker "
    "in its Resources give it more.",
    "lost": "Its process or node was ended from outside. `ensemble resume` goes on from its checkpoint.",
    "hang": "It made no step for a long time. Look into its log for what it waits for.",
    "disk": "The disk is full. Make room, then `ensemble resume`.",
    "unreachable": "Its data could not be read, although it was tried again for a minute. When the file server "
    "answers, `ensemble resume`.",
    "error": "The recipe raised an error; the traceback is in the log. Mend it, then `ensemble run` again.",
}


def member_row(run: RunProjection, member: MemberState) -> list[Any]:
    """Returns a member's row, by `COLUMNS`."""
    state, own = run.state, member.identity
    memory_gb = member.history[-1].memory_gb if member.history else None
    checkpoint = member.checkpoint.epoch if member.checkpoint is not None else None
    train_s, waited_s, sync_s = (add_up(member, name) for name in ("train_s", "waited_s", "sync_s"))
    left_s = member_left_s(state, member) if state.ended is None and not run.is_lost else None
    failed = member.reason if member.error else None
    params = {"seed": own.get("seed"), **own.get("params", {})}
    row = {
        "id": member.id,
        "number": member.number,
        "state": run.member_word(member),
        "epoch": member.epoch,
        "epochs": member_epochs(state, member),
        "step": member.step,
        "steps": member.steps,
        "done": round(fraction_done(state, member), 4),
        "metric": rounded(metric(member, state.objective), DIGITS),
        "further": [rounded(member.value_of(each), DIGITS) for each in state.further_objectives],
        "metrics": {name: rounded(value, DIGITS) for name, value in member.metrics.items()},
        "params": {name: _plain(value) for name, value in params.items()},
        "options": _describe_options(own),
        "workers": own.get("workers", 1),
        "node": member.node,
        "place": member.place,
        "devices": [d for d in member.devices if d is not None],
        "shares": {"cpus": own.get("cpus_per_worker"), "gpus": own.get("gpus_per_worker")},
        "cohort": member.cohort,
        "attempts": member.attempts,
        "failures": member.failures,
        "samples_per_s": rounded(member.training_rate),
        "left_s": rounded(left_s),
        "waited": _share(waited_s, train_s),
        "synced": _share(sync_s, train_s),
        "memory_gb": rounded(memory_gb),
        "error": member.error,
        "reason": member.reason,
        "advice": ADVICE.get(failed or "") if failed else None,
        "first_epoch": member.first_epoch,
        "checkpoint": checkpoint,
        "lineage": own.get("lineage"),
        "code": member.code,
        "private": _private_share(member),
    }
    return [row[name] for name in COLUMNS]


def _private_share(member: MemberState) -> float | None:
    """Returns the share of its batches that a member prepared for itself."""
    shared, private = (add_up(member, name) for name in ("shared_batches", "private_batches"))
    return _share(private, shared + private)


def list_spans(member: MemberState) -> list[list[Any]]:
    """Returns a member's attempts: number, node, devices, cohort, placed, started, ended, how it ended."""
    return [
        [
            *(span.attempt, span.node, [d for d in span.devices if d is not None], span.cohort),
            *(span.placed, span.started, span.ended, span.outcome or "running"),
        ]
        for span in member.spans
    ]


def list_nodes(run: RunProjection, power: Mapping[str, Power]) -> list[dict[str, Any]]:
    """Returns each node with its GPUs.

    Args:
        power: the last `power` event of each node.
    """
    state, is_over = run.state, run.is_lost or run.state.ended is not None
    return [_describe_node(state, name, power.get(name), is_over=is_over) for name in state.nodes]


def _describe_node(state: RunState, name: str, power: Power | None, *, is_over: bool) -> dict[str, Any]:
    known = state.nodes[name].info
    info, power = known or NodeChanged(node=name), power or Power(node=name, origin="unavailable")
    length = power.interval_s or 0.0
    by_device = {part.device: part for part in power.parts or () if part.kind == "gpu"}
    gpus = []
    for i, gpu in enumerate(info.gpu_ids):
        part = by_device.get(gpu)
        activity = part.activity if part is not None else None
        broken = state.quarantined.get(str(gpu))
        memory, free = _at(info.gpu_memory_gb, i), _at(info.gpu_free, i)
        gpus.append(
            {
                "id": gpu,
                "name": _at(info.gpus, i),
                "memory_gb": rounded(memory),
                "free_gb": None if memory is None or free is None else rounded(memory * free),
                "share": _at(info.gpu_shares, i),
                "parent": _at(info.gpu_parents, i),
                "use": None if activity is None else _share(sum(seconds for *_, seconds in activity), length),
                "watts": rounded(part.energy_j / length) if part is not None and length else None,
                "quarantined": broken.detail if broken else None,
            }
        )
    described = info.power or {}
    busy = power.busy_s
    return {
        "name": name,
        "cpus": info.cpus if known else None,
        "memory_gb": rounded(info.memory_gb),
        "gpus": gpus,
        "watts": None if is_over else rounded(state.nodes[name].watts),
        "watts_origin": power.origin if power.parts is not None else described.get("origin"),
        "power_source": described.get("source"),
        "cpu_use": rounded(busy / length) if busy is not None and length and not is_over else None,
        "note": info.no_gpus or None,
        "gone": known is not None and not known.cpus and not known.gpus,
    }


def describe_cost(run: RunProjection) -> dict[str, Any]:
    """Returns what was used: by member, by role, by both, and in sentences."""
    state, ledger, full = run.state, run.ledger, run.full
    roles, full_j = ledger.by_role(), dict[str, float]()
    by_member_role: dict[str, dict[str, list[float | None]]] = {}
    for row in ledger.rows:
        sums = by_member_role.setdefault(row.member or "", {}).setdefault(row.role, [0.0, None])
        sums[0] = (sums[0] or 0.0) + row.cpu_s
        if row.energy_j is not None:
            sums[1] = (sums[1] or 0.0) + row.energy_j
    for each in ledger.full_rows if state.ended is not None else ():  # of a large run they take half a second
        if each.energy_j is not None and each.member is not None:
            full_j[each.role] = full_j.get(each.role, 0.0) + each.energy_j
    lines = [list(line) for line in (*cost_section.summarize(state, ledger), *time_to_solution.summarize(state))]
    return {
        "members": {
            "columns": list(COST_COLUMNS),
            "rows": {name: _cost_row(run.own.get(name), full[name]) for name in full if name in state.members},
        },
        "roles": [
            {
                "role": role,
                "word": cost_section.ROLE_WORDS.get(role, role),
                "cpu_s": total.cpu_s,
                "energy_j": total.energy_j,
                "origin": total.origin,
                "full_j": full_j.get(role),
            }
            for role, total in roles.items()
        ],
        "lines": lines,
        "reading": impact.METHOD if any(label == "emissions" for label, _ in lines) else None,
        "by_member_role": by_member_role,
    }


def _cost_row(direct: Total | None, full: Total) -> list[Any]:
    own = [direct.cpu_s, direct.energy_j, direct.origin] if direct else [0.0, None, "unavailable"]
    rest = [direct.idle_j, direct.mean_w, direct.peak_w, direct.gpu_s] if direct else [None] * 4
    return [*own, full.cpu_s, full.energy_j, full.origin, *rest]


def _describe_options(identity: Mapping[str, Any]) -> str:
    """Returns how a member is trained beside its hyperparameters, such as "bf16, batch_size 64"."""
    parts = []
    for name in _OPTIONS:
        value = identity.get(name)
        value = value.get("name") if isinstance(value, dict) else value
        if value is not None and value != _USUAL.get(name):
            parts.append(str(value) if name in ("precision", "optimizer", "schedule") else f"{name} {value}")
    return ", ".join(parts)


def _at(values: Sequence[Any], i: int) -> Any:
    return values[i] if i < len(values) else None


def _share(part: float | None, whole: float) -> float | None:
    return None if part is None or not whole else round(min(1.0, part / whole), 4)


def _plain(value: Any) -> Any:
    """A hyperparameter's value as JSON holds it, NaN and infinities as words."""
    if isinstance(value, float) and finite_or_none(value) is None:
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if _is_list(value) else value


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes))
