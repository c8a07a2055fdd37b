"""The rows of a run's documents: members, their attempts, nodes, and what was used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.events import Epoch, NodeChanged, Power, StepsDone
from ensemble.reporting.columns import COLUMNS, OF_PAGE
from ensemble.reporting.ranking import finite_or_none, metric, rounded
from ensemble.reporting.run_projection import NOTHING, RunProjection
from ensemble.reporting.time_left import fraction_done, member_epochs

if TYPE_CHECKING:
    from ensemble.meter.ledger_rows import Total
    from ensemble.store.member import MemberState
    from ensemble.store.state import RunState

#: Significant digits of metrics, so that four decimals are those of the log's number.
DIGITS = 9
#: What `member_row` returns, in its order.
FIELDS = (
    "id", "number", "state", "epoch", "epochs", "step", "steps", "done", "metric", "metrics", "params",
    "options", "workers", "node", "place", "shares", "cohort", "attempts", "failures", "samples_per_s",
    "left_s", "waited", "synced", "memory_gb", "error", "reason", "advice", "first_epoch", "checkpoint", "lineage",
)  # fmt: skip
COST_COLUMNS = ("cpu_s", "energy_j", "origin", "full_cpu_s", "full_energy_j", "full_origin")
_OPTIONS = (
    "precision", "optimizer", "schedule", "batch_size", "accumulate", "compression", "communicator", "seed",
)  # fmt: skip
_USUAL = {"accumulate": 1}

#: What helps against a failure, by its reason.
ADVICE = {
    "nan": "The loss was not a number. Where the error names samples, mend those; else a lower learning rate, a "
    "warm-up or clipped gradients may help: clone the member with changes.",
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
    """Returns a member's row, by `FIELDS`."""
    state, own = run.state, member.identity
    declared = {name: COLUMNS[name].read(run, member) for name in OF_PAGE if name != "cpu_s"}
    checkpoint = member.checkpoint.epoch if member.checkpoint is not None else None
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
        "metrics": {name: rounded(value, DIGITS) for name, value in member.latest_metrics.items()},
        "params": {name: _plain(value) for name, value in params.items()},
        "options": _describe_options(own),
        "node": member.node,
        "shares": {"cpus": own.get("cpus_per_worker"), "gpus": own.get("gpus_per_worker")},
        "failures": member.failures,
        **{name: rounded(value) if isinstance(value, float) else value for name, value in declared.items()},
        "error": member.error,
        "reason": member.reason,
        "advice": ADVICE.get(failed or "") if failed else None,
        "first_epoch": member.first_epoch,
        "checkpoint": checkpoint,
        "lineage": own.get("lineage"),
    }
    return [row[name] for name in FIELDS]


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
    node_info = state.nodes[name].info
    info, power = node_info or NodeChanged(node=name), power or Power(node=name, origin="unavailable")
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
        "cpus": info.cpus if node_info else None,
        "memory_gb": rounded(info.memory_gb),
        "gpus": gpus,
        "watts": None if is_over else rounded(state.nodes[name].watts),
        "watts_origin": power.origin if power.parts is not None else described.get("origin"),
        "power_source": described.get("source"),
        "cpu_use": rounded(busy / length) if busy is not None and length and not is_over else None,
        "note": info.no_gpus or None,
        "gone": node_info is not None and not node_info.cpus and not node_info.gpus,
    }


def describe_cost(run: RunProjection) -> dict[str, Any]:
    """Returns what was used, by member."""
    rows = {
        name: [*_describe_total(run.own.get(name, NOTHING)), *_describe_total(total)]
        for name, total in run.full.items()
        if name in run.state.members
    }
    return {"members": {"columns": list(COST_COLUMNS), "rows": rows}}


def _describe_total(total: Total) -> tuple[float, float | None, str]:
    return total.cpu_s, total.energy_j, total.origin


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
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if _is_list(value) else value


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes))


#: Of an `epoch` event, beside its metrics on the validation split.
OTHERS = ("train_loss", "lr", "samples_per_s", "memory_gb", "cpus", "grad_norm", "loss_scale")
#: Numbers in the document, at most: about 8 MB of JSON.
MOST_NUMBERS = 10**6
CURVE_DIGITS = 6


def describe_curves(state: RunState) -> dict[str, Any]:
    """Returns the document `curves`: the epochs of each member's final lineage, and evaluations within them.

    Returns:
        `members`: of each `epoch` (-0.75 after a quarter of the first, 0 after all of it), `t` (Unix seconds), and
        `values` by figure; `thinned`: whether only every k-th point and the last are in it, as of long runs.
    """
    measured = {member.id: member.list_measured() for member in state.members.values()}
    numbers = sum(len(points) * (9 + len(state.members[name].metrics)) for name, points in measured.items())
    every = -(-numbers // MOST_NUMBERS) or 1
    curves = {
        name: _describe_points([*points[:-1:every], points[-1]]) for name, points in measured.items() if points
    }
    return {"thinned": every > 1, "members": curves}


def _describe_points(points: list[Epoch | StepsDone]) -> dict[str, Any]:
    values = list(map(_read_figures, points))
    names = dict.fromkeys(name for figures in values for name in figures)
    return {
        "epoch": [point.epoch if isinstance(point, Epoch) else _find_place(point) for point in points],
        "t": [round(point.t, 3) for point in points],
        "values": {name: [figures.get(name) for figures in values] for name in names},
    }


def _find_place(evaluation: StepsDone) -> float:
    return round(evaluation.epoch + evaluation.step / (evaluation.steps or 1) - 1, 4)


def _read_figures(point: Epoch | StepsDone) -> dict[str, float]:
    figures: dict[str, Any] = {name: getattr(point, name, None) for name in OTHERS}
    if isinstance(point, Epoch):
        seconds = point.train_s or point.wall_s
        for name, part in (("waited", point.waited_s), ("synced", point.sync_s)):
            figures[name] = part / seconds if part and seconds else None
    figures |= point.metrics or {}  # what the user's code calls by one of these names is shown as theirs
    finite = {name: finite_or_none(value) for name, value in figures.items()}
    return {name: float(f"{value:.{CURVE_DIGITS}g}") for name, value in finite.items() if value is not None}
