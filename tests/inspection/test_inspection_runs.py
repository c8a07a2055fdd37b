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


def test_runs_are_listed_newest_first_with_what_they_reached_and_used(folder: Path) -> None:
    rows = ensemble.list_runs(folder)
    assert [Path(row["run_dir"]).name for row in rows] == ["other-data", "other-test", "nll", "slow", "first"]
    first = rows[-1]
    result = ensemble.attach(folder / "first").status()
    assert (first.state, first.members, first.finished, first.failed) == ("finished", 2, 2, 0)
    assert first.best == max(row["metric"] for row in result) and first.objective == "accuracy"
    results = json.loads((folder / "first" / "results.json").read_text())
    assert first.combined == results["combined"]["metrics"]["ensemble"]["accuracy"]
    assert first.cpu_s == pytest.approx(results["totals"]["cpu_s"], rel=1e-6)
    assert first.energy_origin == results["totals"]["energy_origin"]
    assert first.energy_j == pytest.approx(results["totals"]["energy_j"], rel=1e-6)
    assert first.wall_s == pytest.approx(results["run"]["wall_s"], rel=1e-6)


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
import ensemble, numpy
from pipelines import Pipeline, sources
print([(row.name, row.state) for row in ensemble.list_runs({str(tmp_path)!r})])
pipe = Pipeline(sources.arrays(x=numpy.zeros((8, 2), "float32"), label=numpy.arange(8) % 2))
recipe = ensemble.Recipe(model=lambda params: None, loss="cross_entropy")
declared = ensemble.Ensemble(name="other", recipe=recipe, members=[{{"lr": 0.1}}], train=pipe, optimizer="sgd")
try:
    ensemble.submit(declared, {str(tmp_path / "closed")!r}, "inline")
except Exception as error:
    print(type(error).__name__, error)
"""
    under = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []  # root may all
    done = subprocess.run([*under, sys.executable, "-c", code], capture_output=True, text=True)
    (tmp_path / "closed").chmod(0o700)
    assert done.returncode == 0, done.stderr
    listed, refused = done.stdout.splitlines()
    assert "finished, with failures" in listed and "'unreadable')" in listed and listed.count("(") == 2
    assert refused.startswith(f"StoreError {tmp_path / 'closed'} is not yours to read and write: give another")


def test_the_command_lists_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = ("run", "state", "finished", "failed", "best", "combined", "objective", "CPU", "energy", "started")
    assert tuple(lines[0].split()) == (*heads, "took")
    assert lines[-1].split()[:4] == [str(folder / "first"), "finished", "2/2", "0"]
    assert main(["list", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ensemble.list_runs(folder)


def test_a_name_over_two_lines_is_one_row_of_the_list(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "two\nlines \u7a7a")
    assert main(["list", str(tmp_path)]) == 0
    _, row = capsys.readouterr().out.splitlines()
    assert row.startswith(str(tmp_path / "two")) and "\\nlines \u7a7a" in row
    (found,) = ensemble.list_runs(tmp_path)
    assert (found.combined_split, Path(found.run_dir).name) == ("test", "two\nlines \u7a7a")


def test_data_of_a_log_without_a_start_are_not_known_rather_than_other(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "events.jsonl").write_text("")
    found = ensemble.compare(folder / "first", tmp_path / "empty")
    (note,) = (note for note in found.notes if "trained with the data" in note)
    assert "is not known: the log of empty does not say" in note
    assert found.runs[1]["split"] is None and "None" not in str(found)
    assert "combine" not in [row["what"] for row in found.declared], "it may combine as the first does"


def find(found: Any, model: str, metric: str) -> dict[str, Any]:
    return next(row for row in found.figures if (row["model"], row["metric"]) == (model, metric))


def test_a_run_compared_with_a_worse_one_is_better_beyond_noise(folder: Path) -> None:
    found = ensemble.compare(folder / "first", folder / "slow")
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


def test_a_run_compared_with_its_copy_is_within_noise(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "first", tmp_path / "copy")
    found = ensemble.compare(folder / "first", tmp_path / "copy")
    assert found.declared == [] and found.notes == []
    for row in found.figures:
        assert row["against"][0]["difference"] == 0 and row["against"][0]["within_noise"]
    first, copy = found.runs
    assert first | {"run": "", "run_dir": ""} == copy | {"run": "", "run_dir": ""}
    assert "within noise" in str(found)


def test_a_snapshot_hides_nothing_of_what_is_compared(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_other_objectives_samples_and_data_are_said_and_not_compared(folder: Path, tmp_path: Path) -> None:
    found = ensemble.compare(folder / "first", folder / "nll")
    assert "another objective (nll, min) than first (accuracy, max)" in found.notes[0]
    assert find(found, "combined", "accuracy")["against"][0]["within_noise"] is True, "the same samples, though"

    found = ensemble.compare(folder / "first", folder / "other-test")
    assert any("they predicted other test samples (200 and 250)" in note for note in found.notes)
    assert all(
        row["against"][0] == {"difference": None, "interval": None, "within_noise": None} for row in found.figures
    )

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


def test_the_command_compares_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(folder / "first"), str(folder / "slow")]) == 0
    text = capsys.readouterr().out
    assert "params.lr" in text and "slow - first, 95 % interval" in text and "energy" in text
    assert main(["compare", str(folder / "first"), str(folder / "slow"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == ensemble.compare(folder / "first", folder / "slow").as_dict()


def compare_on_the_page(folder: Path, *names: str) -> dict[str, Any]:
    return dict(
        json.loads(encode(describe_comparison({make_key(folder / name): folder / name for name in names})))
    )


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


def test_the_sums_of_groups_are_those_of_the_runs_accounts_to_the_tick(used: Path) -> None:
    totals = {name: json.loads((used / name / "results.json").read_text())["totals"] for name in NAMES}
    for by in ("user", "month", ["user", "month"]):
        rows = ensemble.sum_usage(used, by)
        assert sum(row.runs for row in rows) == 3
        for figure in ("cpu_s", "energy_j"):
            ticks = sum(to_ticks(total[figure]) for total in totals.values())
            assert sum(to_ticks(row[figure]) for row in rows) == ticks, (by, figure)
    of_runs = {Path(row.run).name: row.cpu_s for row in ensemble.sum_usage(used, "run")}
    assert of_runs == {name: total["cpu_s"] for name, total in totals.items()}


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


def test_the_command_shows_sums(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", str(used), "--by", "user", "month"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["user", "month", "runs"] and len(lines) == len(ensemble.sum_usage(used))
    assert main(["usage", str(used), "--by", "run", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)
    sums = ensemble.sum_usage(used, "run")
    assert [(row["run"], row["energy_j"]) for row in rows] == [(row.run, row.energy_j) for row in sums]
