"""`make` and the pins: set-up is instant when nothing changed, plain about a missing Python, and complete."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
#: What an environment is made of.
NEEDED = ("pyproject.toml", "constraints.txt", "setup.py", "pipelines/prepare/jpeg_part.c")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What `make` reads, in a directory of its own, with no environment yet."""
    for name in (*NEEDED, "Makefile"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=directory, capture_output=True, text=True, timeout=300)


def test_a_missing_python_is_said_plainly(clone: Path) -> None:
    done = make(clone, "PYTHON=no-such-python", "setup")
    assert done.returncode != 0 and not (clone / ".venv").exists()
    assert "Python 3.11 or newer" in done.stderr and "no-such-python" in done.stderr


def test_set_up_is_silent_when_nothing_changed_and_happens_again_when_what_is_needed_has(clone: Path) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv" / ".ready").touch()
    done = make(clone, "-j", "setup")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert make(clone, "--question", ".venv/.ready").returncode == 0
    for name in NEEDED:
        assert "pip install" in make(clone, "--dry-run", f"--what-if={name}", "setup").stdout, name


def test_every_dependency_is_pinned_to_a_version_that_satisfies_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    needed = [each for group in (project["dependencies"], *extras) for each in group]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(r.name): r.specifier for line in lines if "==" in line for r in [Requirement(line)]}
    for requirement in map(Requirement, needed):
        if requirement.name == project["name"]:  # with extras of its own
            continue
        [pin] = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin.version), f"{requirement} but pinned to {pin.version}"
        assert Version(pin.version).local is None, (
            f"{requirement.name}: +{Version(pin.version).local} ties the pin"
        )


def test_no_host_is_named_where_packages_are_installed_and_commit_hooks_call_what_make_installed() -> None:
    for name in ("Makefile", "constraints.txt"):
        text = (ROOT / name).read_text()
        assert "://" not in text and "index-url" not in text
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks)
