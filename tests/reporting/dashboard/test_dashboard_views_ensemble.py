"""The view "Ensemble" in a real browser: figures against the document, one selection, what is so far, names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from documents import make_documents
from page_steps import Open, figure, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.more]


@pytest.fixture
def documents() -> dict[str, Any]:
    return make_documents(20, seed=3, ended=True)


def of_members(many: int) -> dict[str, Any]:
    """The quality of many members, the matrix as large as it gets."""
    quality = copy.deepcopy(make_documents(20, seed=3, ended=True)["quality"])
    first = next(iter(quality["members"].values()))
    ids = [f"member-{i}" for i in range(many)]
    quality["members"] = {name: {**first, "accuracy": 0.9 - i / 5000} for i, name in enumerate(ids)}
    quality["best"] = "member-0"
    shown = ids[:50]
    matrix = [[abs(i - j) / 100 for j in range(50)] for i in range(50)]
    quality["disagreement"] |= {"members": shown, "matrix": matrix}
    return quality


def test_the_combined_model_stands_beside_each_member_with_its_figures(
    tab: Any, open_page: Open, documents: Any
) -> None:
    quality = documents["quality"]
    open_page(documents, "#ensemble")
    rows = tab.locator("[data-metric=accuracy] .dot-row")
    assert rows.count() == 1 + len(quality["members"])
    assert rows.first.inner_text().split() == ["combined", "0.9150"]
    for member, metrics in quality["members"].items():
        for metric in ("accuracy", "nll"):
            text = tab.inner_text(f"[data-metric={metric}] [data-member='{member}']")
            assert text.split()[0] == member and text.split()[-1] == f"{metrics[metric]:.4f}"
    best = tab.inner_text(f"[data-metric=nll] [data-member='{quality['best']}']")
    assert "best" in best
    tiles = tab.inner_text("[data-view=ensemble] .tiles")
    assert "0.9150" in tiles and "+0.0150 to the best member" in tiles and "−0.0400" in tiles
    assert "greedy" in tiles and "temperature 0.8: sharpened" in tiles
    assert "same 359 samples of the test split" in tab.inner_text("[data-view=ensemble]")
    for metric in ("accuracy", "nll"):  # better dots lie on the side that the title names
        marks = tab.locator(f"[data-metric={metric}] .dot-mark")
        lefts = [marks.nth(i).bounding_box()["x"] for i in range(marks.count())]
        assert lefts == sorted(lefts, reverse=metric == "accuracy")
    assert tab.locator(".tag").first.get_attribute("title") == "best on validation"
    caption = tab.locator("figcaption").first.text_content()
    assert '"Best" is the member with the best objective on validation' in caption
    assert "test samples measured here another may be better" in caption


def test_calibration_shows_both_curves_and_how_many_samples_each_bin_has(
    tab: Any, open_page: Open, documents: Any
) -> None:
    bins = documents["quality"]["curves"]["best"]
    open_page(documents, "#ensemble")
    calibration = figure(tab, "Calibration")
    assert "combined, ECE 0.0300" in calibration.inner_text()
    assert int(figure(tab, "Samples by confidence").locator("canvas").get_attribute("data-marks")) == 2 * len(bins)
    calibration.get_by_role("button", name="as a table").press("Enter")
    wait_until(tab, lambda: calibration.locator("tbody tr").count() == 2 * len(bins))
    lines = calibration.locator("tbody tr").all_inner_texts()
    assert [int(line.split()[-1]) for line in lines[: len(bins)]] == [many for _, _, many in bins]


def test_the_gain_curve_has_a_point_for_each_added_member_and_a_key_selects_it(
    tab: Any, open_page: Open, documents: Any
) -> None:
    gain = documents["quality"]["gain"]
    open_page(documents, "#ensemble")
    chart = figure(tab, "Gain of each added member, NLL")
    canvas = chart.locator("canvas")
    canvas.scroll_into_view_if_needed()
    canvas.focus()
    tab.keyboard.press("ArrowRight")
    assert f"added {gain[0]['added']}" in chart.locator(".tip").inner_text()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    tab.wait_for_function("id => location.hash.endsWith('select=' + id)", arg=gain[1]["added"])
    tab.wait_for_selector(f"[data-metric=nll] [data-member='{gain[1]['added']}']:not(.pale)")
    tab.wait_for_selector(f"[data-metric=nll] [data-member='{gain[0]['added']}'].pale")
    chart.get_by_role("button", name="as a table").click()
    assert chart.locator("tbody tr").count() == len(gain)


def test_the_disagreement_matrix_has_a_cell_for_each_pair_and_the_weights_add_up(
    tab: Any, open_page: Open, documents: Any
) -> None:
    found = documents["quality"]["disagreement"]
    many = len(found["members"])
    open_page(documents, "#ensemble")
    assert tab.locator(".matrix rect").count() == many**2
    title = tab.locator(".matrix g", has=tab.locator("[data-mark='0,2']")).locator("title").text_content()
    assert title == f"{found['members'][0]} and {found['members'][2]}: 12 %"
    faint, strong = (
        float(tab.get_attribute(f".matrix [data-mark='0,{j}']", "fill-opacity")) for j in (1, many - 1)
    )
    assert faint < strong
    head = tab.locator(f".matrix-head[data-member='{found['members'][1]}']")
    head.focus()
    tab.keyboard.press("Enter")
    tab.wait_for_selector(f".matrix-head.chosen[data-member='{found['members'][1]}']")
    tab.keyboard.press("Escape")
    tab.wait_for_selector(".chip", state="hidden")
    weights = figure(tab, "Weights of the combination").locator("[data-member]")
    assert [text.split()[-2] for text in weights.all_inner_texts()] == ["50", "30", "20"]
    weights.first.get_by_role("button").click()
    tab.wait_for_selector(".chip:has-text('1 selected')")


def test_while_the_run_goes_it_says_that_it_is_not_the_runs_result(
    tab: Any, open_page: Open, documents: Any
) -> None:
    running = make_documents(20, seed=3)
    quality = documents["quality"]
    quality["combination"] |= {"so_far": True, "note": "Not the run's result."}
    running["quality"] = quality
    open_page(running, "#ensemble")
    text = tab.inner_text("[data-view=ensemble]")
    assert "What the combined model would be so far" in text and "Not the run's result" in text
    assert "6 finished members combined by greedy selection" in text and "at its end" in text
    assert "combined so far" in figure(tab, "Calibration").inner_text()


def test_the_reason_for_which_nothing_was_combined_is_shown(tab: Any, open_page: Open, documents: Any) -> None:
    documents["quality"] |= {"combined": None, "gain": [], "disagreement": None}
    documents["quality"]["curves"].pop("combined")
    documents["quality"]["combination"] |= {"members": [], "weights": {}, "reason": "no test split <b>here</b>"}
    open_page(documents, "#ensemble")
    text = tab.inner_text("[data-view=ensemble]")
    assert "None: no test split <b>here</b>." in text
    assert tab.locator("[data-view=ensemble] b").count() == 0
    assert "needs two members" in text


def test_a_thousand_members_are_drawn_at_once_and_a_selection_redraws(tab: Any, open_page: Open) -> None:
    documents = make_documents(1000, seed=3, ended=True)
    documents["quality"] = of_members(1000)
    open_page(documents, "#ensemble")
    assert tab.locator(".matrix rect").count() == 2500 and tab.locator("[data-metric=nll] .dot-row").count() == 31
    assert "The best 30 members by accuracy; 970 more in the table" in tab.inner_text("[data-view=ensemble]")
    tab.locator("[data-metric=nll] .name-button").first.click()
    tab.wait_for_selector("[data-metric=nll] .pale")
