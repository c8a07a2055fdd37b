"""No report is written in tests of searches: none of them looks at it."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_report_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ensemble.controller.finalize.Finalizer.write_report", lambda *_: None)


@pytest.fixture
def _requests_are_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ensemble.controller.controller.TICK_S", 0.0)
