"""What the runs of a folder have used: sums equal the accounts of the runs, by user, month and run."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import inspected_runs
import pytest

import ensemble
from ensemble import Energy, SpecError
from ensemble.cli.parser import main
from ensemble.meter.origin import to_ticks

NAMES = ("one", "two", "three")
PRICED = Energy(intensity_g_per_kwh=400, pue=1.5, price_per_kwh=0.3, currency="EUR")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("used")
    inspected_runs.train(folder / "one", energy=PRICED)
    inspected_runs.train(folder / "two", energy=PRICED)
    inspected_runs.train(folder / "three")
    return folder


def test_the_sums_of_groups_are_those_of_the_runs_accounts_to_the_tick(folder: Path) -> None:
    totals = {name: json.loads((folder / name / "results.json").read_text())["totals"] for name in NAMES}
    for by in ("user", "month", ["user", "month"]):
        rows = ensemble.sum_usage(folder, by)
        assert sum(row.runs for row in rows) == 3
        for figure in ("cpu_s", "energy_j"):
            ticks = sum(to_ticks(total[figure]) for total in totals.values())
            assert sum(to_ticks(row[figure]) for row in rows) == ticks, (by, figure)
    of_runs = {Path(row.run).name: row.cpu_s for row in ensemble.sum_usage(folder, "run")}
    assert of_runs == {name: total["cpu_s"] for name, total in totals.items()}


def test_what_is_not_known_of_a_run_is_said_and_currencies_are_not_added_up(folder: Path, tmp_path: Path) -> None:
    birds = tmp_path / "birds"
    for name in ("one", "three"):
        shutil.copytree(folder / name, birds / name)
    (used,) = ensemble.sum_usage(birds)
    assert (used.runs, used.currency, used.without_price) == (2, "EUR", 1)
    one = next(row for row in ensemble.sum_usage(birds, "run") if row.run.endswith("one"))
    assert used.price == pytest.approx(one.energy_kwh * 1.5 * 0.3) and used.energy_kwh > one.energy_kwh
    assert used.emissions_g == pytest.approx(one.energy_kwh * 1.5 * 400) and used.without_emissions == 1
    inspected_runs.train(tmp_path / "dollars", energy=replace(PRICED, currency="USD"))
    assert {row.currency for row in ensemble.sum_usage(tmp_path)} == {"EUR", "USD"}
    with pytest.raises(SpecError, match="user, month, run"):
        ensemble.sum_usage(folder, "group")


def test_a_run_is_its_owners_and_its_months(folder: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to somebody else")
    shutil.copytree(folder / "one", tmp_path / "runs" / "one")
    os.chown(tmp_path / "runs" / "one" / "events.jsonl", 54321, -1)
    (row,) = ensemble.sum_usage(tmp_path / "runs", ("user", "month"))
    assert row.user == "uid 54321" and row.month == time.strftime("%Y-%m", time.gmtime())


def test_the_command_shows_sums_and_writes_them_as_csv(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", str(folder), "--by", "user", "month"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["user", "month", "runs"] and len(lines) == len(ensemble.sum_usage(folder))
    assert main(["usage", str(folder), "--by", "run", "--csv", "-"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    sums = ensemble.sum_usage(folder, "run")
    assert [(row["run"], float(row["energy_j"])) for row in rows] == [(row.run, row.energy_j) for row in sums]
