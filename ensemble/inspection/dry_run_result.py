"""What a dry run has found out, and its text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ensemble.reporting import text
from ensemble.reporting.tables import format_table

Table = list[dict[str, Any]]
#: Why there are no figures of a member that reads no pipeline.
UNMEASURED = "what a train function takes that reads its own data is known once it has run"


@dataclass(frozen=True)
class DryRun:
    """What a run would do, need and cost.

    Attributes:
        name: the name of the ensemble.
        mode: "list" or "search".
        executor: what would run the members.
        run_dir: the run directory.
        run_state: how the run in that directory stands, which this one would continue; None: it would be new.
        node: this machine: `cpus`, `memory_gb`, `gpus`, `power` (source of energy).
        splits: samples of "train", "valid" and "test", those that are declared.
        fields: a row for each field of a batch: `name`; `shape` of a sample; `dtype`; and of the first batch,
            which was really prepared, `min`, `mean`, `max` of the finite values (None where a field has none).
        pipeline: `shared` (stages that are prepared once for all), `unshared` (why nothing is, or None), `own` (by
            group of members that do more: their further stages), `fingerprint`, `why_unsure`, `prepare_s`
            (CPU-seconds a sample, measured).
        members: a row for each group of members of one architecture and one set of options: `members` (names),
            `params` (of the first), `varied` (other hyperparameters in the group), `workers`, `parameters`,
            `trainable` (parameters), `checkpoint_bytes`, `predictions_bytes` (of all splits, before
            `Ensemble.keep_predictions_gb`; None: not known), `batch_size`, `steps` (of an epoch), `epochs`,
            `evaluations` (batches of splits that it evaluates in a run); measured: `step_s`, `evaluate_s` (of a
            batch, None where the first epoch evaluates nothing), `memory_gb`, `gpu_memory_gb`, `cpus`; estimated
            of one member: `seconds`, `cpu_s`, `energy_j`; `error`: why nothing was measured, as its first steps
            failed.
        run: estimated of the run: `seconds`, `cpu_s`, `energy_j`, `memory_gb`, `base_gb` (of the
            network that members share, once in that), `at_once` (members that train at one time), `origin`
            ("estimated"), `energy_origin` ("estimated" or "unavailable"), `how`.
        notes: what to know of the figures.
    """

    name: str
    mode: str
    executor: str
    run_dir: str
    run_state: str | None
    node: dict[str, Any]
    splits: dict[str, int]
    fields: Table
    pipeline: dict[str, Any]
    members: Table
    run: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return dict(vars(self))

    def __str__(self) -> str:
        return format_dry_run(self)


def format_dry_run(result: DryRun, width: int | None = None) -> str:
    """The dry run as text: data, members, the run as a whole, notes.

    Args:
        width: columns of a table; None: as many as it needs.
    """
    parts = (_head(result), _data(result, width), _members(result, width), _run(result))
    return "\n\n".join("\n".join(part) for part in parts)


def _head(result: DryRun) -> Iterator[str]:
    yield f"{result.name} · {result.mode} · executor {result.executor} · dry run, nothing was started or written"
    gpus = text.count(len(result.node["gpus"]), "GPU")
    yield f"this machine: {result.node['cpus']:g} cores, {gpus}, {result.node['memory_gb']:.1f} GiB"
    yield f"run directory: {result.run_dir} ({result.run_state or 'new'})"


def _data(result: DryRun, width: int | None) -> Iterator[str]:
    samples = ", ".join(f"{name} {many:,}" for name, many in result.splits.items())
    yield f"samples: {samples or 'none, train functions read their own data'}"
    if not result.fields:
        return
    rows = [
        [
            row["name"],
            str(row["shape"]).replace("None", "*"),
            row["dtype"],
            *(text.number(row[name]) for name in ("min", "mean", "max")),
        ]
        for row in result.fields
    ]
    yield format_table(["field", "shape", "dtype", "min", "mean", "max"], rows, width)
    pipeline = result.pipeline
    if pipeline["unshared"] is not None:
        yield f"not shared: {pipeline['unshared']}"
    else:
        yield "prepared once for all members: " + " -> ".join([pipeline["source"], *pipeline["shared"]])
    for own in pipeline["own"]:
        yield f"by {_name_group(own['members'])} alone: {' -> '.join(own['stages'])}"
    sure = pipeline["why_unsure"] or ("certain" if pipeline["fingerprint"] else "certain, one for each member")
    yield f"fingerprint of the data: {sure}"
    if pipeline["prepare_s"] is not None:
        yield f"preparation: {1e3 * pipeline['prepare_s']:.3g} ms of CPU time a sample, measured"


def _members(result: DryRun, width: int | None) -> Iterator[str]:
    heads = [
        "members", "hyperparameters", "workers", "parameters", "checkpoint", "predictions", "batch",
        "steps x epochs", "s/step measured", "s/evaluated batch", "memory measured", "time estimated",
        "J estimated",
    ]  # fmt: skip
    yield format_table(heads, [_describe_group(row) for row in result.members], width)
    failed: dict[str, list[str]] = {}
    for row in result.members:
        if row["error"] is not None:
            failed.setdefault(row["error"], []).extend(row["members"])
    for error, names in failed.items():
        verb = f"{'fails' if len(names) == 1 else 'fail'} in the first steps"
        yield f"{_name_group(names)} {'not measured' if error == UNMEASURED else verb}: {error}"


def _name_group(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _describe_group(row: dict[str, Any]) -> list[str]:
    params = ", ".join(
        f"{name} varied" if name in row["varied"] else f"{name} {text.value(value)}"
        for name, value in row["params"].items()
    )
    memory, joules, sizes = row["memory_gb"], row["energy_j"], (row["checkpoint_bytes"], row["predictions_bytes"])
    return [
        _name_group(row["members"]),
        params or text.ABSENT,
        str(row["workers"]),
        _count_parameters(row["parameters"], row["trainable"]),
        *(text.ABSENT if size is None else text.memory(size) for size in sizes),
        str(row["batch_size"]),
        f"{row['steps']} x {row['epochs']}",
        text.number(row["step_s"]),
        text.number(row["evaluate_s"]),
        text.ABSENT if memory is None else text.memory(2**30 * (memory + (row["gpu_memory_gb"] or 0.0))),
        text.duration(row["seconds"]),
        "unavailable" if joules is None else text.joules(joules),
    ]


def _count_parameters(everything: int | None, trainable: int | None) -> str:
    shown = text.number(everything, 4)
    return shown if everything == trainable else f"{shown}, {text.number(trainable, 4)} trained"


def _run(result: DryRun) -> Iterator[str]:
    run = result.run
    if run["seconds"] is None:
        yield f"the run: unavailable, {run['how']}"
    else:
        energy = "energy unavailable" if run["energy_j"] is None else text.joules(run["energy_j"])
        parts = [text.duration(run["seconds"]), f"{text.cpu(run['cpu_s'])} of CPU time", energy]
        own_gb = (run["memory_gb"] - run["base_gb"]) / run["at_once"]
        split = f" (base {text.memory(2**30 * run['base_gb'])} + {run['at_once']} x {text.memory(2**30 * own_gb)})"
        parts += [
            f"{text.memory(2**30 * run['memory_gb'])} of host memory for members{split if run['base_gb'] else ''}",
            f"{run['at_once']} at once",
        ]
        yield f"the run, estimated: {', '.join(parts)}"
        yield f"estimated from: {run['how']}"
    yield f"energy by: {result.node['power']}"
    yield from (f"note: {note}" for note in result.notes)
