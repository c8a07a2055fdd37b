"""Lists of runs, comparisons and sums: what is not equal is not compared, and sums equal the accounts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import inspected_runs
import numpy as np
import pytest
from kit import run_events
from kit.edited_log import replace_in_log
from kit.event_dicts import lines
from kit.kept_predictions import save_predictions

import ensemble
from ensemble import Energy
from ensemble.cli.parser import main
from ensemble.meter.origin import to_ticks
from ensemble.reporting.comparison.page import describe_comparison
from ensemble.reporting.comparison.result import list_tables
from ensemble.reporting.dashboard.feed import encode
from ensemble.reporting.dashboard.runs import make_key
from ensemble.store import EventLog, RunDir, RunStatus, load_predictions
from ensemble.store.digests import digest_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    shutil.copytree(trained, folder / "first")
    inspected_runs.train(folder / "slow", members=ensemble.seeds(2, {"width": 8, "lr": 0.01}), epochs=1)
    inspected_runs.train(folder / "nll", objective="nll", mode="min")
    inspected_runs.train(folder / "other-test", test=inspected_runs.split(350, 600))
    inspected_runs.train(folder / "other-data", train=inspected_runs.split(0, 290))
    return folder


def read_output(capsys: Any, *words: str | Path) -> str:
    assert main([str(word) for word in words]) == 0
    return str(capsys.readouterr().out)


def test_runs_are_listed_newest_first_with_what_they_reached_and_used(folder: Path, capsys: Any) -> None:
    head, *shown = read_output(capsys, "list", folder).splitlines()
    heads = "run state finished failed best combined objective CPU energy started took"
    assert head.split() == heads.split()
    assert shown[-1].split()[:4] == [str(folder / "first"), "finished", "2/2", "0"]
    rows = ensemble.list_runs(folder)
    assert json.loads(read_output(capsys, "list", folder, "--json")) == rows
    assert [Path(row["run_dir"]).name for row in rows] == ["other-data", "other-test", "nll", "slow", "first"]
    first = rows[-1]
    result = ensemble.attach(folder / "first").status()
    assert (first.state, first.members, first.finished, first.failed) == ("finished", 2, 2, 0)
    assert first.best == max(row["metric"] for row in result) and first.objective == "accuracy"
    results = json.loads((folder / "first" / "results.json").read_text())
    assert first.combined == results["combined"]["metrics"]["ensemble"]["accuracy"]
    totals, wall_s = results["totals"], results["run"]["wall_s"]
    expected = pytest.approx([totals["cpu_s"], totals["energy_j"], wall_s], rel=1e-6)
    assert [first.cpu_s, first.energy_j, first.wall_s] == expected
    assert first.energy_origin == totals["energy_origin"]


def test_a_second_run_in_one_process_is_not_charged_for_the_first(tmp_path: Path) -> None:
    inspected_runs.train(tmp_path / "first", epochs=6)
    began = time.process_time()
    inspected_runs.train(tmp_path / "second", epochs=1)
    used = time.process_time() - began
    rows = {Path(row.run_dir).name: row for row in ensemble.list_runs(tmp_path)}
    assert 0 < rows["second"].cpu_s < 1.05 * used, "CPU-seconds of the run, and of the process meanwhile"


def test_runs_of_other_users_hide_no_run_and_are_not_written_to(tmp_path: Path) -> None:
    for name in ("mine", "closed", "unreadable"):
        run_events.write_run(tmp_path / name, run_events.list_run())
    (tmp_path / "closed").chmod(0)
    (tmp_path / "unreadable" / "events.jsonl").chmod(0)
    code = f"""
import ensemble, inspected_runs
print([(row.name, row.state) for row in ensemble.list_runs({str(tmp_path)!r})])
try:
    inspected_runs.train({str(tmp_path / "closed")!r})
except Exception as error:
    print(type(error).__name__, error)
"""
    under = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []  # root may all
    here = Path(inspected_runs.__file__).parent
    done = subprocess.run([*under, sys.executable, "-c", code], capture_output=True, text=True, cwd=here)
    (tmp_path / "closed").chmod(0o700)
    assert done.returncode == 0, done.stderr
    listed, refused = done.stdout.splitlines()
    assert "finished, with failures" in listed and "'unreadable')" in listed and listed.count("(") == 2
    assert refused.startswith(f"StoreError {tmp_path / 'closed'} is not yours to read and write: give another")


def test_a_log_without_a_start_and_a_name_of_two_lines_are_no_obstacle(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "events.jsonl").write_text("")
    shutil.copytree(folder / "first", tmp_path / "two\nlines \u7a7a")
    rows = [row for row in read_output(capsys, "list", tmp_path).splitlines() if str(tmp_path / "two") in row]
    assert len(rows) == 1 and "\\nlines \u7a7a" in rows[0]
    found = ensemble.compare(folder / "first", tmp_path / "empty")
    (note,) = (note for note in found.notes if "trained with the data" in note)
    assert "is not known: the log of empty does not say" in note
    assert found.runs[1]["split"] is None and "None" not in str(found)
    assert "combine" not in [row["what"] for row in found.declared], "it may combine as the first does"


def find(found: Any, model: str, metric: str) -> dict[str, Any]:
    return next(row for row in found.figures if (row["model"], row["metric"]) == (model, metric))


def test_a_run_compared_with_a_worse_one_is_better_beyond_noise(folder: Path, capsys: Any) -> None:
    found = ensemble.compare(folder / "first", folder / "slow")
    text = read_output(capsys, "compare", folder / "first", folder / "slow")
    assert "params.lr" in text and "slow - first, 95 % interval" in text and "energy" in text
    assert (
        json.loads(read_output(capsys, "compare", folder / "first", folder / "slow", "--json")) == found.as_dict()
    )
    row = find(found, "combined", "accuracy")
    (against,) = row["against"]
    assert against["difference"] == row["values"][1] - row["values"][0] < 0
    low, high = against["interval"]
    assert low < against["difference"] < high < 0 and against["within_noise"] is False
    # The interval is that of a paired bootstrap of the samples, drawn here in another way.
    ours, theirs = (ensemble.load_predictions(folder / name) for name in ("first", "slow"))
    gain = (theirs.values.argmax(1) == theirs.targets).astype(float) - (ours.values.argmax(1) == ours.targets)
    rng = np.random.default_rng(5)
    drawn = gain[rng.integers(0, len(gain), (4000, len(gain)))].mean(axis=1)
    assert [low, high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.02)
    differs = {row["what"]: row["values"] for row in found.declared}
    assert differs["params.lr"] == [0.2, 0.01] and differs["epochs"] == [2, 1] and "code" not in differs
    assert not found.notes


def test_a_snapshot_hides_nothing_of_what_is_compared(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("ensemble.store.snapshot.GROWN_BYTES", 1)
    names = ("first", "slow")
    for name in names:
        shutil.copytree(folder / name, tmp_path / name)
    RunStatus(RunDir(tmp_path / "first")).save_if_grown()
    before, after = (ensemble.compare(*(place / name for name in names)) for place in (folder, tmp_path))
    assert {"epochs"} < {row["what"] for row in before.declared}
    assert after.declared == before.declared and after.figures == before.figures
    plots = [compare_on_the_page(place, *names)["plots"] for place in (folder, tmp_path)]
    assert plots[0] == plots[1] and len(plots[0][0]["series"]) == 2
    same = ensemble.compare(folder / "first", tmp_path / "first")
    assert same.declared == [] and same.notes == [] and "within noise" in str(same)
    assert all(row["against"][0]["difference"] == 0 and row["against"][0]["within_noise"] for row in same.figures)
    first, copy = same.runs
    assert first | {"run": "", "run_dir": ""} == copy | {"run": "", "run_dir": ""}


def test_other_objectives_samples_and_data_are_said_and_not_compared(folder: Path, tmp_path: Path) -> None:
    found = ensemble.compare(folder / "first", folder / "nll")
    assert "another objective (nll, min) than first (accuracy, max)" in found.notes[0]
    assert find(found, "combined", "accuracy")["against"][0]["within_noise"] is True, "the same samples, though"

    found = ensemble.compare(folder / "first", folder / "other-test")
    assert any("they predicted other test samples (200 and 250)" in note for note in found.notes)
    assert all(set(row["against"][0].values()) == {None} for row in found.figures)

    found = ensemble.compare(folder / "first", folder / "other-data")
    assert any("trained with other data than first: samples of train was 300, is 290" in n for n in found.notes)

    shutil.copytree(folder / "first", tmp_path / "moved")
    moved = RunDir(tmp_path / "moved")
    for member in ("member-0", "member-1"):
        path = moved.predictions(member)
        saved, known = load_predictions(path, "test"), digest_file(path)
        new = save_predictions(path, "test", saved.values, saved.index, (saved.target + 1) % 4, saved.task)
        replace_in_log(moved.events, known, new)
    found = ensemble.compare(folder / "first", tmp_path / "moved")
    assert any("the targets of their test samples differ" in note for note in found.notes)
    assert "note: " in str(found)


def compare_on_the_page(folder: Path, *names: str) -> dict[str, Any]:
    runs = {make_key(folder / name): folder / name for name in names}
    return dict(json.loads(encode(describe_comparison(runs))))


def test_the_page_says_of_runs_what_the_command_says(folder: Path) -> None:
    names = ("first", "slow", "nll", "other-test", "other-data")
    document = compare_on_the_page(folder, *names)
    expected = ensemble.compare(*(folder / name for name in names))
    assert document["notes"] == expected.notes
    for _, head, rows in list_tables(expected):
        found = [table["rows"] for table in document["tables"] if [name for name, _ in table["head"]] == head]
        assert rows in found
    by_runs = [{series["of"] for series in plot["series"]} for plot in document["plots"]]
    assert by_runs == [{0, 1, 3, 4}, {2}], "runs of other objectives have a figure of their own"
    reached = max(row["valid/accuracy"] for row in ensemble.attach(folder / "first").history())
    assert document["plots"][0]["series"][0]["points"][-1][1] == pytest.approx(reached, rel=1e-5)


def test_a_run_that_cannot_be_read_hides_no_other(folder: Path, tmp_path: Path) -> None:
    for name in ("first", "slow"):
        shutil.copytree(folder / name, tmp_path / name)
    (tmp_path / "slow" / "events.jsonl").write_bytes(lines([{"t": 1, "type": "run_started", "v": 99}]))
    document = compare_on_the_page(tmp_path, "first", "slow")
    assert [run["state"]["word"] for run in document["runs"]] == ["finished", "unreadable"]
    assert document["notes"][0].startswith("slow cannot be read") and document["plots"]


@pytest.mark.more
def test_a_run_that_was_combined_by_a_function_does_not_run_it_for_the_page(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "first", tmp_path / "first")
    called = tmp_path / "called"

    def combine(members: Any) -> Any:
        called.write_text("")
        return members.mean(0)

    inspected_runs.train(tmp_path / "own", combine=combine)
    assert called.exists()
    called.unlink()
    notes = compare_on_the_page(tmp_path, "first", "own")["notes"]
    assert any("own" in note and "combined by a function of yours" in note for note in notes)
    assert not called.exists()


NAMES = ("one", "two", "three")
PRICED = Energy(intensity_g_per_kwh=400, pue=1.5, price_per_kwh=0.3, currency="EUR")


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    used = tmp_path_factory.mktemp("used")
    inspected_runs.train(used / "one", energy=PRICED)
    inspected_runs.train(used / "two", energy=PRICED)
    inspected_runs.train(used / "three")
    return used


def test_the_sums_of_groups_are_those_of_the_runs_accounts_to_the_tick(used: Path, capsys: Any) -> None:
    totals = {name: json.loads((used / name / "results.json").read_text())["totals"] for name in NAMES}
    for by in ("user", "month", ["user", "month"]):
        rows = ensemble.sum_usage(used, by)
        assert sum(row.runs for row in rows) == 3
        for figure in ("cpu_s", "energy_j"):
            ticks = sum(to_ticks(total[figure]) for total in totals.values())
            assert sum(to_ticks(row[figure]) for row in rows) == ticks, (by, figure)
    of_runs = {Path(row.run).name: row.cpu_s for row in ensemble.sum_usage(used, "run")}
    assert of_runs == {name: total["cpu_s"] for name, total in totals.items()}
    head, *shown = read_output(capsys, "usage", used, "--by", "user", "month").splitlines()
    assert head.split()[:3] == ["user", "month", "runs"] and len(shown) == len(ensemble.sum_usage(used))
    rows = json.loads(read_output(capsys, "usage", used, "--by", "run", "--json", "-"))
    sums = ensemble.sum_usage(used, "run")
    assert [(row["run"], row["energy_j"]) for row in rows] == [(row.run, row.energy_j) for row in sums]


def test_what_is_not_known_of_a_run_is_said_and_currencies_are_not_added_up(used: Path, tmp_path: Path) -> None:
    birds = tmp_path / "birds"
    for name in ("one", "three"):
        shutil.copytree(used / name, birds / name)
    (sums,) = ensemble.sum_usage(birds)
    assert (sums.runs, sums.currency, sums.without_price) == (2, "EUR", 1)
    one = next(row for row in ensemble.sum_usage(birds, "run") if row.run.endswith("one"))
    assert sums.price == pytest.approx(one.energy_kwh * 1.5 * 0.3) and sums.energy_kwh > one.energy_kwh
    assert sums.emissions_g == pytest.approx(one.energy_kwh * 1.5 * 400) and sums.without_emissions == 1
    inspected_runs.train(tmp_path / "dollars", energy=replace(PRICED, currency="USD"))
    assert {row.currency for row in ensemble.sum_usage(tmp_path)} == {"EUR", "USD"}


def test_a_run_is_its_owners_and_its_months(used: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to somebody else")
    shutil.copytree(used / "one", tmp_path / "runs" / "one")
    os.chown(tmp_path / "runs" / "one" / "events.jsonl", 54321, -1)
    (row,) = ensemble.sum_usage(tmp_path / "runs", ("user", "month"))
    assert row.user == "uid 54321" and row.month == time.strftime("%Y-%m", time.gmtime())


def test_a_run_that_was_killed_is_not_in_progress(trained: Path, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(trained, tmp_path / "killed"))
    events = run.events.read_bytes().splitlines(keepends=True)
    run.events.write_bytes(b"".join(line for line in events if json.loads(line)["type"] != "run_finished"))
    with contextlib.closing(EventLog(run.events)):
        assert ensemble.sum_usage(tmp_path)[0].in_progress == 1
    assert ensemble.sum_usage(tmp_path)[0].in_progress == 0
