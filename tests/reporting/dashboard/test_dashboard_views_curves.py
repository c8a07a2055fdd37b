"""The view "Curves" in a real browser: what is drawn, selection, changes, hostile names, the cost of an update."""

from __future__ import annotations

from typing import Any

import pytest
from documents import make_documents, renew
from page_steps import Open

pytestmark = [pytest.mark.browser, pytest.mark.more]

VIEW = "[data-view=curves]"
ACCURACY = f"{VIEW} figure[data-metric=accuracy]"


def list_of(tab: Any, selector: str, what: str = "each.dataset.member") -> list[Any]:
    return list(tab.locator(selector).evaluate_all(f"all => all.map(each => {what})"))


def drawn_members(tab: Any) -> list[str]:
    return sorted(set(list_of(tab, f"{ACCURACY} .strong-marks g[data-member]:not([data-mark=training])")))


def others(tab: Any) -> int:
    return int(tab.locator(f"{ACCURACY} canvas[data-mark=others]").get_attribute("data-count"))


def wait_for(tab: Any, *looked: str) -> None:
    tab.wait_for_function("([s, words]) => document.querySelector(s)?.textContent.includes(words)", arg=[*looked])


def test_a_member_that_diverged_flattens_no_other_and_is_marked_where_it_leaves(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    curves = documents["curves"]["members"]
    wild = next(name for name, curve in curves.items() if len(curve["epoch"]) > 1)
    curves[wild]["values"]["loss"][1:] = [1e6] * (len(curves[wild]["epoch"]) - 1)
    open_page(documents, "#curves")
    loss, tick = f"{VIEW} figure[data-metric=loss]", tab.get_by_label("outliers")
    marks, lines = f"{loss} [data-mark=leaving]", f"{loss} .strong-marks g:is([data-mark=line], [data-mark=best])"

    def tallest() -> float:
        heights = list_of(tab, lines, "[each.dataset.member, each.getBBox().height]")
        return float(max(height for name, height in heights if name != wild))

    assert list_of(tab, marks) == [wild] and not tick.is_checked()
    assert "Triangles" in tab.locator(f"{loss} figcaption").inner_text()
    apart = tallest()
    tick.check()
    assert list_of(tab, marks) == [] and tallest() < apart / 20, "the axis reaches a million"
    assert list_of(tab, f"{ACCURACY} [data-mark=leaving]") == []


def test_of_many_members_only_the_selected_and_the_best_are_strong(tab: Any, open_page: Open) -> None:
    documents = make_documents(60)
    names = [name for name, curve in documents["curves"]["members"].items() if curve["epoch"]]
    best = documents["state"]["run"]["best"]["member"]
    open_page(documents, "#curves")
    assert drawn_members(tab) == [best] and others(tab) == len(names) - 1
    chosen = [name for name in names if name != best][:2]
    tab.evaluate(f"location.hash = 'curves?select={','.join(chosen)}'")
    tab.wait_for_selector(f"{ACCURACY} [data-mark=line][data-member={chosen[0]}]", state="attached")
    assert drawn_members(tab) == sorted([best, *chosen]) and others(tab) == len(names) - 3
    assert sorted(list_of(tab, f"{VIEW} .keys-of button[aria-pressed=true]")) == sorted(chosen)
    tab.evaluate("location.hash = 'curves'")
    tab.wait_for_function("() => !location.hash.includes('select')")
    tab.locator(f"{ACCURACY} .chart").focus()
    tab.keyboard.press("ArrowDown")
    name = tab.locator(f"{ACCURACY} .tip strong").inner_text()
    text = tab.locator(f"{ACCURACY} .tip").inner_text()
    assert name.startswith("member-") and all(word in text for word in ("accuracy 0.", "epoch", "lr"))
    tab.keyboard.press("Enter")
    tab.wait_for_function(f"() => location.hash.includes('select={name}')")
    tab.keyboard.press("Enter")
    tab.wait_for_function("() => !location.hash.includes('select')")
    box = f"document.querySelector('{ACCURACY} .best-ring')?.getBoundingClientRect().toJSON()"
    ring = tab.wait_for_function(f"() => {{ const box = {box}; return box?.width ? box : null; }}").json_value()
    tab.mouse.click(ring["x"] + ring["width"] / 2, ring["y"] + ring["height"] / 2)
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


def test_an_evaluation_within_an_epoch_is_a_point_between_and_breaks_no_other_line(
    tab: Any, open_page: Open
) -> None:
    documents = make_documents(8)
    name, curve = max(documents["curves"]["members"].items(), key=lambda item: len(item[1]["epoch"]))
    within = {"accuracy": 0.99, "loss": 0.5}
    server = open_page(documents, f"#curves?select={name}")
    dots = f"{ACCURACY} g[data-member={name}] circle:not(.best-ring)"
    before = tab.locator(dots).count()
    changed = renew(documents, 1)
    curve = changed["curves"]["members"][name]
    curve["epoch"].insert(3, 2.4)
    curve["t"].insert(3, (curve["t"][2] + curve["t"][3]) / 2)
    for figure, values in curve["values"].items():
        values.insert(3, within.get(figure))
    server.push(changed)
    tab.wait_for_function("([s, n]) => document.querySelectorAll(s).length === n", arg=[dots, before + 1])
    training = f"{VIEW} figure[data-metric=loss] [data-mark=training][data-member={name}] path"
    assert [path.count("M") for path in list_of(tab, training, "each.getAttribute('d')")] == [1], "no gap"
    tab.locator(ACCURACY).get_by_role("button", name="as a table").click()
    row = tab.locator(f"{ACCURACY} tr[data-member={name}]").inner_text()
    assert "0.99" in row and "3.4" in row, "the highest, and at which epoch"


def test_controls_change_the_figure_axis_scale_and_smoothing(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    documents["state"]["run"]["samples"] = 1000
    open_page(documents, "#curves")
    lr, axis, caption = f"{VIEW} figure[data-metric=lr]", f"{ACCURACY} .axes", f"{ACCURACY} figcaption"
    tab.get_by_role("button", name="learning rate").click()
    tab.wait_for_selector(f"{lr} [data-mark=line]", state="attached")
    assert "epoch" in tab.locator(axis).text_content()
    over, smoothing = tab.get_by_label("over"), tab.get_by_label("smoothing")
    over.select_option("samples")
    wait_for(tab, axis, "samples seen")
    assert "12k" in tab.locator(axis).text_content()  # 12 epochs of 1,000 samples
    over.select_option("run")
    wait_for(tab, axis, "0:30")
    over.select_option("epoch")
    tab.get_by_label("log axis").check()
    wait_for(tab, f"{lr} .axes", "e-")
    tab.get_by_label("log axis").uncheck()
    smoothing.fill("1.5")
    tab.wait_for_function(f"() => document.querySelectorAll('{ACCURACY} [data-mark=line] path').length >= 2")
    before = tab.locator(caption).inner_text()
    assert "half-life of 1.5 epochs" in before
    # The address shows the same to somebody else; what does not fit is as at first.
    tab.wait_for_function("() => location.hash.includes('halflife=1.5')")
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.get_by_role("button", name="Copy the address").click()
    tab.wait_for_selector(".toast >> text=is copied")
    address = tab.evaluate("navigator.clipboard.readText()")
    over.select_option("own")
    assert smoothing.input_value() == "", "seconds are no epochs"
    tab.evaluate("address => { location.href = address; }", address)
    wait_for(tab, caption, "half-life")
    assert tab.locator(caption).inner_text() == before
    assert tab.locator(f"{VIEW} figure").count() == 3 and smoothing.input_value() == "1.5"
