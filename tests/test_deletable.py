"""Each extension can be deleted: no file of the core imports it, and the core's tests pass without it."""

from __future__ import annotations

import itertools
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
# Each extension is deleted in half of the groups, another half for each: of any two, some group deletes one and
# keeps the other.
GROUPS = 8
DELETED = dict(zip(EXTENSIONS, itertools.combinations(range(GROUPS), GROUPS // 2), strict=False))


def test_no_other_file_imports_it() -> None:
    imported = {name: list(importers(extension)) for name, extension in EXTENSIONS.items()}
    assert not any(imported.values()), f"load it by its seam, or take it off the table: {imported}"


def test_the_table_names_files_and_seams_that_exist() -> None:
    for extension in EXTENSIONS.values():
        assert [path for path in extension.paths if not (ROOT / path).exists()] == []
        assert extension.seam.partition(":")[0] in SEAMS and set(extension.needs) <= set(EXTENSIONS)


def with_dependents(name: str) -> list[Extension]:
    dependents = [other for other in EXTENSIONS if name in EXTENSIONS[other].needs]
    return [EXTENSIONS[name], *(extension for other in dependents for extension in with_dependents(other))]


def run_core_tests(folder: Path, deleted: Collection[Extension], *options: str) -> None:
    """Run the core's tests, as pytest's options select them, against a copy without some extensions."""

    def ignore(parent: str, names: list[str]) -> list[str]:
        files = {name: (Path(parent) / name).relative_to(ROOT).as_posix() for name in names}
        return [*(name for name in names if any(one.has(files[name]) for one in deleted)), "__pycache__"]

    for package in (*PACKAGES, "tests/core"):
        shutil.copytree(ROOT / package, folder / package, ignore=ignore)
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    is_copy = "import sys, ensemble, pipelines; print(ensemble.__file__, pipelines.__file__)"
    files = subprocess.check_output([sys.executable, "-c", is_copy], cwd=folder, env=environment, text=True)
    assert files.count(str(folder)) == 2, "the packages of the copy are tested"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    command += [*options, "tests/core"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.timeout(600)
def test_the_core_runs_without_any_extension(tmp_path: Path) -> None:
    run_core_tests(tmp_path, EXTENSIONS.values())


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", range(GROUPS))
def test_the_core_runs_without_half_of_them(group: int, tmp_path: Path) -> None:
    assert DELETED.keys() == EXTENSIONS.keys(), "there are more: more groups"
    chosen = [one for name, groups in DELETED.items() if group in groups for one in with_dependents(name)]
    run_core_tests(tmp_path, chosen, "-k", "two_members")
