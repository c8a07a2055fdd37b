"""What the tests of artifacts share: one run, its artifact, a single thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from artifact_runs import NAMES, declare, train

import ensemble


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "images", declare())


@pytest.fixture(scope="session")
def artifact(run: Path) -> Path:
    return ensemble.export(run, run.parent / "artifact", classes=NAMES)
