"""Writes the rows of both views of the ledger as one table of comma-separated values.

Each view's rows sum to the same total exactly: numbers are written with all their digits. Use one of the views, as
in `rows[rows.view == "direct"]`: together they count everything twice.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ensemble.meter.attribution import METHODS

if TYPE_CHECKING:
    from ensemble.meter.ledger import Ledger
    from ensemble.meter.ledger_rows import LedgerRow

#: Parts of a node.
KINDS = ("cpu", "dram", "gpu", "node")

#: What each column holds.
COLUMNS = {
    "view": "direct: work that serves several members has rows of its own; full: it is shared out to them",
    "role": "what it was used for",
    "member": "empty where it belongs to none",
    "node": "where it was used",
    "cohort": "whose stream it served; empty where it served none",
    "cpu_s": "CPU-seconds",
    "cpu_origin": "origin of cpu_s",
    "energy_j": "joules; empty where they could not be had",
    "origin": "origin of energy_j",
    "gpu_s": "seconds in which it kept GPUs busy; empty where that is not known",
    **{f"{kind}_j": f"the part of energy_j that is of the kind {kind}" for kind in KINDS},
    **{f"by_{method}_j": f"the part of energy_j that was split by {method}" for method in METHODS},
}


def format_csv(ledger: Ledger) -> str:
    """Returns the table: a line with the names of `COLUMNS`, then a line for each row of both views."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for view, rows in (("direct", ledger.rows), ("full", ledger.full_rows)):
        writer.writerows([view, *_cells(row)] for row in rows)
    return text.getvalue()


def _cells(row: LedgerRow) -> Iterator[str | float | None]:
    yield from (row.role, row.member, row.node, row.cohort)
    yield from (row.cpu_s, row.cpu_origin, row.energy_j, row.origin, row.gpu_s)
    for kind in KINDS:
        yield row.parts[kind].energy_j if kind in row.parts else None
    for method in METHODS:
        by = [share.by[method] for share in row.parts.values() if method in share.by]
        yield sum(by) if by else None
