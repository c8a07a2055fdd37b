"""Writes all that a run's page shows as tables of comma-separated values, with a list of their columns and units.

    tables = list_tables(run_dir)         # of any run: in progress, ended, broken off
    write_tables(tables, Path("data"))    # members.csv, epochs.csv, ..., columns.csv, README.md

The figures are those of the page: they come from the same documents, with all their digits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ensemble.events import to_dict
from ensemble.meter.ledger import COLUMNS as LEDGER_COLUMNS
from ensemble.reporting.results import list_epochs
from ensemble.reporting.status import status_rows
from ensemble.reporting.tables import format_csv

if TYPE_CHECKING:
    from pathlib import Path

    from ensemble.reporting.dashboard.projection import RunView
    from ensemble.store import RunDir, RunState

#: Units by the end of a column's name, and of columns whose names do not say them.
_SUFFIXES = {"_s": "s", "_j": "J", "_w": "W", "_gb": "GiB", "_bytes": "bytes", "_per_s": "1/s"}
_UNITS = {
    **dict.fromkeys(("t", "placed", "started", "ended", "begin", "end"), "s since 1970 (Unix)"),
    "at_s": "s since the run's start",
    "watts": "W",
    "idle_watts": "W",
    "epoch": "epochs",
}
_MEANINGS = {
    "epoch": "the member's own epoch, from 0; of a member: how many it has finished",
    "metric": "the objective",
    "energy_j": "joules of the member itself",
    "full_energy_j": "joules with its part of the work that serves several",
    "energy_origin": "measured, attributed, estimated or unavailable",
    "origin": "measured, attributed, estimated or unavailable",
    "waited_s": "of train_s: in which it waited for batches",
    "sync_s": "of train_s: in which its workers exchanged gradients",
    "grad_norm": "norm of the gradients before they were clipped, of the epoch's last step",
    "loss_scale": "by which the loss was multiplied (float16)",
    "devices": "GPUs, by their ids",
    "cohort": "number of its stream group",
}
#: Of an `epoch` event: what `list_epochs` does not have.
_OF_EPOCHS = (
    "step", "train_s", "waited_s", "queued_s", "sync_s", "sent_bytes", "shared_batches", "private_batches", "cpus",
    "memory_gb", "loss_scale", "grad_norm", "skipped_steps",
)  # fmt: skip
_SPAN = ("attempt", "node", "devices", "cohort", "placed", "started", "ended", "outcome")


@dataclass(frozen=True)
class DataTable:
    """A table for a file of its own.

    Attributes:
        name: of the file, without its ending.  about: what its rows are.
        meanings: of columns, by name, where they are not those of every table.
    """

    name: str
    about: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    meanings: Mapping[str, str]


def list_tables(run_dir: RunDir) -> list[DataTable]:
    """Returns the tables of a run; one that would have no row is left out.

    Raises:
        StoreError: there is no run in the directory.
    """
    from ensemble.reporting.dashboard.analysis import read_importances, read_quality
    from ensemble.reporting.dashboard.projection import RunView
    from ensemble.reporting.status import describe_lost_controller
    from ensemble.store import read_events

    view = RunView(run_dir)
    view.apply(read_events(run_dir.events), run_dir.events.stat().st_size)
    view.driver = describe_lost_controller(run_dir, view.state)
    run, state = view.project(), view.state
    importances = read_importances(run_dir, state) if state.mode == "search" else {}
    found = [
        _tabulate("members", "A row for each member, or trial of a search.", map(_flatten, status_rows(run))),
        _tabulate("epochs", "A row for each epoch of the members' final lineages.", _list_epochs(state)),
        *_list_of_documents(view.state_document(), view.list_power()),
        _tabulate("ledger", "What roles and members used on each node.", run.ledger.list_rows(), LEDGER_COLUMNS),
        _tabulate(
            "importances",
            "How much each hyperparameter matters to the objective. " + importances.get("method", ""),
            [
                dict(zip(("hyperparameter", "importance", "low", "high"), each, strict=True))
                for each in importances.get("importances", ())
            ],
        ),
        *_list_of_quality(read_quality(run_dir, state)),
        *_list_of_sections(view),
    ]
    return [table for table in found if table.rows]


def write_tables(tables: Iterable[DataTable], out: Path) -> list[dict[str, Any]]:
    """Writes each table as a file, and what their columns are: `columns.csv` for programs, `README.md` for people.

    Args:
        out: a folder, which is made where it is not there; tables of an earlier call are replaced.

    Returns:
        For each table its `table`, `file`, `rows`.

    Raises:
        StoreError: a file cannot be written, or is not of an earlier call.
    """
    from ensemble.store import StoreError
    from ensemble.store.files import write_bytes
    from ensemble.store.user_files import check_writable

    tables = list(tables)
    columns = [
        [table.name, name, _unit(name), table.meanings.get(name, _MEANINGS.get(name, ""))]
        for table in tables
        for name in table.head
    ]
    files = {f"{table.name}.csv": format_csv(table.head, table.rows) for table in tables}
    files["columns.csv"] = format_csv(["table", "column", "unit", "meaning"], columns)
    lines = [f"- `{table.name}.csv`: {table.about.strip()} {len(table.rows):,} rows." for table in tables]
    files["README.md"] = README + "\n".join(lines) + "\n"
    for name in ["README.md"] if (out / "README.md").exists() else files:
        check_writable(out / name, lambda content: content.startswith(README.encode()), "a table of a run")
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in files.items():
            write_bytes(out / name, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise StoreError(f"{out}: the tables cannot be written: {error}") from error
    return [{"table": each.name, "file": str(out / f"{each.name}.csv"), "rows": len(each.rows)} for each in tables]


README = """# Tables of a run

Comma-separated values (RFC 4180) in UTF-8. Numbers have all their digits; what is not known is empty. A text that
a spreadsheet would run as a formula has an apostrophe before it. `columns.csv` says what each column is, and its
unit.

"""


def _unit(name: str) -> str:
    last = name.rpartition("/")[2]
    return _UNITS.get(last) or next((unit for end, unit in reversed(_SUFFIXES.items()) if last.endswith(end)), "")


def _tabulate(
    name: str, about: str, rows: Iterable[Mapping[str, Any]], meanings: Mapping[str, str] | None = None
) -> DataTable:
    """A table of rows by column; a column that some rows do not have is empty there."""
    kept = list(rows)
    head = list(meanings or dict.fromkeys(name for row in kept for name in row))
    return DataTable(name, about, head, [[row.get(each) for each in head] for row in kept], meanings or {})


def _flatten(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row in which `metrics` and `params` have a column for each name."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name in ("metrics", "params"):
            flat |= {f"{name}/{each}": of for each, of in value.items()}
        else:
            flat[name] = value
    return flat


def _list_epochs(state: RunState) -> Iterable[dict[str, Any]]:
    events = (to_dict(epoch) for member in state.members.values() for epoch in member.history)
    for row, event in zip(list_epochs(state), events, strict=True):
        yield row | {name: event.get(name) for name in _OF_EPOCHS}


def _list_of_documents(state: Mapping[str, Any], nodes: Iterable[Mapping[str, Any]]) -> list[DataTable]:
    """What the document `state` holds beside members: attempts, streams, notices; and the power of nodes."""
    spans = [
        dict(zip(("member", *_SPAN), (name, *span), strict=True))
        for name, of in state["spans"].items()
        for span in of
    ]
    power = [
        dict(
            zip(
                ("node", "origin", "begin", "end", "watts", "idle_watts"),
                (node["node"], node["origin"], *point),
                strict=True,
            )
        )
        for node in nodes
        for point in node["points"]
    ]
    streams = [stream for group in state["streams"] for stream in group["streams"]]
    return [
        _tabulate("attempts", "A row for each attempt of each member: where it ran, when, how it ended.", spans),
        _tabulate(
            "power", "Mean power of whole nodes over intervals; of a long run neighbours are averaged.", power
        ),
        _tabulate("streams", "Each feeder, as it stands.", streams),
        _tabulate("notices", "What a reader should know of.", state["notices"]),
    ]


def _list_of_quality(quality: Mapping[str, Any]) -> list[DataTable]:
    """Figures of the members and of the combined model on the same samples, of saved predictions."""
    of = {**({"combined": quality["combined"]} if quality["combined"] else {}), **quality["members"]}
    weights = (quality["combination"] or {}).get("weights") or {}
    models = [{"model": name, **figures, "weight": weights.get(name)} for name, figures in of.items()]
    bins = [
        dict(zip(("model", "predicted", "true", "samples"), (name, *each), strict=True))
        for name, curve in quality["curves"].items()
        for each in curve
    ]
    spans = [
        {"model": model, "figure": figure, "low": span[0], "high": span[1]}
        for model, figures in (quality["intervals"] or {}).items()
        for figure, span in figures.items()
        if span
    ]
    apart = quality["disagreement"] or {"members": [], "matrix": []}
    pairs = [
        {"member": a, "other": b, "disagreement": apart["matrix"][i][j]}
        for i, a in enumerate(apart["members"])
        for j, b in enumerate(apart["members"][:i])
    ]
    where = f" On the {quality['split']} split."
    return [
        _tabulate("models", f"Figures of each model by its saved predictions.{where}", models),
        _tabulate("intervals", f"95 % intervals of figures.{where}", spans),
        _tabulate("calibration", f"Bins of the reliability curves.{where}", bins),
        _tabulate(
            "gain", f"Figures of the average of the best members, one added at a time.{where}", quality["gain"]
        ),
        _tabulate("disagreement", f"How far two members differ.{where}", pairs),
        *map(_of_section, quality["tables"]),
        *map(_of_section, (quality["classes"] or {}).get("tables", ())),
    ]


def _list_of_sections(view: RunView) -> list[DataTable]:
    """What the page has in its tables, columns of members and figures over time."""
    found = view.tables_document()
    measured = [
        {"member": name}
        | {own["id"]: _plain_cell(cell, 1) for own, cell in zip(found["columns"], cells, strict=True)}
        for name, cells in found["members"].items()
    ]
    history = [
        {
            "figure": plot["id"],
            "of": line["label"],
            "since_start": x,
            "unit": plot["x"]["title"].split()[0],
            "value": y,
        }
        for plot in view.history_document()["plots"]
        if plot["id"] != "power"  # which has a table of its own, of all points
        for line in plot["series"]
        for x, y, *_ in line["points"]
        if y is not None
    ]
    return [
        _tabulate("measured", "What was measured of each member: exchange, packing, cost.", measured),
        _tabulate("history", "Figures over the time of the run, as the page draws them.", history),
        *map(_of_section, found["tables"]),
    ]


def _of_section(table: Mapping[str, Any]) -> DataTable:
    """A table of a document, as the page saves it."""
    head = [title for title, _ in table["head"]]
    rows = [[_plain_cell(cell, at) for at, cell in enumerate(row)] for row in table["rows"]]
    return DataTable(table["id"], f"{table['title']}. {table['text']}", head, rows, {})


def _plain_cell(cell: Any, at: int) -> Any:
    """What a cell holds: its number rather than the text that is shown, but in the first column, a name."""
    if not isinstance(cell, list):
        return cell
    shown, key = cell
    return key if at > 0 and isinstance(key, int | float) else shown
