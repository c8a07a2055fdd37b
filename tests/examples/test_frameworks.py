"""The examples of frameworks, each script and its port, as a user runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
from kit.scripts import run_python
from kit.tv import HOOK

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "frameworks"
PAGES = "".join((ROOT / "docs" / "how-to" / f"{name}.md").read_text() for name in ("frameworks", "ray-tune"))
DATA = os.environ.get("ENSEMBLE_DATA")
NAMES = sorted(path.stem for path in FOLDER.glob("*_*.py"))
MEASURED = ("lightning", "transformers", "accelerate", "timm")
needs_data = pytest.mark.skipif(
    DATA is None, reason="ENSEMBLE_DATA does not name the folder that holds cifar10/ and imdb/"
)


def require(framework: str) -> None:
    """Skip where it is not installed; it is not imported, as it would import torchvision here."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")


@pytest.mark.parametrize("name", NAMES)
def test_a_page_includes_each_whole_and_it_says_how_it_is_run(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert f'--8<-- "examples/frameworks/{name}.py"' in PAGES and len(text.splitlines()) < 100
    assert f"examples/frameworks/{name}.py" in text.split('"""')[1]


@pytest.mark.more
def test_the_page_shows_what_measure_prints_of_the_figures() -> None:
    printed = run_python(FOLDER / "measure.py", cwd=ROOT, also=(HOOK,))
    assert printed.strip() in PAGES and len(printed.splitlines()) == 2 + len(MEASURED) + 2


@needs_data
@pytest.mark.more
@pytest.mark.parametrize("framework", MEASURED)
def test_members_of_a_framework_end_with_a_combined_model(tmp_path: Path, framework: str) -> None:
    require(framework)
    small = ["--set", f"data={DATA}", "--set", "seeds=2", "--set", "samples=400", "--set", "epochs=2"]
    words = ["run", FOLDER / f"{framework}_member.py", "--run-dir", tmp_path / "run", *small]
    run_python("-m", "ensemble.cli", *words, "--executor", "inline", cwd=tmp_path, also=(HOOK,))
    found = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [row["state"] for row in found["members"]] == ["finished"] * 2
    assert len({row["metric"] for row in found["members"]} | {row["seed"] for row in found["members"]}) > 2
    assert 0 < found["combined"]["metrics"]["ensemble"]["accuracy"] <= 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("framework", MEASURED)
def test_the_original_of_a_port_runs(tmp_path: Path, framework: str) -> None:
    require(framework)
    words = [FOLDER / f"{framework}_plain.py", str(DATA), "--samples", "400", "--epochs", "2"]
    assert re.search(r"accuracy 0\.\d+", run_python(*words, cwd=tmp_path, also=(HOOK,)))


@pytest.mark.slow
def test_a_search_of_ray_tune_finds_the_same_as_its_port(tmp_path: Path) -> None:
    """Both sides, in the end, have a good network, and ASHA has ended trials of the port early."""
    words = [FOLDER / "ray_tune_member.py", "--run-dir", tmp_path / "run", "--executor", "local"]
    run_python("-m", "ensemble.cli", "run", *words, cwd=tmp_path, also=(HOOK,))
    found = json.loads((tmp_path / "run" / "results.json").read_text())
    assert {row["state"] for row in found["members"]} == {"finished", "pruned"}
    printed = run_python(
        FOLDER / "ray_tune_plain.py", "--storage", tmp_path / "tune", "--trials", "4", cwd=tmp_path, also=(HOOK,)
    )
    assert float(re.findall(r"accuracy (\S+)", printed)[-1]) > 0.9
    assert max(row["metric"] for row in found["members"]) > 0.9
