"""Writes a comparison of runs as tables for people."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ensemble.inspection.text_table import format_table
from ensemble.reporting import text

if TYPE_CHECKING:
    from ensemble.inspection.compare import Comparison

LONGEST = 48  # characters of a value
FIGURES = "figures; a difference is that of the same samples, and absent where they are not the same"
MODELS = {"combined": "combined", "best": "best member"}


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
