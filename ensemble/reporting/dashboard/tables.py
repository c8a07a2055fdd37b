"""The document `tables`: what the other views have no place for, as tables, and what the run was made with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED
from ensemble.reporting.sections import Table, cost_tables, exchange, impact, packing

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
)


def describe_tables(state: RunState, ledger: Ledger) -> dict[str, Any]:
    """Returns the document; a table that cannot be made takes no other with it.

    Returns:
        - `tables`: each with `id`, `title`, `text`, `head` ([name, class] of each column), `rows`, `of_members`. A
          cell is a number, a text, null, or [text, what it is sorted by].
        - `missing`: a sentence for each that could not be made.
        - `made_with`: [label, text] pairs: versions, revision, the run's id, notes on the combined model.
    """
    tables, missing = list[dict[str, Any]](), list[str]()
    for tabulate in TABLES:
        try:
            tables += [table.as_dict() for table in tabulate(state, ledger)]
        except Exception as error:
            missing.append(explain_failure(tabulate.__module__.rpartition(".")[2], error))
    return {"tables": tables, "missing": missing, "made_with": _list_versions(state)}


def explain_failure(part: str, error: Exception) -> str:
    """Logs that a part of the page failed, and returns the sentence that stands in its place."""
    detail = error if log.isEnabledFor(logging.DEBUG) else None
    log.warning("the page's %s failed: %s: %s", part, type(error).__name__, error, exc_info=detail)
    return f"{part.capitalize()} cannot be shown: {type(error).__name__}: {error}."


def _list_versions(state: RunState) -> list[list[str]]:
    versions = state.header.versions or {}
    pairs = [[name.replace("_", "-"), str(version)] for name, version in versions.items() if version]
    pairs += [["revision", str(state.header.revision)]] if state.header.revision else []
    pairs += [["run", state.run_id]] if state.run_id else []
    combined = state.combined or NOT_COMBINED
    return pairs + [["combined model", said] for said in (combined.note, combined.reason) if said]
