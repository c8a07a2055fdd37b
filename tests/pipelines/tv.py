"""Lets torchvision be imported here and in processes that a test starts (tests/fixtures/torchvision_on_cpu)."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

HOOK = Path(__file__).parents[1] / "fixtures" / "torchvision_on_cpu"


def import_torchvision(monkeypatch: pytest.MonkeyPatch | None = None) -> Any:
    """`torchvision.transforms.v2`; with a monkeypatch, also for processes that are started during the test."""
    pytest.importorskip("PIL")
    if "torchvision" not in sys.modules:
        spec = importlib.util.spec_from_file_location("torchvision_on_cpu", HOOK / "sitecustomize.py")
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    if monkeypatch is not None:
        monkeypatch.syspath_prepend(str(HOOK))
        path = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH"))))
        monkeypatch.setenv("PYTHONPATH", path)
    import torchvision.transforms.v2 as v2

    return v2
