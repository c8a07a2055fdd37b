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

PLOTS = {
    "multilabel": ["Calibration", "Figures of each label"],
    "regression": ["Predicted against true"],
    "gaussian": ["Coverage of predicted intervals", "Predicted against true"],
    "quantiles": ["Coverage by level", "Predicted against true"],
    "free": ["Combined model and members"],
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {kind: write_report(RunDir(tasks.write_task_run(folder / kind, kind))) for kind in tasks.TASKS}


def open_view(tab: Any, report: Path, view: str = "ensemble") -> None:
    tab.goto(f"file://{report}#{view}")
    tab.wait_for_selector(f"[data-view={view}]:not([data-drawn='0'])")


@pytest.mark.parametrize("kind", tasks.TASKS)
def test_the_view_has_the_figures_and_plots_of_its_task(tab: Any, reports: dict[str, Path], kind: str) -> None:
    open_view(tab, reports[kind])
    state = fold(tasks.task_run(kind))
    quality = read_quality(RunDir(reports[kind].parent), state)
    text = tab.inner_text("[data-view=ensemble]")
    for title in PLOTS[kind]:
        assert title in text
    tiles = tab.inner_text("[data-view=ensemble] .tiles")
    for each in quality["tiles"]:
        assert each["figure"] in tiles and each["label"].lower() in tiles.lower()
    assert "uracy" not in text or kind == "multilabel", "nothing assumes classes"
    assert "95 % interval" in tiles
    assert all(title in text for title in ("Uncertainty", "Conformal prediction", "mean size"))
    for view in ("ensemble", "overview", "members"):
        show(tab, view)
        check_width(tab, 400)
