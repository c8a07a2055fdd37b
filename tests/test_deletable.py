"""Each extension can be deleted: no file of the core imports it, and the core's tests pass without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from kit.extensions import PACKAGES, ROOT, Extension, importers, read_extensions

EXTENSIONS = read_extensions()
SEAMS = ("providers", "observers", "member callbacks", "policies")


@pytest.mark.parametrize("name", EXTENSIONS)
def test_no_other_file_imports_it(name: str) -> None:
    assert list(importers(EXTENSIONS[name])) == [], "load it by its seam, or take it off the table"


def test_the_table_names_files_and_seams_that_exist() -> None:
    for extension in EXTENSIONS.values():
        assert [path for path in extension.paths if not (ROOT / path).exists()] == []
        assert extension.seam.partition(":")[0] in SEAMS
        assert set(extension.needs) <= set(EXTENSIONS)


def with_dependents(name: str) -> list[Extension]:
    """An extension and those that need it."""
    dependents = [other for other in EXTENSIONS if name in EXTENSIONS[other].needs]
    return [EXTENSIONS[name], *(extension for other in dependents for extension in with_dependents(other))]


def copy_without(extensions: Collection[Extension], target: Path) -> None:
    """Copy packages and core tests, without the files of some extensions."""

    def ignore(folder: str, names: list[str]) -> list[str]:
        files = {name: (Path(folder) / name).relative_to(ROOT).as_posix() for name in names}
        deleted = [name for name in names if any(extension.has(files[name]) for extension in extensions)]
        return [*deleted, "__pycache__"]

    for package in (*PACKAGES, "tests/core"):
        shutil.copytree(ROOT / package, target / package, ignore=ignore)


def run_core_tests(folder: Path, *options: str) -> None:
    """Run the core's tests, as pytest's options select them, against the packages in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    is_copy = "import sys, ensemble, pipelines; print(ensemble.__file__, pipelines.__file__)"
    files = subprocess.check_output([sys.executable, "-c", is_copy], cwd=folder, env=environment, text=True)
    assert files.count(str(folder)) == 2, "the packages of the copy are tested"
    pytest_line = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    done = subprocess.run(
        [*pytest_line, *options, "tests/core"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.timeout(600)
def test_the_core_runs_without_any_extension(tmp_path: Path) -> None:
    copy_without(EXTENSIONS.values(), tmp_path)
    run_core_tests(tmp_path)


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXTENSIONS)
def test_the_core_runs_without_it(name: str, tmp_path: Path) -> None:
    copy_without(with_dependents(name), tmp_path)
    run_core_tests(tmp_path, "-k", "two_members")
