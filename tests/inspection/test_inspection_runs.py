"""Lists of runs and comparisons: what is compared is equal, and what is not is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import inspected_runs
import numpy as np
import pytest
from edited_log import replace_in_log
from event_dicts import lines

sys.path.insert(0, str(Path(__file__).parents[1] / "reporting"))
import run_events

import ensemble
from ensemble import SpecError
from ensemble.cli.parser import main
from ensemble.reporting.comparison.declarations import read_declared
from ensemble.reporting.comparison.result import format_comparison
from ensemble.reporting.dashboard import comparing
from ensemble.reporting.dashboard.comparing import Comparisons
from ensemble.reporting.dashboard.comparison_document import Compared, describe_comparison
from ensemble.reporting.dashboard.feed import encode
from ensemble.reporting.dashboard.runs import MOST_SUMMARY, RunList, make_key
from ensemble.store import RunDir, StoreError, load_predictions, save_predictions
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


def test_states_of_runs_that_did_not_finish(tmp_path: Path) -> None:
    for name, until in (("whole", None), ("cut", 8.0)):
        events = run_events.list_run() if until is None else run_events.list_run(until=until)
        run_events.write_run(tmp_path / name, events)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "events.jsonl").write_bytes(lines([{"t": 1, "type": "run_started", "v": 99}]))
    rows = {Path(row["run_dir"]).name: row for row in ensemble.list_runs(tmp_path)}
    assert rows["whole"].state == "finished, with failures" and rows["whole"].failed == 1
    assert rows["odd"].state == "unreadable" and rows["odd"].best is None
    assert rows["cut"].state in ("running", "interrupted")


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


@pytest.mark.more
def test_the_list_reads_the_row_beside_each_log(trained: Path, tmp_path: Path) -> None:
    for number in range(20):
        shutil.copytree(trained, tmp_path / f"run-{number}", ignore=shutil.ignore_patterns("members", "code"))

    def list_them() -> float:
        began = time.process_time()
        assert len(ensemble.list_runs(tmp_path)) == 20
        return time.process_time() - began

    fast = min(list_them() for _ in range(2))
    for row in tmp_path.glob("run-*/summary.json"):
        row.unlink()
    assert fast < list_them() / 3, "CPU-seconds, against reading the logs"


def test_the_row_beside_a_log_is_the_one_that_the_log_gives_and_counts_only_for_that_log(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "first", tmp_path / "first")
    (row,) = ensemble.list_runs(tmp_path)
    (tmp_path / "first" / "summary.json").rename(tmp_path / "first" / "kept.json")
    assert ensemble.list_runs(tmp_path) == [row]
    (tmp_path / "first" / "kept.json").rename(tmp_path / "first" / "summary.json")
    with open(tmp_path / "first" / "events.jsonl", "a") as file:
        file.write(lines([{"t": row.started + 100.0, "type": "run_started", "name": "again"}]).decode())
    assert ensemble.list_runs(tmp_path)[0].name == "again", "it has begun anew"
    (tmp_path / "first" / "summary.json").write_text('{"v": 1')
    assert ensemble.list_runs(tmp_path)[0].name == "again"


def test_the_command_lists_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = ("run", "state", "finished", "failed", "best", "combined", "objective", "CPU", "energy", "started")
    assert tuple(lines[0].split()) == (*heads, "took")
    assert lines[-1].split()[:4] == [str(folder / "first"), "finished", "2/2", "0"]
    assert main(["list", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ensemble.list_runs(folder)
    assert main(["list", str(folder / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_name_over_two_lines_is_one_row_of_the_list(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "two\nlines \u7a7a")
    assert main(["list", str(tmp_path)]) == 0
    _, row = capsys.readouterr().out.splitlines()
    assert row.startswith(str(tmp_path / "two")) and "\\nlines \u7a7a" in row
    (found,) = ensemble.list_runs(tmp_path)
    assert (found.combined_split, Path(found.run_dir).name) == ("test", "two\nlines \u7a7a")


def test_in_a_narrow_terminal_tables_are_folded(folder: Path) -> None:
    found = ensemble.compare(folder / "first", folder / "slow")
    narrow = format_comparison(found, 60)
    assert max(len(line) for line in narrow.splitlines() if not line.startswith(("figures;", "note:"))) <= 60
    assert max(map(len, str(found).splitlines())) > 60


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


def test_the_time_to_a_quality_is_of_the_first_epoch_that_reaches_it(folder: Path) -> None:
    history = ensemble.attach(folder / "first").history()
    started = json.loads((folder / "first" / "results.json").read_text())["run"]["started"]
    level = history[0]["valid/accuracy"]
    expected = min(row["t"] for row in history if row["valid/accuracy"] >= level) - started
    found = ensemble.compare(folder / "first", folder / "slow", quality=level)
    assert found.runs[0]["quality_s"] == pytest.approx(expected) and found.quality == level
    assert ensemble.compare(folder / "first", folder / "slow", quality=2.0).runs[0]["quality_s"] is None
    common = ensemble.compare(folder / "first", folder / "slow")
    slow = ensemble.attach(folder / "slow").history()
    assert common.quality == max(row["valid/accuracy"] for row in slow)


def test_other_objectives_samples_and_data_are_said_and_not_compared(folder: Path, tmp_path: Path) -> None:
    found = ensemble.compare(folder / "first", folder / "nll")
    assert "another objective (nll, min) than first (accuracy, max)" in found.notes[0] and found.quality is None
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


def test_what_cannot_be_compared_is_refused(folder: Path) -> None:
    with pytest.raises(SpecError, match="two run directories or more"):
        ensemble.compare(folder / "first")
    with pytest.raises(SpecError, match="twice"):
        ensemble.compare(folder / "first", folder / "slow" / ".." / "first")
    with pytest.raises(StoreError, match="nowhere"):
        ensemble.compare(folder / "first", folder / "nowhere")


def test_the_command_compares_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(folder / "first"), str(folder / "slow")]) == 0
    text = capsys.readouterr().out
    assert "params.lr" in text and "slow - first, 95 % interval" in text and "energy" in text
    assert main(["compare", str(folder / "first"), str(folder / "slow"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == ensemble.compare(folder / "first", folder / "slow").as_dict()
    assert main(["compare", str(folder / "first")]) == 2


# -- the page's comparison ----------------------------------------------------------------------------------------


def compare_on_the_page(folder: Path, *names: str, comparisons: Comparisons | None = None) -> dict[str, Any]:
    """The document of the page, with keys that are the names of the runs; a whole one unless comparisons go on."""
    keys = {make_key(folder / name): name for name in names}
    listed = RunList(folder, is_one=False)
    listed.scan()
    rows = {keys[row["key"]]: row for row in listed.read_all() if row["key"] in keys}
    paths = {name: folder / name for name in names}
    if comparisons is not None:
        return json.loads(encode(comparisons.compare(paths, rows)))
    whole = Comparisons()
    while (document := json.loads(encode(whole.compare(paths, rows))))["pending"]:
        pass  # as the page asks again for what a slow machine has not read yet
    return document


def find_table(document: dict[str, Any], id: str) -> list[list[Any]]:
    return next((table["rows"] for table in document["tables"] if table["id"] == id), [])


def test_the_page_says_of_runs_what_the_command_says(folder: Path) -> None:
    names = ("first", "slow", "nll", "other-test", "other-data")
    document = compare_on_the_page(folder, *names)
    expected = ensemble.compare(*(folder / name for name in names))
    assert document["pending"] == 0 and set(expected.notes) - set(document["notes"]) == {
        note for note in expected.notes if "is not compared with" in note
    }
    assert find_table(document, "apart") == [["other-test", "they predicted other test samples (200 and 250)"]]
    pairs = find_table(document, "pairs")
    row = find(expected, "combined", "accuracy")
    low, high = row["against"][0]["interval"]
    difference = row["against"][0]["difference"]
    told = ["slow", "accuracy", f"{row['values'][0]:.4f}", f"{row['values'][1]:.4f}", f"{difference:+.4g}"]
    assert [*told, f"{low:+.4g} … {high:+.4g}", "worse"] in pairs
    assert {each[0] for each in pairs} == {"slow", "nll", "other-data"}
    assert ["params.lr", "0.2", "0.01", "0.2", "0.2", "0.2"] in find_table(document, "declared")
    assert ["params.width", "8"] in find_table(document, "alike")


def test_runs_of_other_objectives_are_not_ranked_against_each_other(folder: Path) -> None:
    document = compare_on_the_page(folder, "first", "nll", "slow")
    (note,) = (note for note in document["notes"] if "not ranked" in note)
    assert "accuracy, higher is better: first, slow" in note and "nll, lower is better: nll" in note
    by_runs = [{series["of"] for series in plot["series"]} - {"reference"} for plot in document["plots"]]
    assert by_runs == [{0, 2}] * 5 + [{1}] * 2, (
        "curves and costs of the first and the last run, curves of the other"
    )
    first, slow = (ensemble.attach(folder / name).history() for name in ("first", "slow"))
    best, median, cpu = document["plots"][:3]
    reached = max(row["valid/accuracy"] for row in first)
    assert best["series"][0]["points"][-1][1] == pytest.approx(reached, rel=1e-5)
    last = [row["valid/accuracy"] for row in slow]
    assert [series["points"][-1][1] for series in median["series"][3:]] == pytest.approx(
        [np.quantile(last, share) for share in (0.5, 0.25, 0.75)], rel=1e-5
    )
    runs = ensemble.compare(folder / "first", folder / "slow").runs
    dots = [series["points"][0] for series in cpu["series"][:2]]
    assert [dot[:2] for dot in dots] == [pytest.approx([run["cpu_s"], run["combined"]], rel=1e-5) for run in runs]
    assert runs[0]["combined"] > runs[1]["combined"]
    is_cheaper = runs[1]["cpu_s"] < runs[0]["cpu_s"]
    assert [dot[2]["size"] for dot in dots] == [6.5, 6.5 if is_cheaper else 4.5], "the worse one has to be cheaper"


def test_runs_that_have_ended_are_compared_without_their_logs(folder: Path, tmp_path: Path) -> None:
    for name in ("first", "slow"):
        shutil.copytree(folder / name, tmp_path / name)
    expected = compare_on_the_page(tmp_path, "first", "slow")
    whole = {name: (tmp_path / name / "events.jsonl").read_bytes() for name in ("first", "slow")}
    for name, content in whole.items():
        (tmp_path / name / "events.jsonl").write_bytes(b"\0" * len(content))
    assert compare_on_the_page(tmp_path, "first", "slow") == expected, "and so are their predictions"
    for name, content in whole.items():
        (tmp_path / name / "events.jsonl").write_bytes(content)
        (tmp_path / name / "summary.json").unlink()
    assert compare_on_the_page(tmp_path, "first", "slow") == expected, "an older version has written no record"


def test_a_comparison_is_made_in_parts_that_each_take_a_limited_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "BUDGET_S", 0.0)
    comparisons, names = Comparisons(), ("first", "slow", "nll")
    pending = [compare_on_the_page(folder, *names, comparisons=comparisons)["pending"] for _ in range(6)]
    assert pending == [2, 2, 2, 2, 1, 0], "a call reads one run, or the predictions of one"
    monkeypatch.undo()
    found = compare_on_the_page(folder, *names, comparisons=comparisons)
    assert found == compare_on_the_page(folder, *names)


def write_over_summary(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the summary of a run, as whoever may write into its directory can."""
    summary = json.loads((run / "summary.json").read_text())
    change(summary)
    (run / "summary.json").write_text(json.dumps(summary))


def test_what_a_summary_names_leads_nowhere_outside_the_run(folder: Path, tmp_path: Path) -> None:
    for name in ("first", "slow"):
        shutil.copytree(folder / name, tmp_path / name)
    own = tmp_path / "first" / "members" / "member-0" / "predictions.safetensors"
    (tmp_path / "outside").mkdir()
    shutil.copy(own, tmp_path / "outside")

    def lead_outside(summary: dict[str, Any]) -> None:
        summary["record"]["combined"] |= {
            "weights": {"../../outside": 1.0},
            "candidates": None,
            "method": "average",
        }
        summary["record"]["members"] = {"../../outside": [0, None, None]}

    write_over_summary(tmp_path / "slow", lead_outside)
    ((_, why),) = find_table(compare_on_the_page(tmp_path, "first", "slow"), "apart")
    assert "'../../outside' is no name of a member" in why

    shutil.copy(folder / "slow" / "summary.json", tmp_path / "slow")
    file = tmp_path / "slow" / "members" / "member-0" / own.name
    for replace, said in ((lambda: os.mkfifo(file), "no regular file"), (lambda: file.symlink_to(own), "links")):
        file.unlink()
        replace()
        ((_, why),) = find_table(compare_on_the_page(tmp_path, "first", "slow"), "apart")
        assert said in why, "it is neither waited for nor followed"


def test_a_summary_of_another_form_is_none_and_takes_down_neither_list_nor_comparison(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "BUDGET_S", 600.0)
    for name in ("first", "slow"):
        shutil.copytree(folder / name, tmp_path / name)
    expected = compare_on_the_page(tmp_path, "first", "slow")
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    for where, value in (
        (("row", "best"), 5),
        (("row", "counts"), {"finished": "x"}),
        (("row", "state"), {}),
        (("row", "objective"), "x" * 5000),
        (("record", "curves", "best"), [[n, 0.5] for n in range(300)]),
        (("record", "curves", "quartiles"), [[1, "a", 0.5, 0.5]]),
        (("record", "combined", "metrics"), {"ensemble": 5}),
        (("record", "combined", "task"), {"kind": "quantiles"}),
        (("record", "combined", "split"), "../test"),
        (("record", "data"), {"samples": 1}),
        (("record", "declaration", "name"), deep),
        (("record", "reached"), [[0.0, 0.5, " " * MOST_SUMMARY]]),
    ):

        def change(summary: dict[str, Any], where: Any = where, value: Any = value) -> None:
            summary["record"]["standing"]["wall_s"] = 12345.0
            at = summary
            for name in where[:-1]:
                at = at[name]
            at[where[-1]] = value

        write_over_summary(tmp_path / "slow", change)
        assert compare_on_the_page(tmp_path, "first", "slow") == expected, where
        shutil.copy(folder / "slow" / "summary.json", tmp_path / "slow")
    write_over_summary(tmp_path / "slow", lambda summary: summary["record"]["standing"].update(wall_s=12345.0))
    assert compare_on_the_page(tmp_path, "first", "slow") != expected, "one of this form counts"


def test_a_front_is_of_runs_that_have_ended_and_were_measured_on_the_same_samples(
    folder: Path, tmp_path: Path
) -> None:
    def read_fronts(*names: str) -> list[tuple[str, list[int]]]:
        plots = compare_on_the_page(tmp_path, *names)["plots"][2:]
        lines = [[len(s["points"]) for s in plot["series"] if s["of"] == "reference"] for plot in plots]
        return [(plot["reading"], line) for plot, line in zip(plots, lines, strict=True)]

    for name in ("first", "slow", "other-test"):
        shutil.copytree(folder / name, tmp_path / name)
    shutil.copytree(folder / "first", tmp_path / "going")
    (tmp_path / "going" / "summary.json").unlink()
    log = (folder / "first" / "events.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "going" / "events.jsonl").write_bytes(b"".join(e for e in log if b"run_finished" not in e))
    assert all("joins the Pareto front" in reading and line for reading, line in read_fronts("first", "slow"))
    for reading, line in read_fronts("first", "other-test"):
        assert "No Pareto front is drawn: the test samples of the runs are not known" in reading and not line
    for reading, line in read_fronts("slow", "going"):
        assert "Runs that have not ended take no part" in reading and line == [1]


def test_a_difference_without_an_interval_is_not_called_better(folder: Path) -> None:
    runs = [Compared(name, name, "finished", "", read_declared(folder / name)) for name in ("first", "slow")]
    rows = find_table(describe_comparison(runs, {"slow": {"": True}}), "pairs")
    assert rows and {tuple(row[-2:]) for row in rows} == {("", "")}


def test_what_is_kept_of_models_has_a_limit_in_bytes_and_all_pairs_are_compared_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, comparisons = ("first", "slow", "nll", "other-data"), Comparisons()
    expected = compare_on_the_page(folder, *names)
    monkeypatch.setattr(comparing, "MOST_KEPT_BYTES", 1)
    monkeypatch.setattr(comparing, "BUDGET_S", 0.0)
    found = [compare_on_the_page(folder, *names, comparisons=comparisons) for _ in range(9)]
    assert found[-1] == expected and len(comparisons._models) == 2


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
    (row,) = find_table(compare_on_the_page(tmp_path, "first", "own"), "apart")
    assert row[0] == "own" and "combined by a function of yours" in row[1] and not called.exists()
