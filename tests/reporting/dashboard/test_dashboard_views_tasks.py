"""The page of a run of each task in a real browser: what it draws is what was saved, in any width and theme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import task_events as tasks
from event_dicts import fold
from page_steps import check_width, figure, show

from ensemble.reporting.dashboard.analysis import read_quality
from ensemble.reporting.report import write_report
from ensemble.store import RunDir

pytestmark = [pytest.mark.browser, pytest.mark.more]

PLOTS = {
    "multilabel": ["Calibration", "F1 of each label", "ROC AUC of each label"],
    "regression": ["Predicted against true", "Residuals by prediction"],
    "gaussian": ["Coverage of predicted intervals", "(PIT)", "Predicted against true"],
    "quantiles": ["Coverage by level", "Predicted against true"],
    "free": ["Weights of the combination"],
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
    for each in quality["figures"]:
        assert f"{quality['combined'][each['name']]:.4f}" in tiles
        assert each["label"].lower() in tiles.lower()
    assert "uracy" not in text or kind == "multilabel", "nothing assumes classes"
    assert ("within noise" in tiles) == bool(quality["noise"])
    assert "95 % interval" in tiles
    assert all(title in text for title in ("Uncertainty", "Conformal prediction", "Shifted samples", "AUROC"))
    for view in ("ensemble", "overview", "members"):
        show(tab, view)
        check_width(tab, 400)


def test_whiskers_span_the_interval_of_the_combined_model_and_of_the_best_member(
    tab: Any, reports: dict[str, Path]
) -> None:
    open_view(tab, reports["regression"])
    spans = tab.locator("[data-metric=rmse] .dot-span")
    assert spans.count() == 2, "of the combined model and of its best member"
    low, high = tasks.task_run("regression")[-2]["intervals"]["ensemble"]["rmse"]
    assert spans.first.get_attribute("title") == f"95 %: {low:.4f} … {high:.4f}"
    span, mark = (
        tab.locator(f"[data-metric=rmse] .dot-row >> nth=0 >> .dot-{each}").bounding_box()
        for each in ("span", "mark")
    )
    assert span["x"] < mark["x"] + mark["width"] / 2 < span["x"] + span["width"]


def test_the_numbers_of_a_plot_are_there_as_a_table(tab: Any, reports: dict[str, Path]) -> None:
    open_view(tab, reports["quantiles"])
    card = figure(tab, "Coverage by level")
    card.get_by_role("button", name="as a table").click()
    assert card.locator("tbody tr").count() == 2 * 5


def test_overview_and_members_name_the_objective_and_its_direction(tab: Any, reports: dict[str, Path]) -> None:
    open_view(tab, reports["regression"], "overview")
    tiles = tab.inner_text("[data-view=overview] .tiles")
    assert "Combined RMSE" in tiles and "to the best member" in tiles and "Best rmse" in tiles
    best = tab.locator(".tile", has_text="Combined RMSE").locator(".note")
    assert "good" in best.get_attribute("class"), "a smaller error is better"
    show(tab, "members")
    assert tab.locator("[title*='RMSE in units of the target (lower is better)']").count() > 0
