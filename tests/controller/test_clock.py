"""The clock by which a controller limits others."""

from __future__ import annotations

import types
from typing import Any

import pytest

from ensemble.controller.controller import Controller


def test_a_stall_of_the_reader_hardly_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.5, 104.0, 904.0, 905.0, 915.0, 925.0])
    passing = types.SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("ensemble.controller.controller.time", passing)
    log = types.SimpleNamespace(read_clock=lambda: 0.0)
    reader: Any = types.SimpleNamespace(_limit_s=100.0, _read_at=100.0, events=log)
    assert [Controller.read_clock(reader)[0] for _ in range(3)] == [100.5, 104.0, 105.0]
    assert Controller.read_clock(reader)[0] == 106.0
    assert Controller.read_clock(reader) < Controller.read_clock(reader)
