"""The modules that use private API of a library: with which of its versions each was checked.

That each use has its effect is shown beside the other tests of its package, see TESTS.
"""

from __future__ import annotations

import ast
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from private_names import privates

ROOT = Path(__file__).resolve().parents[1]

#: Of each library the module that uses its private API, and the tests that fail when that has changed.
TESTS = {
    "cloudpickle": ("ensemble/store/_compat.py", "tests/store/test_store_frozen_arrays.py"),
    "horovod": ("ensemble/comm/_horovod_compat.py", "tests/comm/test_comm_horovod.py"),
    "datasets": ("pipelines/sources/_compat.py", "tests/pipelines/test_sources_huggingface.py"),
    "torch": ("ensemble/comm/_compat.py", "tests/comm/test_comm_compat.py"),
    "optuna": ("ensemble/search/_compat.py", "tests/search/test_search_optuna.py"),
    "ray": ("ensemble/executors/ray/_compat.py", "tests/executors/ray/test_ray_compat.py"),
}


def checked_with(tree: ast.Module) -> tuple[str, ...]:
    """What a module's CHECKED_WITH says, without importing it."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="CHECKED_WITH")], value=value):
                checked: tuple[str, ...] = ast.literal_eval(value)
                return checked
    raise AssertionError("no CHECKED_WITH")


def test_each_module_of_private_api_is_tested() -> None:
    paths = [path for package in ("ensemble", "pipelines") for path in (ROOT / package).rglob("*_compat.py")]
    assert {path.relative_to(ROOT).as_posix() for path in paths} == {module for module, _ in TESTS.values()}
    assert [tests for _, tests in TESTS.values() if not (ROOT / tests).exists()] == []


@pytest.mark.parametrize("library", sorted(TESTS))
def test_the_installed_and_the_known_good_version_were_checked(library: str) -> None:
    module, tests = TESTS[library]
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    checked = checked_with(tree)
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line.partition("==")[2] for line in lines if line.partition("==")[0] == library]
    assert set(pinned) <= set(checked), "constraints.txt names another version"
    try:
        installed = version(library).partition("+")[0]
    except PackageNotFoundError:
        pytest.skip(f"{library} is not installed")
    names = "\n  ".join(sorted({name for _, name in privates(tree)}))
    assert installed in checked, (
        f"{module} was checked with {library} {', '.join(checked)}, installed is {installed}. Run {tests}, look "
        "in the library's source at what changed in the names below, see whether a public API now does the same "
        f"(each docstring says which would), then add the version to CHECKED_WITH.\n  {names}"
    )
