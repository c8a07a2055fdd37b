"""What several files of tests on Ray share."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a path short enough for Ray's sockets, empty again at the end of the test."""
    path = Path("/tmp") / f"t{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    yield path
    left = list(path.iterdir())
    path.rmdir() if not left else None
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """A Ray of this process: the runs of the module's tests from here on join it and start none."""
    from ensemble.executors.ray.session import RayConnection

    session = RayConnection()
    yield
    session.close()
