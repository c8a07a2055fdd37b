"""The document `tables`: further columns of members, and tables of what the run used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED
from ensemble.reporting.sections import Table, cost_tables, exchange, impact, nodes, packing

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.store import RunState

log = logging.getLogger(__name__)

#: What makes the tables, in their order on the page.
TABLES: Sequence[Callable[[RunState, Ledger], list[Table]]] = (
    exchange.tabulate,
    packing.tabulate,
    cost_tables.tabulate,
    impact.tabulate,
    nodes.tabulate,
)

#: The ids of those that the view "Placement" shows; the others are in the view "Cost".
OF_PLACEMENT = frozenset(("nodes",))


#: Columns of these tables that members have on the page already.
KNOWN = frozenset(("workers", "on", "cohort", "samples/s here", "CPU-s"))


def describe_tables(state: RunState, ledger: Ledger) -> dict[str, Any]:
    """Returns the document; a table that cannot be made takes no other with it.

    Returns:
        - `columns` of members: each with `id`, `title`, `about`, `kind` ("text" or ""), and `letters` of its
          widest cell; `members`: the cells of each. A cell is a number, a text, null, or [text, what it is sorted
          by].
        - `tables` of all else: each with `id`, `title`, `text`, `head` ([name, class] of each column), `rows`;
          `places`: those of nodes.
        - `missing`: a sentence for each that could not be made.
    """
    tables, missing = list[dict[str, Any]](), list[str]()
    for tabulate in TABLES:
        try:
            tables += [table.as_dict() for table in tabulate(state, ledger)]
        except Exception as error:
            missing.append(explain_failure(tabulate.__module__.rpartition(".")[2], error))
    columns, members = _join_columns([table for table in tables if table["of_members"]], state.members)
    others = [table for table in tables if not table["of_members"]]
    places = [table for table in others if table["id"] in OF_PLACEMENT]
    others = [table for table in others if table not in places]
    return {"columns": columns, "members": members, "tables": others, "places": places, "missing": missing}


def _join_columns(
    tables: Sequence[Mapping[str, Any]], members: Iterable[str]
) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """Returns the columns of tables of members, and the cells of each member."""
    columns, cells = list[dict[str, Any]](), {member: list[Any]() for member in members}
    for table in tables:
        rows = {_read_text(row[0]): row for row in table["rows"]}
        for at, (title, kind) in enumerate(table["head"]):
            if at == 0 or title in KNOWN or title.startswith("direct "):
                continue
            found = [rows[member][at] if member in rows else None for member in cells]
            for own, cell in zip(cells.values(), found, strict=True):
                own.append(cell)
            columns.append(
                {
                    "id": f"{table['id']} {title}",
                    "title": title,
                    "about": f"{table['title']}. {table['text']}",
                    "kind": kind,
                    "letters": max(len(title), *(len(_read_text(cell)) for cell in found), 0),
                }
            )
    return columns, cells


def _read_text(cell: Any) -> str:
    return str((cell[0] if isinstance(cell, list) else cell) or "")


def explain_failure(part: str, error: Exception) -> str:
    """Logs that a part of the page failed, and returns the sentence that stands in its place."""
    detail = error if log.isEnabledFor(logging.DEBUG) else None
    log.warning("the page's %s failed: %s: %s", part, type(error).__name__, error, exc_info=detail)
    return f"{part.capitalize()} cannot be shown: {type(error).__name__}: {error}."


def list_versions(state: RunState) -> list[list[str]]:
    """Returns what a run was made with as [label, text]: versions, revision, id, notes on its combined model."""
    versions = state.header.versions or {}
    pairs = [[name.replace("_", "-"), str(version)] for name, version in versions.items() if version]
    pairs += [["revision", str(state.header.revision)]] if state.header.revision else []
    pairs += [["run", state.run_id]] if state.run_id else []
    combined = state.combined or NOT_COMBINED
    return pairs + [["combined model", said] for said in (combined.note, combined.reason) if said]
