"""The distributions: what is in them, and that an installed wheel runs outside the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import ensemble

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Of use to who works in the repository only.
NOT_DISTRIBUTED = re.compile(r"\.ci/|\.git|\.pre-commit")
PIP = (sys.executable, "-m", "pip", "--python")

SPEC = """
import sys

import numpy as np
from torch import nn

import ensemble, pipelines
from ensemble import Ensemble, Recipe, Search, integer, loguniform
from pipelines import Pipeline, sources


def model(params):
    assert {module.__file__.startswith(sys.prefix) for module in (ensemble, pipelines)} == {True}
    return nn.Sequential(nn.Linear(4, params["width"]), nn.Linear(params["width"], 2))


def spec(sampler: str):
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    pipe = Pipeline(sources.arrays(x=x, label=(x.sum(1) > 0).astype("int64")), seed=0)
    space = {"width": integer(1, 9), "lr": loguniform(0.01, 0.1)}
    search = Search(space, trials=12, sampler=sampler, pruner="none")
    recipe = Recipe(model=model, loss="cross_entropy")
    return Ensemble(name="away", recipe=recipe, search=search, train=pipe, valid=pipe, epochs=1, batch_size=32)
"""


@pytest.fixture(scope="module")
def files() -> set[str]:
    """The files of the repository that are, or would be, under version control."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("this is no git checkout, which says what belongs into a distribution")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


def build(files: set[str], factory: pytest.TempPathFactory, *options: str) -> dict[str, Path]:
    """What is built of a copy: the repository is left as it was."""
    copy, out = factory.mktemp("checkout"), factory.mktemp("dist")
    for name in files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.suffix: path for path in out.iterdir()}


@pytest.fixture(scope="module")
def wheel(files: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the repository."""
    kept = {name for name in files if name.startswith(("ensemble/", "pipelines/")) or "/" not in name}
    return build(kept, tmp_path_factory, "--wheel")[".whl"]


@pytest.fixture(scope="module")
def built(files: set[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel, built from the source distribution, and that."""
    return build(files, tmp_path_factory)


def run(where: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, where the repository is not on the path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, check=False)


def find_needed(requirements: Iterable[str], extras: Iterable[str] = ()) -> Iterator[Distribution]:
    """The installed distributions of these requirements, and those that they require in turn."""
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            needed = distribution(requirement.name)
            yield needed
            yield from find_needed(needed.requires or (), requirement.extras)


@pytest.fixture(scope="module")
def python(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and what it needs, by links, and nothing else."""
    home = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    [packages] = home.glob("lib/python3*/site-packages")
    python = home / "bin" / "python"
    done = run(home, *PIP, python, "install", "--no-index", "--no-deps", built[".whl"])
    assert done.returncode == 0, done.stderr
    for needed in find_needed(PROJECT["dependencies"]):
        for name in {file.parts[0] for file in needed.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(str(needed.locate_file(name)))
    return python


def test_a_wheel_has_every_file_of_the_packages_and_says_what_the_project_says(
    files: set[str], wheel: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    library = set() if wheel.name.endswith("-py3-none-any.whl") else {"pipelines/prepare/_jpeg_part.so"}
    assert packed == {name for name in files if name.startswith(("ensemble/", "pipelines/"))} | library
    assert metadata["Version"] == PROJECT["version"] == ensemble.__version__
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert set(metadata.get_all("Provides-Extra") or ()) == set(PROJECT["optional-dependencies"])
    assert metadata.get_payload().strip().startswith("# ray-ensemble")


@pytest.mark.more
def test_a_source_distribution_has_what_its_tests_need_and_gives_the_wheel(
    files: set[str], wheel: Path, built: dict[str, Path]
) -> None:
    with tarfile.open(built[".gz"]) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    made = {"PKG-INFO", "setup.cfg"} | {name for name in packed if ".egg-info/" in name}
    assert packed - made == {name for name in files if not NOT_DISTRIBUTED.match(name)}
    with zipfile.ZipFile(built[".whl"]) as one, zipfile.ZipFile(wheel) as other:
        assert set(one.namelist()) == set(other.namelist())


def test_messages_name_extras_that_exist() -> None:
    named = set()
    for path in [*ROOT.glob("ensemble/**/*.py"), *ROOT.glob("pipelines/**/*.py"), *ROOT.glob("docs/**/*.md")]:
        for extras in re.findall(r"ray-ensemble\[([a-z,]+)\]", path.read_text()):
            named |= set(extras.split(","))
    assert named and named <= set(PROJECT["optional-dependencies"])


@pytest.mark.more
def test_an_installed_wheel_has_all_that_it_needs_and_runs_the_demo(python: Path, tmp_path: Path) -> None:
    done = run(tmp_path, *PIP, python, "check")
    assert done.returncode == 0, done.stdout
    done = run(tmp_path, python.with_name("ensemble"), "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"combined \([1-8] members?\)", done.stdout), done.stdout  # how many depends on the processor
    report = (tmp_path / "runs/demo/report.html").read_text()
    assert "<script" in report and "<style" in report  # the page's files came along
    done = run(tmp_path, python.with_name("ensemble"), "--version")
    assert done.returncode == 0 and ensemble.__version__ in done.stdout, done.stderr


@pytest.mark.more
def test_an_installed_wheel_searches_with_each_sampler_and_nothing_warns(python: Path, tmp_path: Path) -> None:
    (tmp_path / "away.py").write_text(SPEC)
    for sampler in ("gp", "cmaes"):
        words = ("away.py", "--executor", "inline", "--set", f"sampler={sampler}", "--run-dir", sampler)
        done = run(tmp_path, python, "-m", "ensemble.cli", "run", *words, "--json", "rows.json")
        assert done.returncode == 0 and not re.search(r"Warning|\[W ", done.stderr), done.stderr
        rows = json.loads((tmp_path / "rows.json").read_text())
        assert {row["state"] for row in rows} == {"finished"}


@pytest.mark.more
def test_pipelines_need_neither_ensemble_nor_ray(python: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['ray'] = sys.modules['ensemble'] = None\n"
        "import numpy, pipelines\n"
        "pipe = pipelines.Pipeline(pipelines.sources.arrays(x=numpy.arange(6.0)), seed=0)\n"
        "with pipelines.Feeder(pipe) as feeder:\n"
        "    loader = pipelines.attach(feeder.address, pipe, batch_size=4, epochs=1, copy=True)\n"
        "    print(sorted(x for batch in loader for x in batch['x'].tolist()), pipelines.__file__)\n"
    )
    done = run(tmp_path, python, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("] ")[0] == "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0"
    assert str(python.parents[1]) in done.stdout
