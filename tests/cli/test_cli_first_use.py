"""What a first user meets on the command line: a combination that is declared later, warnings in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.edited_log import replace_in_log
from kit.event_dicts import fold, read_events
from kit.kept_predictions import save_predictions

from ensemble.cli.parser import main
from ensemble.store import RunDir, load_predictions
from ensemble.store.digests import digest_file

SPEC = """
import os
import signal
import numpy as np
import torch
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources


CALLS = []


def interrupted(values):
    CALLS.append(values.shape[1] > 4)  # it is tried with four samples before
    if CALLS[-1] and sum(CALLS) == 1:
        os.kill(os.getpid(), signal.SIGINT)
    return values.mean(0)


COMBINE = {"mean": lambda values: values.mean(0), "most": lambda values: values.amax(0),
           "too_few": lambda values: values.mean(0)[:-1], "interrupted": interrupted}


def samples(n, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3)).astype(np.float32)
    return Pipeline(sources.arrays(x=x, y=x[:, :2].copy()), seed=seed)


def spec(task: str = "free", combine: str = "greedy", coverage: float = 0.9):
    recipe = Recipe(model=lambda params: torch.nn.Linear(3, 2), loss="mse", inputs=("x",), target="y", task=task)
    return Ensemble(name="again", recipe=recipe, optimizer="adam", members=[{"lr": 0.01}, {"lr": 0.02}],
                    train=samples(48, 0), valid=samples(24, 1), combine=COMBINE.get(combine, combine),
                    coverage=coverage, epochs=1, batch_size=16)
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "again.py"
    path.write_text(SPEC)
    return path


def run(spec: Path, *settings: str, status: int = 0) -> list[str]:
    """Run it; the types of the events that this adds."""
    run_dir = RunDir(spec.parent / "run")
    before = len(read_events(run_dir.events)) if run_dir.events.exists() else 0
    words = [word for setting in settings for word in ("--set", setting)]
    assert main(["run", str(spec), "--run-dir", str(run_dir.path), "--executor", "inline", *words]) == status
    return [event["type"] for event in read_events(run_dir.events)[before:]]


def test_a_function_that_is_declared_after_the_training_combines_the_run(spec: Path, capsys: Any) -> None:
    run(spec)
    assert "declare Ensemble.combine as a function" in " ".join(capsys.readouterr().out.split())
    for function in ("too_few", "mean", "most"):
        added = run(spec, f"combine={function}", status=3 if function == "too_few" else 0)
        assert added.index("combining") < added.index("combined") and not {"epoch", "placed"} & set(added)
        said = capsys.readouterr()
        assert "its members are combined again as is declared now" in said.err
        why = "ensemble: there is no combined model: Ensemble.combine=<lambda> gives [23, 2] for"
        assert (why in said.err) == (function == "too_few")
    state = fold(read_events(RunDir(spec.parent / "run").events))
    assert state.combined is not None and state.combined.method == "function"
    assert run(spec, "combine=most") == []
    said = capsys.readouterr()
    assert "has finished" in said.err and "--epochs N" in said.err
    assert "on the valid split" not in said.out, "a task without figures has no table of them"


def test_another_method_or_coverage_combines_the_run_again(spec: Path) -> None:
    run(spec, "task=regression")
    assert run(spec, "task=regression") == []
    assert "combined" in run(spec, "task=regression", "combine=average")
    assert "combined" in run(spec, "task=regression", "combine=average", "coverage=0.8")
    assert run(spec, "task=regression", "combine=average", "coverage=0.8") == []


@pytest.mark.parametrize("command", ["run", "resume"])
def test_a_combination_that_an_error_hindered_is_made_again(spec: Path, command: str, capsys: Any) -> None:
    run(spec, "combine=mean")
    run_dir = RunDir(spec.parent / "run")
    path = run_dir.predictions("member-1")
    content, saved, whole = path.read_bytes(), load_predictions(path, "valid"), digest_file(path)
    other = save_predictions(path, "valid", saved.values, saved.index + 1, saved.target, saved.task)
    replace_in_log(run_dir.events, whole, other)
    run(spec, "combine=most", status=3)
    combined = fold(read_events(run_dir.events)).combined
    assert combined is not None and combined.failed and "different valid samples" in combined.reason
    path.write_bytes(content)
    replace_in_log(run_dir.events, other, whole)
    if command == "run":
        assert "combined" in run(spec, "combine=most")
    else:
        assert main(["resume", str(run_dir.path), "--executor", "inline"]) == 0
        assert "could not be combined" in capsys.readouterr().err
    combined = fold(read_events(run_dir.events)).combined
    assert combined is not None and not combined.failed and combined.members
    assert run(spec, "combine=most") == []


@pytest.mark.more
def test_a_warning_of_a_command_is_one_line_without_source(spec: Path) -> None:
    run(spec, "task=regression")
    artifact, data = spec.parent / "artifact", spec.parent / "x.npz"
    assert main(["export", str(spec.parent / "run"), str(artifact), "--without-uncertainty"]) == 0
    np.savez(data, x=np.array([[1, 2, 3], [1, np.nan, 3]], np.float32))
    words = ["predict", str(artifact), str(data), "--out", str(spec.parent / "p.parquet")]
    command = [sys.executable, "-m", "ensemble.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == "ensemble: 1 of 2 rows have predictions that are NaN\n"


def test_a_run_that_is_interrupted_when_its_members_are_combined_has_finished(spec: Path, caplog: Any) -> None:
    run(spec, "combine=interrupted", status=130)
    assert f"{spec.parent / 'run'} has finished before it could be stopped" in caplog.text
    assert "continues the run" not in caplog.text
    state = fold(read_events(RunDir(spec.parent / "run").events))
    assert state.ended is not None and state.ended.type == "run_finished" and state.combined is not None


def test_members_without_a_combined_model_are_a_success_only_where_that_is_allowed(
    spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(spec, "combine=too_few", status=3)
    again = ["run", str(spec), "--run-dir", str(spec.parent / "run"), "--executor", "inline"]
    assert main([*again, "--set", "combine=too_few", "--allow-failed"]) == 0
    assert "there is no combined model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "could not be combined" in capsys.readouterr().out


@pytest.mark.more
def test_a_run_of_a_locale_without_utf_8_is_like_any_other(tmp_path: Path) -> None:
    path, run_dir, foreign = tmp_path / "a_spec.py", tmp_path / "größer", SPEC.replace('"again"', '"Prüfung"')
    assert "lambda params: torch" in foreign
    foreign = foreign.replace("lambda params: torch", 'lambda params: print("Modell für ∑", flush=True) or torch')
    path.write_text(foreign, encoding="utf-8")
    locale = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for words in (["run", path, "--run-dir", run_dir, "--executor", "local"], ["report", run_dir]):
        command = [sys.executable, "-m", "ensemble", *map(str, words)]
        ended = subprocess.run(command, env=locale, capture_output=True, timeout=300, check=False)
        assert ended.returncode == 0, ended.stderr
    assert "Prüfung" in (run_dir / "report.html").read_text(encoding="utf-8")
    assert "Modell für ∑" in (run_dir / "members/member-0/log.txt").read_text(encoding="utf-8")
