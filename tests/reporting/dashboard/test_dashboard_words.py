"""What figures say of themselves: of which samples, of whom, while doing what; and texts of any length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import wait_until
from documents import COLUMNS, make_documents
from page_server import PageServer

pytestmark = pytest.mark.browser

Open = Callable[..., PageServer]
AT = {name: i for i, name in enumerate(COLUMNS)}


def notes(tab: Any) -> dict[str, str]:
    """The notes below the figures on the tiles, by their labels."""
    found: dict[str, str] = tab.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll("[data-mark='tile']")].map(
            (tile) => [tile.querySelector("dt").textContent, tile.querySelector(".note").textContent]))"""
    )
    return found


def test_tiles_name_the_samples_and_the_work_that_their_figures_are_of(tab: Any, open_page: Open) -> None:
    documents = make_documents(40, ended=True)
    documents["state"]["run"]["totals"]["node_energy_j"] = 402468.0
    open_page(documents)
    run = documents["state"]["run"]
    said = notes(tab)
    assert said["Best accuracy"] == f"{run['best']['member']}, on validation"
    assert said["Combined accuracy"].endswith("to the best member, both on test")
    assert said["Energy (measured)"].startswith("of 402 kJ for the whole of the nodes")
    assert said["Models a minute"] == "finished and pruned, from the first start to the last end"


def test_a_running_run_says_that_its_rate_is_of_training_alone(tab: Any, open_page: Open) -> None:
    documents = make_documents(12)
    documents["state"]["run"]["facts"].append({"label": "models", "text": "5 finished, 2 pruned.", "tone": ""})
    open_page(documents)
    assert "while training" in notes(tab)["Samples a second"]
    assert notes(tab)["Models a minute"] == "5 finished, 2 pruned."


def test_a_members_page_tells_its_own_best_from_that_of_all(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    best = documents["state"]["run"]["best"]
    values = [0.2, 0.7, 0.6, 0.5]
    documents["curves"]["members"]["member-1"]["values"]["accuracy"] = values
    documents["curves"]["members"]["member-1"]["epoch"] = list(range(4))
    open_page(documents, "#member?member=member-1")
    assert best["member"] != "member-1"
    wanted = f"best of all members, {best['member']}: {best['value']:.4f}; its own best 0.7000 after epoch 2"
    wait_until(tab, lambda: notes(tab)["accuracy"] == wanted)


def test_the_best_member_of_the_ensemble_is_the_best_on_validation(tab: Any, open_page: Open) -> None:
    open_page(make_documents(20, seed=3, ended=True), "#ensemble")
    tab.wait_for_selector(".tag")
    assert tab.locator(".tag").first.get_attribute("title") == "best on validation"
    assert (
        '"Best" is the member with the best objective on validation'
        in tab.locator("figcaption").first.inner_text()
    )
    assert "test samples measured here another may be better" in tab.locator("figcaption").first.text_content()


def test_before_there_is_an_ensemble_one_sentence_stands_for_all_figures(tab: Any, open_page: Open) -> None:
    open_page(make_documents(8), "#ensemble")
    tab.wait_for_selector("text=No member has finished yet.")
    assert tab.locator("[data-view=ensemble] figure >> visible=true").count() == 0
    assert tab.locator("text=No member has finished yet. >> visible=true").count() == 1


def test_a_long_error_does_not_bury_what_is_beside_it(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    error = "the reason why " * 1400
    documents["state"]["members"]["rows"]["member-3"][AT["error"]] = error
    documents["state"]["notices"].append({"at_s": 70.0, "level": "error", "text": error})
    documents["state"]["run"]["facts"].append({"label": "failed", "text": error, "tone": "bad"})
    server = open_page(documents, "#members")  # a view is drawn again where it is opened again
    for view, text in (("overview", "notice"), ("notices", "notice"), ("overview", "fact")):
        tab.goto(f"{server.url}#{view}")
        tab.wait_for_selector(f"[data-view={view}]:not([data-drawn='0'])")
        long = tab.locator(f"[data-mark={text}]", has=tab.locator(".more"))
        assert long.bounding_box()["height"] < 160
        long.locator(".more").click()
        assert long.bounding_box()["height"] > 1000
        assert error.strip() in long.text_content()
    tab.goto(f"{server.url}#member?member=member-3")
    tab.wait_for_selector("[data-view=member] .failure .more")
    assert tab.locator(".failure").bounding_box()["height"] < 250
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("[data-print=members] tr[data-member=member-3]").bounding_box()["height"] < 400
    for notice in tab.locator(".sheets [data-mark=notice]").all():
        assert notice.bounding_box()["height"] < 160


def test_the_reason_of_a_failure_is_in_sight_and_no_head_is_cut(tab: Any, open_page: Open) -> None:
    open_page(make_documents(8), "#members")
    tab.wait_for_selector("tr[data-member]")
    cut = "all => all.filter(each => each.scrollWidth > each.clientWidth).map(each => each.textContent)"
    assert tab.eval_on_selector_all("thead .sort", cut) == []
    head = tab.locator("th[data-column=error]").bounding_box()
    assert head["x"] + head["width"] < 1280
