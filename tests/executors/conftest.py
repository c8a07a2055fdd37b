"""What several files of tests of executors share."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.execute_members import an_ensemble
from kit.finished_runs import finished_hashes

import ensemble

RATES = (0.1, 0.2, 0.3, 0.4)


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a path short enough for Ray's sockets, empty again at the end of the test."""
    path = Path("/tmp") / f"t{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    yield path
    left = list(path.iterdir())
    path.rmdir() if not left else None
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The weights of four undisturbed members that each worked alone, in this process."""
    path = tmp_path_factory.mktemp("reference") / "run"
    ensemble.submit(an_ensemble([{"lr": lr} for lr in RATES], epochs=4), path, executor="inline").wait()
    return finished_hashes(path)


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """A Ray of this process: the runs of the module's tests from here on join it and start none."""
    from ensemble.executors.ray.session import RayConnection

    session = RayConnection()
    yield
    session.close()
