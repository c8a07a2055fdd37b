"""The view "Curves" in a real browser: what is drawn, selection, changes, hostile names, the cost of an update."""

from __future__ import annotations

from typing import Any

import pytest
from documents import make_documents, renew
from page_steps import Open

pytestmark = [pytest.mark.browser, pytest.mark.more]


VIEW = "[data-view=curves]"
ACCURACY = f"{VIEW} figure[data-metric=accuracy]"


def drawn_members(tab: Any, figure: str = ACCURACY) -> list[str]:
    found = tab.locator(f"{figure} .strong-marks g[data-member]:not([data-mark=training])")
    return sorted(set(found.evaluate_all("all => all.map(each => each.dataset.member)")))


def others(tab: Any, figure: str = ACCURACY) -> int:
    return int(tab.locator(f"{figure} canvas[data-mark=others]").get_attribute("data-count"))


def test_a_member_that_diverged_flattens_no_other_and_is_marked_where_it_leaves(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    curves = documents["curves"]["members"]
    wild = next(name for name, curve in curves.items() if len(curve["epoch"]) > 1)
    curves[wild]["values"]["loss"][1:] = [1e6] * (len(curves[wild]["epoch"]) - 1)
    open_page(documents, "#curves")
    loss, tick = f"{VIEW} figure[data-metric=loss]", tab.get_by_label("outliers")

    def heights() -> dict[str, float]:
        lines = tab.locator(f"{loss} .strong-marks g[data-mark=line], {loss} .strong-marks g[data-mark=best]")
        found = lines.evaluate_all("all => all.map(each => [each.dataset.member, each.getBBox().height])")
        return {name: height for name, height in found if name != wild}

    marks = tab.locator(f"{loss} [data-mark=leaving]")
    assert [mark.get_attribute("data-member") for mark in marks.all()] == [wild] and not tick.is_checked()
    assert "Triangles" in tab.locator(f"{loss} figcaption").inner_text()
    apart = max(heights().values())
    tick.check()
    assert marks.count() == 0 and max(heights().values()) < apart / 20, "the axis reaches a million"
    assert tab.locator(f"{ACCURACY} [data-mark=leaving]").count() == 0


def test_of_many_members_only_the_selected_and_the_best_are_strong(tab: Any, open_page: Open) -> None:
    documents = make_documents(60)
    names = [name for name, curve in documents["curves"]["members"].items() if curve["epoch"]]
    best = documents["state"]["run"]["best"]["member"]
    open_page(documents, "#curves")
    assert drawn_members(tab) == [best]
    assert others(tab) == len(names) - 1
    chosen = [name for name in names if name != best][:2]
    tab.evaluate(f"location.hash = 'curves?select={','.join(chosen)}'")
    tab.wait_for_selector(f"{ACCURACY} [data-mark=line][data-member={chosen[0]}]", state="attached")
    assert drawn_members(tab) == sorted([best, *chosen])
    assert others(tab) == len(names) - 3
    legend = tab.locator(f"{VIEW} .keys-of button[aria-pressed=true]").evaluate_all(
        "all => all.map(each => each.dataset.member)"
    )
    assert sorted(legend) == sorted(chosen)


def test_a_click_and_the_keyboard_select_and_the_hover_names_the_member(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(60), "#curves")
    chart = tab.locator(f"{ACCURACY} .chart")
    chart.focus()
    tab.keyboard.press("ArrowDown")
    name = tab.locator(f"{ACCURACY} .tip strong").inner_text()
    text = tab.locator(f"{ACCURACY} .tip").inner_text()
    assert name.startswith("member-") and "accuracy 0." in text and "epoch" in text and "lr" in text
    tab.keyboard.press("Enter")
    tab.wait_for_function(f"() => location.hash.includes('select={name}')")
    tab.keyboard.press("Enter")
    tab.wait_for_function("() => !location.hash.includes('select')")
    # The same with the pointer, on the ring of the best.
    box = f"document.querySelector('{ACCURACY} .best-ring')?.getBoundingClientRect().toJSON()"
    ring = tab.wait_for_function(f"() => {{ const box = {box}; return box?.width ? box : null; }}").json_value()
    tab.mouse.click(ring["x"] + ring["width"] / 2, ring["y"] + ring["height"] / 2)
    best = server.documents["state"]["run"]["best"]["member"]
    tab.wait_for_function(f"() => location.hash.includes('select={best}')")


def test_a_change_lengthens_a_line_and_takes_back_epochs_that_are_trained_again(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    server = open_page(documents, "#curves")
    name = drawn_members(tab)[0]
    dots = f"{ACCURACY} g[data-member={name}] circle:not(.best-ring)"
    before = tab.locator(dots).count()
    longer = renew(documents, 1)
    curve = longer["curves"]["members"][name]
    curve["epoch"].append(curve["epoch"][-1] + 1)
    curve["t"].append(longer["state"]["now"])
    for figure, values in curve["values"].items():
        values.append(0.95 if figure == "accuracy" else 0.2)
    server.push(longer)
    tab.wait_for_function("([s, n]) => document.querySelectorAll(s).length === n", arg=[dots, before + 1])
    again = renew(longer, 2)
    curve = again["curves"]["members"][name]
    for values in (curve["epoch"], curve["t"], *curve["values"].values()):
        del values[1:]
    server.push(again)
    tab.wait_for_function("([s, n]) => document.querySelectorAll(s).length === n", arg=[dots, 1])


def test_controls_change_the_figure_axis_scale_and_smoothing(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    documents["state"]["run"]["samples"] = 1000
    open_page(documents, "#curves")
    tab.get_by_role("button", name="learning rate").click()
    tab.wait_for_selector(f"{VIEW} figure[data-metric=lr] [data-mark=line]", state="attached")
    axis = f"{ACCURACY} .axes"
    assert "epoch" in tab.locator(axis).text_content()
    tab.get_by_label("over").select_option("samples")
    tab.wait_for_function("s => document.querySelector(s).textContent.includes('samples seen')", arg=axis)
    assert "12k" in tab.locator(axis).text_content()  # 12 epochs of 1,000 samples
    tab.get_by_label("over").select_option("run")
    tab.wait_for_function("s => document.querySelector(s).textContent.includes('0:30')", arg=axis)
    tab.get_by_label("over").select_option("epoch")
    tab.get_by_label("log axis").check()
    lr = f"{VIEW} figure[data-metric=lr]"
    tab.wait_for_function("s => document.querySelector(s + ' .axes').textContent.includes('e-')", arg=lr)
    tab.get_by_label("log axis").uncheck()
    tab.get_by_label("smoothing").fill("1.5")
    tab.wait_for_function(f"() => document.querySelectorAll('{ACCURACY} [data-mark=line] path').length >= 2")
    assert "half-life of 1.5 epochs" in tab.locator(f"{ACCURACY} figcaption").inner_text()
    # The address shows the same to somebody else; what does not fit is as at first.
    tab.wait_for_function("() => location.hash.includes('halflife=1.5')")
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.get_by_role("button", name="Copy the address").click()
    tab.wait_for_selector(".toast >> text=is copied")
    address = tab.evaluate("navigator.clipboard.readText()")
    caption = tab.locator(f"{ACCURACY} figcaption").inner_text()
    tab.get_by_label("over").select_option("own")
    assert tab.get_by_label("smoothing").input_value() == "", "seconds are no epochs"
    tab.evaluate("address => { location.href = address; }", address)
    tab.wait_for_function(
        "s => document.querySelector(s)?.textContent.includes('half-life')", arg=f"{ACCURACY} figcaption"
    )
    assert tab.locator(f"{ACCURACY} figcaption").inner_text() == caption
    assert tab.locator(f"{VIEW} figure").count() == 3 and tab.get_by_label("smoothing").input_value() == "1.5"
