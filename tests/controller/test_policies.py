"""The policies that the session asks are there, and pure."""

from __future__ import annotations

import sys

import pytest

from ensemble.controller.policies import load_planner


def test_a_planner_that_lacks_an_import_is_not_taken_for_an_absent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ensemble.controller.planner", None)
    assert load_planner() is None
    monkeypatch.delitem(sys.modules, "ensemble.controller.planner")
    monkeypatch.setitem(sys.modules, "ensemble.schedule.flotilla.allocate", None)
    with pytest.raises(ModuleNotFoundError, match="allocate"):
        load_planner()
