"""The page of a run of each task in a real browser: what it draws is what was saved, in any width and theme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit import task_events as tasks
from kit.event_dicts import fold
from page_steps import check_width, show

from ensemble.reporting.dashboard.analysis import read_quality
from ensemble.reporting.report import write_report
from ensemble.store import RunDir

pytestmark = [pytest.mark.browser, pytest.mark.more]

PLOTS = {"multilabel": ["Calibration", "Figures of each label"], "free": ["Combined model and members"]}
PLOTS |= {"gaussian": ["Coverage of predicted intervals", "Predicted against true"]}
PLOTS |= {"quantiles": ["Coverage by level", "Predicted against true"], "regression": ["Predicted against true"]}


@pytest.mark.parametrize("kind", tasks.TASKS)
def test_the_view_has_the_figures_and_plots_of_its_task(tab: Any, kind: str, tmp_path: Path) -> None:
    report = write_report(RunDir(tasks.write_task_run(tmp_path / kind, kind)))
    tab.goto(f"file://{report}#ensemble")
    tab.wait_for_selector("[data-view=ensemble]:not([data-drawn='0'])")
    quality = read_quality(RunDir(report.parent), fold(tasks.task_run(kind)))
    text, tiles = (tab.inner_text(f"[data-view=ensemble]{part}") for part in ("", " .tiles"))
    for title in (*PLOTS[kind], "Uncertainty", "Conformal prediction", "mean size"):
        assert title in text
    for tile in quality["tiles"]:
        assert tile["figure"] in tiles and tile["label"].lower() in tiles.lower()
    assert "uracy" not in text or kind == "multilabel", "nothing assumes classes"
    assert "95 % interval" in tiles
    for view in ("ensemble", "overview", "members"):
        show(tab, view)
        check_width(tab, 400)
