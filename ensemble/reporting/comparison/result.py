"""A comparison of runs, and its tables for people."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ensemble.reporting import text
from ensemble.reporting.tables import format_table

Table = list[dict[str, Any]]

LONGEST = 48  # characters of a value
FIGURES = "figures; a difference is that of the same samples, and absent where they are not the same"
MODELS = {"combined": "combined", "best": "best member"}


@dataclass(frozen=True)
class Comparison:
    """Runs side by side. Values of several runs are in their order.

    Attributes:
        runs: a row for each run: `run` (its name here), `run_dir`, `state`, `members`, `finished`, `objective`,
            `direction`, `best_member`, `best` (the objective as that member reported it, usually of the validation
            split), `combined` (the objective of the combined model, of the split `split`), `cpu_s`, `energy_j` and
            `energy_origin`, `wall_s`, `quality_s`.
        declared: what differs in the declarations: rows of `what` and `values`.
        figures: rows of `model` ("combined" or "best"), `metric`, `better` ("higher" or "lower"), `values`, and
            `against`: of each run but the first its difference to the first run, `interval` [low, high] (None:
            there is none), and `within_noise` (None: not known).
        quality: the value of the objective until which `quality_s` counts: one that all runs have reached, unless
            it was given; None where the objectives differ.
        notes: what is not compared, and why; one sentence each.
    """

    runs: Table
    declared: Table
    figures: Table
    quality: float | None
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return dict(vars(self))

    def __str__(self) -> str:
        return format_comparison(self)


def format_comparison(found: Comparison, width: int | None = None) -> str:
    """The comparison as text: runs, what differs in their declarations, figures, notes.

    Args:
        width: columns of a table; None: as many as it needs.
    """
    names = [row["run"] for row in found.runs]
    parts = [format_table(["", *names], _list_costs(found), width)]
    if found.declared:
        rows = [[row["what"], *map(_shorten, row["values"])] for row in found.declared]
        parts.append("declared otherwise\n" + format_table(["", *names], rows, width))
    else:
        parts.append("the declarations, data, code and versions are the same")
    if found.figures:
        heads = ["model", "figure", *names, *(f"{name} - {names[0]}, 95 % interval" for name in names[1:])]
        rows = [_describe_figure(row) for row in found.figures]
        parts.append(f"{FIGURES}\n{format_table(heads, rows, width)}")
    return "\n\n".join([*parts, *(["\n".join(f"note: {note}" for note in found.notes)] if found.notes else [])])


def _list_costs(found: Comparison) -> list[list[str]]:
    def row(label: str, *cells: str) -> list[str]:
        return [label, *cells]

    runs = found.runs
    quality = f"until {text.score(found.quality)}" if found.quality is not None else "until a common quality"
    return [
        row("state", *(each["state"] for each in runs)),
        row("members finished", *(f"{each['finished']}/{each['members']}" for each in runs)),
        row("objective", *(f"{each['objective']}, {each['direction']}" for each in runs)),
        row("best member, as it reported", *(_note(each["best"], each["best_member"]) for each in runs)),
        row("combined model", *(_note(each["combined"], f"{each['split']} split") for each in runs)),
        row("took", *(text.duration(each["wall_s"]) for each in runs)),
        row(quality, *(text.duration(each["quality_s"]) for each in runs)),
        row("CPU time", *(text.cpu(each["cpu_s"]) for each in runs)),
        row(
            "energy",
            *(
                text.ABSENT
                if each["energy_j"] is None
                else f"{text.joules(each['energy_j'])} {each['energy_origin']}"
                for each in runs
            ),
        ),
    ]


def _note(value: float | None, note: str | None) -> str:
    return text.ABSENT if value is None else f"{text.score(value)} ({note})"


def _describe_figure(row: dict[str, Any]) -> list[str]:
    label = row["metric"] + (f" ({row['better']} is better)" if row["better"] else "")
    return [
        MODELS[row["model"]],
        label,
        *map(text.score, row["values"]),
        *map(_describe_difference, row["against"]),
    ]


def _describe_difference(against: dict[str, Any]) -> str:
    if against["difference"] is None:
        return text.ABSENT
    said = f"{against['difference']:+.4g}"
    if against["interval"] is None:
        return f"{said}, no interval"
    low, high = against["interval"]
    return f"{said} ({low:+.4g} ... {high:+.4g})" + (", within noise" if against["within_noise"] else "")


def _shorten(value: Any) -> str:
    if value is None:
        return text.ABSENT
    said = value if isinstance(value, str) else json.dumps(value)
    return said if len(said) <= LONGEST else said[: LONGEST - 1] + "…"
