"""The scripts with Optuna and what becomes of them: each is on the page, runs, and tries the same space."""

from __future__ import annotations

import json
from pathlib import Path

import optuna
import pytest
from kit.scripts import run_python

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "optuna"
PAGE = (ROOT / "docs" / "how-to" / "search.md").read_text()
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_a_page_includes_each_whole_and_it_says_how_it_is_run(name: str) -> None:
    assert f'--8<-- "examples/optuna/{name}.py"' in PAGE
    assert f"examples/optuna/{name}.py" in (FOLDER / f"{name}.py").read_text().split('"""')[1]


@pytest.mark.more
@pytest.mark.parametrize("name", [name.removesuffix("_plain") for name in NAMES if name.endswith("_plain")])
def test_a_script_and_its_search_try_the_same_hyperparameters(tmp_path: Path, name: str) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    stored, trials = name == "storage", 13 if name == "front" else 3  # more than a generation
    small = {"trials": str(trials), "epochs": "3", **({"storage": url} if stored else {})}
    options = [word for key, value in small.items() for word in (f"--{key}", value)]
    said = run_python(FOLDER / f"{name}_plain.py", *options, cwd=tmp_path)
    assert said.split()[0] == "value"
    words = [w for k, v in small.items() for w in ("--set", f"{k}={v}")]
    where = ["--run-dir", tmp_path / "run", "--executor", "inline"]
    run_python("-m", "ensemble.cli", "run", FOLDER / f"{name}_member.py", *where, *words, cwd=tmp_path)
    found = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(found["members"]) == trials and 0 < found["combined"]["metrics"]["ensemble"]["accuracy"] <= 1
    assert bool(found["front"]) == (name == "front")
    if stored:  # the study of the run is beside that of the script
        ours = next(name for name in optuna.get_all_study_names(url) if name != "cancer")
        both = [optuna.load_study(study_name=study, storage=url).trials for study in ("cancer", ours)]
        assert [len(trials) for trials in both] == [3, 3]
        for first in (trials[0] for trials in both):
            assert first.params == {"width": 16, "lr": 1e-3, "weight_decay": 1e-4}
