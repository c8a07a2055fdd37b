"""Result files of MLPerf HPC: what MLCommons' own tools find in them is what the run did."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_dicts import fold
from hypothesis import given
from hypothesis import strategies as st

import ensemble
from ensemble import Recipe, SpecError
from ensemble.cli.parser import main
from ensemble.reporting.mlperf import BENCHMARKS, compose_result_files
from ensemble.store import RunDir, RunState, read_events
from ensemble.store import fold as fold_events
from pipelines import Pipeline, sources

DEEPCAM = BENCHMARKS["deepcam"]
RUN = ("run_start", "run_stop")


def a_run(members: list[dict[str, Any]], **head: Any) -> list[dict[str, Any]]:
    """The events of members with `start`, `stop`, `end` (the type of their last event), `qualities` and `seed`."""
    events: list[dict[str, Any]] = [
        {"t": 0.0, "type": "run_started", "name": "n", "run_id": "0123456789", **head},
        {"t": 0.0, "type": "node", "node": "a", "cpus": 2.0, "gpus": []},
    ]
    for number, member in enumerate(members):
        about = {"member": f"member-{number}", "attempt": 0}
        declared = {"number": number, "params": {}, "seed": member.get("seed", number), "batch_size": 8}
        events.append({"t": 0.0, "type": "member", **about, **declared})
        if "start" not in member:
            continue
        start, stop, qualities = member["start"], member["stop"], member["qualities"]
        place = {"node": "a", "devices": member.get("devices", [None])}
        events.append({"t": start, "type": "placed", **about, **place})
        for epoch, quality in enumerate(qualities):
            t = start + (stop - start) * (epoch + 1) / (len(qualities) + 1)
            fields = {"epoch": epoch, "metrics": {"accuracy": quality}, "wall_s": 0.5, "train_s": 0.2}
            events.append({"t": t, "type": "epoch", **about, **fields})
        events.append({"t": stop, "type": member.get("end", "finished"), **about})
    return sorted(events, key=lambda event: event["t"])


def read_log(content: str) -> list[dict[str, Any]]:
    """The lines of a result file."""
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in content.splitlines()]


an_instance = st.fixed_dictionaries(
    {
        "start": st.floats(1, 1e6),
        "stop": st.floats(1e-2, 1e6),  # after the start
        "end": st.sampled_from(["finished", "finished", "failed", "pruned"]),
        "qualities": st.lists(st.floats(0.7, 1), max_size=3),
        "seed": st.integers(0, 20),
    }
)


@given(st.lists(an_instance, min_size=1, max_size=8))
def test_the_score_is_that_of_the_files_of_members_that_reached_the_target(members: list[dict[str, Any]]) -> None:
    members = [member | {"stop": member["start"] + member["stop"]} for member in members]
    members[0] |= {"end": "finished"}
    found = compose_result_files(fold(a_run(members)), "us")
    logs = {path: read_log(content) for path, content in found.files.items() if path.endswith(".txt")}
    counted = [log for path, log in logs.items() if "pruned_results" not in path]
    reached = [m for m in members if m["end"] == "finished" and max(m["qualities"], default=0) >= DEEPCAM.target]
    assert len(logs) == len(members) and len(counted) == len({m["seed"] for m in reached})
    assert found.pruned.total() == len(members) - len(counted)
    starts, stops = ([line["time_ms"] for log in counted for line in log if line["key"] == key] for key in RUN)
    if found.figures is not None:
        assert max(stops) - min(starts) == pytest.approx(1000 * found.figures.ttta_s, abs=1)
        assert found.figures.models == len(counted)
    for log in logs.values():
        assert [line["time_ms"] for line in log] == sorted(line["time_ms"] for line in log)
        status = log[-1]["metadata"]["status"]
        best = max((line["value"] for line in log if line["key"] == "eval_accuracy"), default=0.0)
        assert log[-1]["key"] == "run_stop" and (status == "aborted" or best >= DEEPCAM.target)


def test_members_that_do_not_count_are_told_by_why_and_one_that_never_began_has_no_file() -> None:
    good = {"start": 1, "stop": 11, "qualities": [0.9]}
    members = [good, good | {"seed": 0}, good | {"devices": [0, 1]}, good | {"qualities": [None, 0.5]}, {}]
    found = compose_result_files(fold(a_run(members)), "us")
    assert sum(path.endswith(".txt") for path in found.files) == 4
    assert list(found.describe()) == [
        "1 of 5 models count as deepcam, all in 10 s: 6.0 a minute; 1 pruned: waiting; 1 pruned: no epoch with "
        "accuracy ≥ 0.82; 1 pruned: seed of another one; 1 pruned: on another scale than most",
        "a result of deepcam has at least 5 models: the summarizer gives none",
    ]


@pytest.mark.parametrize(
    ("events", "benchmark", "words"),
    [
        (a_run([{}]), None, "no member of 'n' has finished"),
        (a_run([{}], objective="loss", direction="min"), "deepcam", "take cosmoflow or oc20"),
        (a_run([{}]), "resnet", "but deepcam, cosmoflow, oc20, openfold"),
    ],
)
def test_a_run_without_a_score_is_refused(events: list[dict[str, Any]], benchmark: str | None, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        compose_result_files(fold(events), "us", benchmark)


# -- a real run, and MLCommons' tools ---------------------------------------------------------------------------


def model(params: dict[str, Any]) -> Any:
    import torch

    if params["broken"]:
        raise RuntimeError("this model cannot be built")
    return torch.nn.Linear(4, 2)


def samples(n: int, seed: int) -> Pipeline:
    """Two classes that a line separates, with a margin."""
    x = np.random.default_rng(seed).normal(size=(n, 4)).astype(np.float32)
    x[:, 0] += np.sign(x[:, 0])
    return Pipeline(sources.arrays(x=x, y=(x[:, 0] > 0).astype(np.int64)), seed=seed)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven members, of which one fails; the run was stopped and resumed. `half` beside it: as it was between."""
    folder = tmp_path_factory.mktemp("mlperf")
    spec = ensemble.Ensemble(
        name="lines",
        recipe=Recipe(model=model, loss="cross_entropy", inputs=("x",), target="y"),
        members=[{"lr": 0.5, "broken": number == 3} for number in range(7)],
        optimizer="sgd",
        train=samples(64, 0),
        valid=samples(64, 1),
        epochs=2,
        batch_size=8,
    )

    def stop(event: dict[str, Any]) -> None:
        if event["type"] == "epoch" and event["member"] == "member-1":
            run.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ensemble.controller.controller.TICK_S", 0.0)  # requests are seen at once
        run = ensemble.submit(spec, folder / "run", "inline", on_event=stop)
        assert run.wait().stopped
    (folder / "half").mkdir()
    (folder / "half" / "events.jsonl").write_bytes((folder / "run" / "events.jsonl").read_bytes())
    ensemble.resume(folder / "run").wait()
    return folder / "run"


def read_state(run: Path) -> RunState:
    return fold_events(read_events(RunDir(run).events))


def test_the_command_writes_a_package_and_says_the_score(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = trained.parent / "us"
    for benchmark in ("openfold", "deepcam", "deepcam"):  # the last one is what stays
        assert main(["report", str(trained), "--mlperf", str(out), "--mlperf-benchmark", benchmark]) == 0
    assert not list(out.glob("results/*/weak/openfold/**/*.txt"))
    told = capsys.readouterr().out
    assert "6 of 7 models count as deepcam" in told
    assert "passed before it was resumed; 1 pruned: failed" in told
    (weak,) = out.glob("results/*/weak/deepcam")
    assert len(list(weak.glob("result_*.txt"))) == 6 and (weak / "pruned_results" / "result_3.txt").exists()
    half = trained.parent / "half"
    assert main(["report", str(half), "--mlperf", str(out)]) == 0
    before = sum(member.state == "finished" for member in read_state(half).members.values())
    assert 0 < before < 6 and f"{before} of 7 models count" in capsys.readouterr().out
    assert len(list(weak.glob("result_*.txt"))) == before, "files of the same run are replaced"


def test_the_command_refuses_in_a_line(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = trained.parent / "taken"
    taken.touch()
    for arguments, words in [
        ([str(trained), "--mlperf", str(taken)], f"cannot write {taken}"),
        ([str(trained), "--mlperf-benchmark", "oc20"], "give both"),
        ([str(trained.parent / "none"), "--mlperf", str(trained.parent / "out")], "none"),
    ]:
        assert main(["report", *arguments]) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1


@pytest.mark.more
def test_the_tools_of_mlcommons_take_the_files_and_compute_the_same(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlperf_logging")

    def run(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"mlperf_logging.{tool}", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    def check(path: Path) -> int:
        return run("compliance_checker", "--usage", "hpc", "--ruleset", "3.0.0", str(path)).returncode

    out = tmp_path / "us"
    assert main(["report", str(trained), "--mlperf", str(out), "--json", str(tmp_path / "said")]) == 0
    (said,) = json.loads((tmp_path / "said").read_text())
    (weak,) = out.glob("results/*/weak/deepcam")
    logs = sorted(weak.glob("result_*.txt"))
    assert [check(path) for path in logs] == [0] * 6
    assert check(weak / "pruned_results" / "result_3.txt") == 1, "it failed"
    package = run("package_checker", str(out), "hpc", "3.0.0")
    assert "PACKAGE CHECKER FOUND NO ERRORS" in package.stderr
    assert run("result_summarizer", str(out), "hpc", "3.0.0", "--csv", "summary.csv").returncode == 0
    *_, names, values = csv.reader((tmp_path / "summary.csv").read_text().splitlines())
    row = dict(zip(names, values, strict=True))
    models, minutes = float(row["deepcam:number_of_models"]), float(row["deepcam:time_to_train_all"])
    assert models == 6 and row["system"] == said["system"] and float(row["deepcam:instance_scale"]) == 1
    assert 60 * minutes == pytest.approx(said["ttta_s"], abs=2e-3)
    assert models / minutes == pytest.approx(said["models_per_minute"], rel=4e-3 / said["ttta_s"])
    spans = [member.spans for member in read_state(trained).members.values() if member.state == "finished"]
    assert said["ttta_s"] == max(s[-1].ended or 0.0 for s in spans) - min(s[0].placed for s in spans)

    logs[0].write_text(logs[0].read_text().replace("run_stop", "run_stopped"))
    assert check(logs[0]) == 1, "a damaged file does not pass"
