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
from email.parser import Parser
from pathlib import Path

import pytest

import ensemble

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Of use to who works in the repository only.
NOT_DISTRIBUTED = re.compile(r"\.ci/|\.git|\.pre-commit")

SPEC = """
import numpy as np
from pathlib import Path
from torch import nn
from torch.nn import functional as F

import ensemble, pipelines
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources


def model(params):
    homes = {str(Path(package.__file__).parents[1]) for package in (ensemble, pipelines)}
    assert homes == {params["home"]}, homes  # in members' processes, too
    return nn.Linear(4, 2)


def loss(net, batch):
    return F.cross_entropy(net(batch["x"]), batch["label"], reduction="none")


def spec(home: str):
    draws = np.random.default_rng(0)
    x = draws.normal(size=(64, 4)).astype("float32")
    data = sources.arrays(x=x, label=(x.sum(1) > 0).astype("int64"))
    members = [{"lr": lr, "home": home} for lr in (0.1, 0.01)]
    pipe = Pipeline(data, seed=0)
    return Ensemble(name="away", recipe=Recipe(model=model, loss=loss), members=members, train=pipe, valid=pipe,
                    epochs=2, batch_size=16)
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


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in a folder of its own, without what it needs: that is installed here already."""
    home = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]
    subprocess.run([*command, str(home), str(built[".whl"])], check=True)
    return home


def run(installed: Path, where: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with the installed wheel before all else."""
    env = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *words], cwd=where, env=env, capture_output=True, text=True, check=False
    )


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
def test_an_installed_wheel_trains_and_reports(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "away.py").write_text(SPEC)
    words = ("run", "away.py", "--executor", "local", "--set", f"home={installed}", "--json", "rows.json")
    done = run(installed, tmp_path, "-m", "ensemble.cli", *words)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["state"] for row in rows] == ["finished", "finished"]
    report = (tmp_path / "runs/away/report.html").read_text()
    assert "<script" in report and "<style" in report  # the page's files came along
    done = run(installed, tmp_path, str(installed / "bin" / "ensemble"), "--version")
    assert done.returncode == 0 and ensemble.__version__ in done.stdout, done.stderr


@pytest.mark.more
def test_pipelines_need_neither_ensemble_nor_ray(installed: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(installed / "pipelines", alone / "pipelines")
    code = (
        "import sys; sys.modules['ray'] = sys.modules['ensemble'] = None\n"
        "import numpy, pipelines\n"
        "pipe = pipelines.Pipeline(pipelines.sources.arrays(x=numpy.arange(6.0)), seed=0)\n"
        "with pipelines.Feeder(pipe) as feeder:\n"
        "    loader = pipelines.attach(feeder.address, pipe, batch_size=4, epochs=1, copy=True)\n"
        "    print(sorted(x for batch in loader for x in batch['x'].tolist()), pipelines.__file__)\n"
    )
    done = run(alone, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("] ")[0] == "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0" and str(alone) in done.stdout
