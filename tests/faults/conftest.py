"""What the members of these tests must end with, whatever befalls them."""

from __future__ import annotations

import pytest
from faults_conductor import undisturbed


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """member -> digest of its weights after a run in which each worked alone and nothing went wrong."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))
