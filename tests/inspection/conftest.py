"""A run that several tests look at, trained once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    """A dry run imports what a run needs in a process of its own; for ensembles of these tests they are alike."""
    module = importlib.import_module("ensemble.inspection.dry_run")
    measure, known = module._measure_startup, dict[str, dict[str, float]]()

    def measure_once(*of: Any) -> dict[str, float]:
        found = known.get("startup") or measure(*of)
        if found["train"]:  # of a member whose steps do not fail
            known["startup"] = found
        return dict(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_measure_startup", measure_once)
        yield
