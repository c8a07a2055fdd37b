"""Writes the model card of an artifact: what it is, how to use it, how good it is, what it cost."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.artifact.layout import LEDGER, PROGRAM, UNCERTAINTY
from ensemble.events import NOT_COMBINED, Combined

if TYPE_CHECKING:
    from ensemble.spec import Ensemble
    from ensemble.store import RunState

Record = Mapping[str, Any]
_MEANING = {
    "classification": "the probability of each class, along the last axis",
    "multilabel": "the probability of each label",
    "regression": "points",
    "gaussian": "mean and variance, along the last axis",
    "quantiles": "the quantiles, along the last axis",
    "free": "what the ensemble's own combination gives",
}


def make_card(
    record: Record,
    ensemble: Ensemble,
    state: RunState,
    used: Mapping[str, Any],
) -> str:
    """The model card, as Markdown.

    Args:
        record: of the artifact (`layout.read_record`).
        ensemble: the declaration.
        state: of the run.
        used: the ledger, as JSON.
    """
    combined = state.combined or NOT_COMBINED
    sections = [
        _introduce(record),
        _explain_use(record),
        _list_stages(record["stages"]),
        _describe_data(ensemble),
        _list_members(record, state, ensemble),
        _list_metrics(combined),
        _describe_calibration(record, combined),
        _describe_uncertainty(record, combined),
        _describe_cost(used),
        _list_versions(record),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _introduce(record: Record) -> str:
    made = datetime.datetime.fromtimestamp(record["created"], datetime.UTC).strftime("%Y-%m-%d")
    count = len(record["members"])
    return (
        f"# {record['name']}\n\n"
        f"One model for {record['task']['kind']}, of {count} member{'s' * (count != 1)} combined by "
        f"{record['method']}. Exported on {made} from the run {record['run_id']}."
    )


def _explain_use(record: Record) -> str:
    batch = ", ".join(
        f'"{name}": torch.zeros({str([8, *_list_sizes(field)])[1:-1]}, dtype=torch.{field["dtype"]})'
        for name, field in record["fields"].items()
    )
    code = f'import torch\nmodel = torch.export.load("{PROGRAM}").module()\nvalues = model({{{batch}}})'
    parts = [
        "## How to load it\n\nIn this folder, with torch alone:",
        f"```python\n{code}\n```",
        "It takes batches of any size, and exactly these fields:",
        _make_table(("field", "shape", "dtype"), _list_tensors(record["fields"])),
        f"It returns `values`: {_MEANING[record['task']['kind']]}.",
        _make_table(("output", "shape", "dtype"), _list_tensors(record["outputs"])),
    ]
    if record["task"].get("levels"):
        parts.append(f"The quantiles are of {', '.join(map(str, record['task']['levels']))}.")
    if record["uncertainty"]:
        names = ", ".join(f"`{name}`" for name in record["uncertainty"])
        parts.append(f"`{UNCERTAINTY}` takes the same and returns a dict: {names}.")
    if record["classes"]:
        parts.append("Classes, from 0: " + ", ".join(map(_escape, record["classes"])) + ".")
    if all(stage["record"] for stage in record["stages"]["of_caller"]):
        parts.append(
            "Of raw records (a folder of images, CSV, Parquet ...) it predicts by this command, with the "
            "preprocessing below:\n\n```sh\nensemble predict . DATA --out predictions.csv\n```"
        )
    parts.append(
        "On the CPU the values are bitwise equal to those of `ensemble.load`, with the same number of threads. "
        "On a GPU, which takes tensors that are there:"
    )
    moved = f'model = move_to_device_pass(torch.export.load("{PROGRAM}"), "cuda").module()'
    parts.append(f"```python\nfrom torch.export.passes import move_to_device_pass\n{moved}\n```")
    return "\n\n".join(parts)


def _list_sizes(field: Record) -> list[int]:
    """The sizes of one sample of a field, the smallest where they may vary."""
    least = iter(field.get("least", ()))
    return [size if isinstance(size, int) else next(least) for size in field["shape"][1:]]


def _list_tensors(tensors: Mapping[str, Record]) -> list[tuple[str, ...]]:
    return [(f"`{name}`", _format_shape(tensor), tensor["dtype"]) for name, tensor in tensors.items()]


def _format_shape(tensor: Record) -> str:
    least = iter(tensor.get("least", ()))
    sizes = [
        size if isinstance(size, int) or size == "batch" else f"{next(least)} or more" for size in tensor["shape"]
    ]
    return f"[{', '.join(map(str, sizes))}]"


def _list_stages(stages: Mapping[str, Sequence[Record]]) -> str:
    caller = [_format_stage(stage) for stage in stages["of_caller"]]
    inside = [_format_stage(stage) for stage in stages["in_program"]]
    lines = ["## Preprocessing"]
    if caller:
        lines.append("To be done to each record before the program, in this order:")
        lines.append("\n".join(f"{number}. {stage}" for number, stage in enumerate(caller, 1)))
    else:
        lines.append("The program takes records as they are in the data.")
    if inside:
        lines.append("Done by the program itself: " + ", ".join(inside) + ".")
    return "\n\n".join(lines)


def _format_stage(stage: Record) -> str:
    if stage["record"] is None:
        return f"`{stage['name']}` (a function of the spec, not in this folder)"
    name, values = stage["record"]["stage"], stage["record"]["values"]
    call = ", ".join(f"{key}={_shorten(value)}" for key, value in values.items() if value is not None)
    return f"`{name}({call})`"


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:50]} ... {len(value)} in all"


def _describe_data(ensemble: Ensemble) -> str:
    rows = []
    for name in ("train", "valid", "test"):
        pipeline = getattr(ensemble, name)
        if hasattr(pipeline, "source"):
            drawn = "" if pipeline.sampling is None else f" an epoch, {pipeline.sampling!r}"
            rows.append((name, f"{len(pipeline):,}{drawn}", _escape(repr(pipeline.source))))
        elif pipeline is not None:
            rows.append((name, f"{ensemble.samples:,}", "by hyperparameters"))
    return "## Data\n\n" + _make_table(("split", "samples", "source"), rows)


def _list_members(record: Record, state: RunState, ensemble: Ensemble) -> str:
    rows = []
    objective = str(ensemble.objective)
    for name, weight in record["weights"].items():
        member = state.members[name]
        params = ", ".join(f"{key}={value}" for key, value in member.params.items())
        if ancestors := state.list_ancestors(member):
            params += f"; goes on from {', '.join(ancestors)}"
        value = (member.metrics or {}).get(objective)
        rows.append((name, f"{weight:.4f}", _escape(params), _format_number(value)))
    return "## Members\n\n" + _make_table(("member", "weight", "hyperparameters", objective), rows)


def _list_metrics(combined: Combined) -> str:
    if not combined.metrics:
        return f"## Metrics\n\nNone: {combined.reason or 'the run was not combined'}."
    if not combined.metrics["ensemble"]:
        return "## Metrics\n\nNone: the task has no figures of its own."
    metrics, intervals = combined.metrics, combined.intervals or {}
    columns = [name for name in ("ensemble", "best", "mean") if metrics.get(name)]
    noise = set(combined.noise or ())
    rows = []
    for metric in metrics["ensemble"]:
        cells = [
            _format_with_interval(metrics[who].get(metric), (intervals.get(who) or {}).get(metric))
            for who in columns
        ]
        rows.append((metric + (" (within noise)" if metric in noise else ""), *cells))
    names = {
        "ensemble": "this model",
        "best": f"best member ({combined.best_member})",
        "mean": "mean member",
    }
    text = f"## Metrics\n\nOn the {combined.measured_on}"
    text += ", in brackets 95% intervals:" if intervals else ":"
    table = _make_table(("metric", *(names[who] for who in columns)), rows)
    note = f"\n\nNote: {combined.note}." if combined.note else ""
    return f"{text}\n\n{table}{note}"


def _describe_calibration(record: Record, combined: Combined) -> str:
    calibration = record["calibration"] or {}
    if calibration.get("method"):
        number = calibration["value"]
        value = f": {number:.4g}" if isinstance(number, int | float) else ""
        text = f"By {calibration['method'].replace('_', ' ')} on the validation split{value}."
    else:
        text = f"None{': ' + calibration['reason'] if calibration.get('reason') else ''}."
    if (of := record.get("thresholds")) is not None:
        by = (combined.decision or {}).get("by")
        names = record["classes"] or range(len(of))
        text += f"\n\n`decision` is by thresholds{f' for {by}' if by else ''}, fitted on the validation split:\n\n"
        text += _make_table(
            ("", "threshold"), [(str(k), _format_number(v)) for k, v in zip(names, of, strict=True)]
        )
    return f"## Calibration\n\n{text}"


def _describe_uncertainty(record: Record, combined: Combined) -> str:
    parts = []
    if means := combined.uncertainty:
        table = _make_table(("part", "mean"), [(name, _format_number(value)) for name, value in means.items()])
        parts.append(f"Means over the {combined.measured_on}:\n\n{table}")
    if methods := combined.conformal:
        title = f"Conformal prediction, calibrated on the validation split, measured on {combined.split}"
        numbers = [name for name, value in next(iter(methods.values())).items() if type(value) in (int, float)]
        rows = [(name, *(_format_number(one.get(number)) for number in numbers)) for name, one in methods.items()]
        parts.append(f"{title}:\n\n" + _make_table(("", *numbers), rows))
    return "## Uncertainty\n\n" + "\n\n".join(parts) if parts else ""


def _describe_cost(used: Record) -> str:
    run = used["run"]
    energy = "unavailable" if run["energy_j"] is None else f"{run['energy_j']:,.4g} J ({run['origin']})"
    rows = [("energy of the whole run", energy), ("CPU time of the whole run", f"{run['cpu_s']:,.4g} s")]
    for role in used["roles"]:
        if role["cpu_s"] and role["role"] == "train":
            energy = "unavailable" if role["energy_j"] is None else f"{role['energy_j']:,.4g} J ({role['origin']})"
            rows.append(("energy of training alone", energy))
    return f"## What it cost\n\n{_make_table(('', ''), rows)}\n\n`{LEDGER}` has all figures."


def _list_versions(record: Record) -> str:
    rows = [(name, str(version)) for name, version in record["versions"].items() if version is not None]
    return "## Versions\n\n" + _make_table(("", "version"), rows)


def _format_with_interval(value: Any, interval: Sequence[float] | None) -> str:
    text = _format_number(value)
    return text if not interval else f"{text} [{_format_number(interval[0])}, {_format_number(interval[1])}]"


def _format_number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "-"


def _make_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
