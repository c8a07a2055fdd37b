"""`python -m benchmarks many` in a small size."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.many.measure import measure


@pytest.mark.parametrize("executor", ["memory", pytest.param("local", marks=pytest.mark.more)])
def test_what_a_member_costs_is_counted(executor: str, tmp_path: Path) -> None:
    row = measure(tmp_path / "run", 8, 1, executor)
    assert row.finished == row.members == 8
    assert row.driver_ms > row.report_ms > 0 and row.others_ms > 0
    inodes = sum(1 for _ in (tmp_path / "run").rglob("*"))
    assert row.inodes == inodes / 8
    assert row.kilobytes > row.log_kilobytes > 0 and row.status_s > 0
