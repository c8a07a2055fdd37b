"""What several files of tests of meters share."""

from __future__ import annotations

from collections.abc import Iterator

import forked_programs
import pytest


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[forked_programs.Programs]:
    with forked_programs.serve(tmp_path_factory.mktemp("nvml")) as programs:
        yield programs
