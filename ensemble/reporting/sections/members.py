"""Members: a table of what each was and what it reached; what it used is in the tables of cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ensemble.reporting import text
from ensemble.reporting.page import Cell, escape, number_cell, table
from ensemble.reporting.ranking import best_member, metric, other_metrics, rank_members
from ensemble.reporting.sections import Content, ReportData
from ensemble.reporting.theme import STATES

if TYPE_CHECKING:
    from ensemble.store import MemberState


def compose(data: ReportData) -> Content:
    """Returns a table with a row for each member, the best first."""
    state, scores = data.state, data.scores
    names = list(dict.fromkeys(name for member in state.members.values() for name in member.params))
    weights: dict[str, float] = (state.combined or {}).get("weights") or {}
    head = [("#", ""), ("member", "text"), ("state", "text"), *((name, "") for name in names)]
    others = other_metrics(state)
    head += [("workers", ""), ("epochs", ""), ("attempts", ""), (state.objective, ""), *((n, "") for n in others)]
    head += [(f"{scores.split} NLL", ""), (f"{scores.split} ECE", "")] if scores.members else []
    head += [("weight", "")] if weights else []
    head.append(("samples/s", ""))
    rows = []
    for place, member in enumerate(rank_members(state), start=1):
        own = scores.members.get(member.id, {})
        row = [Cell(str(place), place), Cell(escape(member.id), member.number), _state_cell(member)]
        row += [_value_cell(member.params.get(name)) for name in names]
        workers = member.identity.get("workers")
        row += [number_cell(workers), number_cell(member.epoch), number_cell(member.attempts)]
        row += [_score_cell(metric(member, name)) for name in (state.objective, *others)]
        row += [_score_cell(own.get("nll")), _score_cell(own.get("ece"))] if scores.members else []
        row += [_score_cell(weights.get(member.id), 3)] if weights else []
        rows.append([*row, number_cell(member.training_rate)])
    if not rows:
        return '<div class="card"><p class="soft">No member has been declared yet.</p></div>'
    return table(head, rows, top=0 if best_member(state) is not None else None)


def _state_cell(member: MemberState) -> Cell:
    dot = f'<span class="dot" style="background:{STATES.get(member.state, STATES["waiting"])}"></span>'
    return Cell(dot + escape(member.state), member.state)


def _value_cell(value: Any) -> Cell:
    if value is None:
        return Cell("")
    return Cell(escape(text.value(value)), value if isinstance(value, (int, float)) else str(value))


def _score_cell(value: float | None, digits: int = 4) -> Cell:
    return Cell("", None) if value is None else Cell(f"{value:.{digits}f}", value)
