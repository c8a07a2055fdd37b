"""`ensemble export-data`: all tables of a run as files, with the figures of its page."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import run_events as runs

from ensemble.cli.parser import main
from ensemble.reporting.dashboard.projection import RunView
from ensemble.reporting.export_data import list_tables
from ensemble.reporting.report import read_documents
from ensemble.store import RunDir, read_events


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Eight members, of which one failed; one has a name that a spreadsheet would run."""
    events = runs.list_run()
    for event in events:
        if event["type"] == "member" and event["member"] == "member-2":
            event["params"]["note"] = "=cmd|' /C calc'!A0"
    path = tmp_path_factory.mktemp("runs") / "digits"
    return RunDir(runs.write_run(path, events, [i for i in range(8) if i != 6]))


def read(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, strict=True))


def test_every_table_of_the_page_is_a_file_with_the_same_figures(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    assert main(["export-data", str(run.path), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    view = RunView(run)
    view.apply(read_events(run.events), run.events.stat().st_size)
    documents = read_documents(run, view)
    state = documents["state"]
    at = {name: i for i, name in enumerate(state["members"]["columns"])}
    members = {row["member"]: row for row in read(out, "members")}
    assert list(members) == list(state["members"]["rows"]) and f"{out / 'members.csv'}: 8 rows" in said
    for name, row in state["members"]["rows"].items():
        if row[at["metric"]] is not None:
            assert float(members[name]["metrics/accuracy"]) == pytest.approx(row[at["metric"]], rel=1e-8)
        assert float(members[name]["params/lr"]) == row[at["params"]]["lr"]
    assert members["member-2"]["params/note"].startswith("'=cmd"), "no spreadsheet runs it"
    assert members["member-6"]["error"] == f"nan: {state['members']['rows']['member-6'][at['error']]}"
    epochs = read(out, "epochs")
    curves = documents["curves"]["members"]
    assert len(epochs) == sum(len(curve["epoch"]) for curve in curves.values())
    losses = [float(row["train/loss"]) for row in epochs if row["member"] == "member-0"]
    assert losses == pytest.approx(curves["member-0"]["values"]["train_loss"], rel=1e-5)
    assert len(read(out, "attempts")) == sum(map(len, state["spans"].values()))
    assert [row["text"] for row in read(out, "notices")] == [notice["text"] for notice in state["notices"]]
    measured = {row["member"]: row for row in read(out, "measured")}
    assert measured.keys() == members.keys() and any(name.startswith("exchange ") for name in measured["member-0"])
    power = read(out, "power")
    assert len(power) == sum(len(node["points"]) for node in view.list_power())
    direct = [float(row["energy_j"] or 0) for row in read(out, "ledger") if row["view"] == "direct"]
    assert sum(direct) == pytest.approx(view.project().ledger.run.energy_j)
    models = {row["model"]: row for row in read(out, "models")}
    quality = documents["quality"]
    for name, figures in {**quality["members"], "combined": quality["combined"]}.items():
        assert {figure: float(models[name][figure]) for figure in figures} == figures
    for table in documents["tables"]["tables"] + quality["tables"]:
        assert _cells(read(out, table["id"])) == _cells_of(table), "to the last digit"
    columns = read(out, "columns")
    known = {(row["table"], row["column"]): row["unit"] for row in columns}
    files = {path.stem for path in out.glob("*.csv")} - {"columns"}
    assert {table for table, _ in known} == files == {table.name for table in list_tables(run)}
    assert known["epochs", "train_s"] == "s" and known["ledger", "energy_j"] == "J"
    text = (out / "README.md").read_text()
    assert all(f"`{name}.csv`" in text for name in files)


def _cells(rows: list[dict[str, str]]) -> list[list[str]]:
    return [list(row.values()) for row in rows]


def _cells_of(table: dict[str, Any]) -> list[list[str]]:
    return [[_cell_of(cell, at) for at, cell in enumerate(row)] for row in table["rows"]]


def _cell_of(cell: Any, at: int) -> str:
    """A text with what it is sorted by is that number, but in the first column, which names the row."""
    shown, key = cell if isinstance(cell, list) else (cell, None)
    held = key if at > 0 and isinstance(key, float) else shown
    return "" if held is None else held if isinstance(held, str) else repr(held)


def test_a_folder_without_a_run_and_one_that_cannot_be_written_are_said(
    run: RunDir, tmp_path: Path, capsys: Any
) -> None:
    assert main(["export-data", str(tmp_path / "nothing")]) == 2 and not (tmp_path / "nothing-data").exists()
    (tmp_path / "file").write_text("")
    assert main(["export-data", str(run.path), "--out", str(tmp_path / "file")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "cannot be written" in said[1]
