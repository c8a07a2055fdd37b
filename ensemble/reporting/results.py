"""Writes what a run has found as two files for programs, derived from the event log.

`metrics.csv` has a row for each evaluation of a member, `results.json` the run, its members as
`ensemble status --json` has them, the combined model and totals.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ensemble.events import to_dict
from ensemble.meter.ledger_rows import Total
from ensemble.reporting.loggers.points import epoch_values
from ensemble.reporting.model_figures import compare
from ensemble.reporting.ranking import front_members
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.status import status_rows
from ensemble.store import RunState

if TYPE_CHECKING:
    from ensemble.combine.per_class import PerClass

VERSION = 1

#: What each column of `metrics.csv` holds; the metrics follow, by their names in loggers.
EPOCH_COLUMNS = {
    "member": "name of the member",
    "epoch": "its own epoch, from 0",
    "step": "steps of the epoch that were done: all of them, or some where it was evaluated within it",
    "attempt": "the attempt that trained it",
    "t": "when it was evaluated, in Unix seconds",
    "samples": "samples in it",
    "wall_s": "seconds that it took, evaluation included",
}


def list_epochs(state: RunState) -> list[dict[str, Any]]:
    """A row for each epoch of the members' final lineages, and for each evaluation within one, member by member:
    `EPOCH_COLUMNS` and the metrics that it has.
    """
    return [
        {"member": member.id}
        | {name: getattr(event, name, None) for name in EPOCH_COLUMNS if name != "member"}
        | epoch_values(event)
        for member in state.members.values()
        for event in member.list_measured()
    ]


def format_metrics(state: RunState) -> str:
    """The rows of `list_epochs` as comma-separated values; numbers have all their digits, and a value that is not
    known is empty.
    """
    epochs = list_epochs(state)
    metrics = sorted({name for row in epochs for name in row} - set(EPOCH_COLUMNS))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*EPOCH_COLUMNS, *metrics])
    for row in epochs:
        writer.writerow([row.get(name) for name in (*EPOCH_COLUMNS, *metrics)])
    return text.getvalue()


def make_results(run: RunProjection, per_class: Mapping[str, PerClass] | None = None) -> dict[str, Any]:
    """What `results.json` holds, plain JSON values.

    Args:
        per_class: figures of each class, of "ensemble" and "best"; None where the run has none.

    Returns:
        `run`: name, id, how it ended, objective, seconds.  `members`: rows of `status_rows`, each with its
        hyperparameters and the rest of its identity.  `best`, `front`: names of members.  `combined`: the event of
        that type, or None.  `figures`: what each metric of the combined model is called, in which direction it is
        better, its unit.  `per_class`: the figures of each class or label (`ensemble.combine.per_class`) in the
        order of `classes` (names, or None), of the `split`, by model; None where there are none.  `totals`: of
        the run, and by role.
    """
    state, ledger = run.state, run.ledger
    rows = [{**row, "identity": state.members[row["member"]].identity} for row in status_rows(run)]
    shown = compare(state.combined, (state.objective, state.direction))
    combined = {} if state.combined is None else to_dict(state.combined)
    combined = {name: value for name, value in combined.items() if name not in ("v", "t", "type")}
    return {
        "v": VERSION,
        "run": {
            "name": state.name,
            "run_id": state.run_id,
            "state": run.word,
            "reason": run.reason,
            "executor": state.executor,
            "mode": state.mode,
            "objective": state.objective,
            "direction": state.direction,
            "epochs": state.epochs,
            "started": state.started,
            "updated": state.updated,
            "wall_s": state.wall_s,
        },
        "members": rows,
        "best": run.best.id if run.best is not None else None,
        "front": [member.id for member in front_members(state)],
        "combined": combined or None,
        "figures": {comparison.figure.name: comparison.figure.as_record() for comparison in shown},
        "per_class": _describe_classes(per_class),
        "totals": _as_record(run.used)
        | {"roles": {name: _as_record(of) for name, of in ledger.by_role().items()}},
    }


def _describe_classes(per_class: Mapping[str, PerClass] | None) -> dict[str, Any] | None:
    if not per_class:
        return None
    one = next(iter(per_class.values()))
    models = {of: figures.as_record() for of, figures in per_class.items()}
    return {"split": one.split, "classes": one.classes and list(one.classes), "models": models}


def _as_record(total: Total) -> dict[str, Any]:
    return {"cpu_s": total.cpu_s, "energy_j": total.energy_j, "energy_origin": total.origin}
