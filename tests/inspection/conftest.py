"""A run that several tests look at, trained once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import inspected_runs


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "first"
    inspected_runs.train(path)
    return path


@pytest.fixture(scope="session", autouse=True)
def _startup_is_measured_once() -> Iterator[None]:
    """A dry run imports all that a run needs in a process of its own; how long that takes is the same for all."""
    module = importlib.import_module("ensemble.inspection.dry_run")
    measure, known = module._measure_startup, {}

    def measure_once(folder: Path, imports: int) -> tuple[float, float]:
        if imports not in known:
            known[imports] = measure(folder, imports)
        return known[imports]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_measure_startup", measure_once)
        yield
