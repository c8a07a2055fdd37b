"""What the parts of the energy study have in common: what each returns, and how they become one outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ensemble.bench.charts import Panel
from ensemble.bench.results import Outcome, Rows

TITLE = "The account of energy"


@dataclass(frozen=True, kw_only=True)
class PartOutcome:
    """What one part of the study found; see `Outcome` for the meaning of each."""

    tables: Sequence[tuple[str, Rows]]
    rows: Rows
    findings: Sequence[str]
    notes: Sequence[str] = ()
    panels: Sequence[Panel] = ()


def join_parts(parts: Mapping[str, PartOutcome]) -> Outcome:
    """The outcome of the study: what its parts found, one after the other; rows say their `part`."""
    found = parts.values()
    return Outcome(
        tables=[table for part in found for table in part.tables],
        rows=[{"part": name, **row} for name, part in parts.items() for row in part.rows],
        findings=[line for part in found for line in part.findings],
        title=TITLE,
        notes=list(dict.fromkeys(note for part in found for note in part.notes)),
        panels=[panel for part in found for panel in part.panels],
    )


def round_figures(rows: Rows) -> Rows:
    """The rows of a table with two decimals."""
    return [
        {name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}
        for row in rows
    ]
