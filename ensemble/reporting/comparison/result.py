"""A comparison of runs, and its tables for people: on a terminal and on the page."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ensemble.reporting import text
from ensemble.reporting.tables import format_table

Rows = list[dict[str, Any]]

LONGEST = 48  # characters of a value
FIGURES = "figures; a difference is that of the same samples, and absent where they are not the same"
ALIKE = "the declarations, data, code and versions are the same"
MODELS = {"combined": "combined", "best": "best member"}


@dataclass(frozen=True)
class Comparison:
    """Runs side by side. Values of several runs are in their order.

    Attributes:
        runs: a row for each run: `run` (its name here), `run_dir`, `state`, `members`, `finished`, `objective`,
            `direction`, `best_member`, `best` (the objective as that member reported it, usually of the validation
            split), `combined` (the objective of the combined model, of the split `split`), `cpu_s`, `energy_j` and
            `energy_origin`, `wall_s`.
        declared: what differs in the declarations: rows of `what` and `values`.
        figures: rows of `model` ("combined" or "best"), `metric`, `better` ("higher" or "lower"), `values`, and
            `against`: of each run but the first its difference to the first run, `interval` [low, high] (None:
            there is none), and `within_noise` (None: not known).
        notes: what is not compared, and why; one sentence each.
    """

    runs: Rows
    declared: Rows
    figures: Rows
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return dict(vars(self))

    def __str__(self) -> str:
        return format_comparison(self)


def list_tables(comparison: Comparison) -> list[tuple[str, list[str], list[list[str]]]]:
    """The tables of a comparison: title, head and rows, all of them texts; one without rows has nothing to say."""
    names = [row["run"] for row in comparison.runs]
    declared = [[row["what"], *map(_shorten, row["values"])] for row in comparison.declared]
    heads = ["model", "figure", *names, *(f"{name} - {names[0]}, 95 % interval" for name in names[1:])]
    return [
        ("runs", ["", *names], _list_costs(comparison)),
        ("declared otherwise", ["", *names], declared),
        (FIGURES, heads, [_describe_figure(row) for row in comparison.figures]),
    ]


def format_comparison(comparison: Comparison, width: int | None = None) -> str:
    """The comparison as text: runs, what differs in their declarations, figures, notes.

    Args:
        width: columns of a table; None: as many as it needs.
    """
    (_, heads, runs), declared, figures = list_tables(comparison)
    parts = [format_table(heads, runs, width)]
    parts += [] if declared[2] else [ALIKE]
    parts += [f"{title}\n{format_table(heads, rows, width)}" for title, heads, rows in (declared, figures) if rows]
    parts += ["\n".join(f"note: {note}" for note in comparison.notes)] if comparison.notes else []
    return "\n\n".join(parts)


def _list_costs(comparison: Comparison) -> list[list[str]]:
    runs = comparison.runs
    rows = {
        "state": [run["state"] for run in runs],
        "members finished": [f"{run['finished']}/{run['members']}" for run in runs],
        "objective": [f"{run['objective']}, {run['direction']}" for run in runs],
        "best member, as it reported": [_note(run["best"], run["best_member"]) for run in runs],
        "combined model": [_note(run["combined"], f"{run['split']} split") for run in runs],
        "took": [text.duration(run["wall_s"]) for run in runs],
        "CPU time": [text.cpu(run["cpu_s"]) for run in runs],
        "energy": [text.joules(run["energy_j"], run["energy_origin"]) for run in runs],
    }
    return [[label, *cells] for label, cells in rows.items()]


def _note(value: float | None, note: str | None) -> str:
    return text.ABSENT if value is None else f"{text.score(value)} ({note})"


def _describe_figure(row: dict[str, Any]) -> list[str]:
    label = row["metric"] + (f" ({row['better']} is better)" if row["better"] else "")
    cells = *map(text.score, row["values"]), *map(_describe_difference, row["against"])
    return [MODELS[row["model"]], label, *cells]


def _describe_difference(against: dict[str, Any]) -> str:
    if against["difference"] is None:
        return text.ABSENT
    difference = f"{against['difference']:+.4g}"
    if against["interval"] is None:
        return f"{difference}, no interval"
    low, high = against["interval"]
    return f"{difference} ({low:+.4g} ... {high:+.4g})" + (", within noise" if against["within_noise"] else "")


def _shorten(value: Any) -> str:
    if value is None:
        return text.ABSENT
    plain = json.loads(json.dumps(value), parse_float=lambda digits: float(f"{float(digits):.12g}"))
    words = plain if isinstance(plain, str) else json.dumps(plain)
    return words if len(words) <= LONGEST else words[: LONGEST - 1] + "…"
