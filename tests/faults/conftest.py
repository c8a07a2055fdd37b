"""What the members of these tests must end with, whatever befalls them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults_conductor import undisturbed


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """member -> digest of its weights after a run in which each worked alone and nothing went wrong."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", str(path)], capture_output=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)  # this process may still map a file of it
