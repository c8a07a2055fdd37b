"""Older versions of Ray and Optuna: a search is killed and resumed; a cluster of another version is named."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest
from started_cluster import make_cluster

pytestmark = [pytest.mark.ray, pytest.mark.more]

TOOL = runpy.run_path(str(Path(__file__).parents[3] / "deploy" / "try_versions.py"))


@pytest.mark.parametrize("versions", [("ray==2.52.1", "optuna==4.5.0"), ("ray==2.57.1",)], ids=str)
def test_a_search_and_a_cluster_of_another_version(versions: tuple[str, ...], tmp_path: Path) -> None:
    try:
        python = TOOL["make_environment"](tmp_path / "env", versions)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no package index has {', '.join(versions)}: {error.stderr[-300:]}")
    TOOL["search_with_kill"](python, "ray", tmp_path / "run")
    with make_cluster() as cluster:
        cluster.python = python
        cluster.start()
        out, error = cluster.run("run", "examples/search.py", "--run-dir", tmp_path / "other").communicate()
    theirs = versions[0].removeprefix("ray==")
    assert f"has Ray {theirs} and Python" in error and f"pip install 'ray[default]=={theirs}'" in error, (
        out + error
    )
    assert not list((tmp_path / "other").glob("members/*")), "it is refused before anything starts"
