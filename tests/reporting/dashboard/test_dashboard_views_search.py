"""The view "Search" in a real browser: its lines and marks, brushing, one selection, changes, names, speed."""

from __future__ import annotations

import random
from typing import Any

import pytest
from documents import COLUMNS, make_documents
from page_server import PageServer
from page_steps import Open, figure, selected, show, wait_until

from ensemble.reporting.model_figures import describe_figure

pytestmark = [pytest.mark.browser, pytest.mark.more]

AT = {name: i for i, name in enumerate(COLUMNS)}
LINES = "canvas.lines"


def lines(tab: Any, which: str = "lines") -> int:
    return int(tab.get_attribute(LINES, f"data-{which}"))


def wait_strong(tab: Any, wanted: int) -> None:
    tab.wait_for_function("n => document.querySelector('canvas.lines').dataset.strong === String(n)", arg=wanted)


def rows(server: PageServer) -> dict[str, dict[str, Any]]:
    return {
        name: dict(zip(COLUMNS, row, strict=True))
        for name, row in server.documents["state"]["members"]["rows"].items()
    }


def begun(server: PageServer) -> dict[str, dict[str, Any]]:
    return {name: row for name, row in rows(server).items() if row["state"] != "waiting"}


def widened(documents: dict[str, Any], extra: int) -> dict[str, Any]:
    """The documents with more hyperparameters, all of which differ."""
    rng = random.Random(5)
    for row in documents["state"]["members"]["rows"].values():
        row[AT["params"]] = {**row[AT["params"]], **{f"p{k}": rng.uniform(0, 10**k) for k in range(extra)}}
    documents["state"]["run"]["varied"] += [f"p{k}" for k in range(extra)]
    return documents


def box_of(tab: Any, selector: str) -> dict[str, float]:
    """The place of the first mark; asked for in one step, because a drawing may replace it at any time."""
    return tab.evaluate("what => document.querySelector(what).getBoundingClientRect().toJSON()", selector)


def drag(tab: Any, axis: str, low: float, high: float) -> None:
    """Drags over two shares of an axis's height, 0 at its foot; again where the page moved the axis meanwhile."""

    def hits(share: float, *, down: bool = False) -> bool:
        box = box_of(tab, f"[data-axis='{axis}'] .axis-line")
        tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + (1 - share) * box["height"], steps=4)
        if down:
            tab.mouse.down()
        return box == box_of(tab, f"[data-axis='{axis}'] .axis-line")

    while not hits(low, down=True):
        tab.mouse.up()
    while not (hits((low + high) / 2) and hits(high)):
        pass
    tab.mouse.up()


def test_every_trial_that_has_begun_is_a_line_over_the_hyperparameters_that_differ(
    tab: Any, open_page: Open
) -> None:
    server = open_page(make_documents(60, seed=2), "#search")
    assert lines(tab) == lines(tab, "strong") == len(begun(server))
    names = tab.eval_on_selector_all("[data-axis]", "all => all.map(one => one.dataset.axis.trim())")
    assert names == ["lr", "width", "depth", "accuracy"], "as declared, the objective last"
    kinds = tab.eval_on_selector_all("[data-axis]", "all => all.map(one => one.dataset.kind)")
    assert kinds == ["log", "category", "category", "linear"]
    assert tab.locator("[data-slice]").count() == 3
    assert "62 %" in tab.inner_text("[data-mark=lr]")


def test_axes_keep_their_order_until_the_reader_asks_for_importance_and_change_their_scales(
    tab: Any, open_page: Open
) -> None:
    documents = make_documents(40)
    documents["importances"]["importances"] = [["depth", 0.9], ["lr", 0.1]]
    open_page(documents, "#search")
    tab.wait_for_selector("[data-mark=depth]")
    assert tab.get_attribute("[data-axis] >> nth=0", "data-axis") == "lr", "the importances have come"
    tab.get_by_role("button", name="by importance").click()
    tab.wait_for_function("() => document.querySelector('[data-axis]').dataset.axis === 'depth'")
    assert tab.get_attribute("[data-axis=lr]", "data-kind") == "log"
    tab.get_by_role("button", name="lr is log; make it linear").press("Enter")
    tab.wait_for_selector("[data-axis=lr][data-kind=linear]")


@pytest.mark.parametrize(("low", "high"), [(-0.02, 0.4), (0.55, 1.02)])
def test_a_range_dragged_on_an_axis_selects_the_members_within_it(
    tab: Any, open_page: Open, low: float, high: float
) -> None:
    server = open_page(make_documents(80, seed=4), "#search")
    values = {name: row["metric"] for name, row in begun(server).items() if row["metric"] is not None}
    bottom, top = min(values.values()), max(values.values())
    share = {name: (value - bottom) / (top - bottom) for name, value in values.items()}
    wanted = {name for name, at in share.items() if low <= at <= high}
    border = {name for name, at in share.items() if min(abs(at - low), abs(at - high)) < 0.01}
    drag(tab, "accuracy ", low, high)
    assert wanted
    # While it is dragged the selection follows.
    wait_until(tab, lambda: wanted - border <= selected(tab) <= wanted | border)
    tab.wait_for_selector(f".chip:has-text('{len(selected(tab))} selected')")
    wait_strong(tab, len(selected(tab)))
    tab.click("[data-view=search] button:has-text('clear ranges')")
    wait_strong(tab, len(begun(server)))
    assert selected(tab) == set()


def test_ranges_can_be_typed_and_ticked_without_a_pointer(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(60, seed=2), "#search")
    tab.focus(".ranges summary")
    tab.keyboard.press("Enter")
    field = tab.get_by_label("lr from")
    field.fill("0.001")
    field.press("Enter")
    tab.locator("[data-range=width] label", has_text="64").locator("input").press("Space")
    expected = {
        n for n, row in begun(server).items() if row["params"]["lr"] >= 0.001 and row["params"]["width"] == 64
    }
    wait_strong(tab, len(expected))
    assert selected(tab) == expected and expected


def test_two_ranges_hold_together_and_a_trial_that_comes_to_lie_in_them_is_selected(
    tab: Any, open_page: Open
) -> None:
    server = open_page(make_documents(60, seed=2), "#search")
    drag(tab, "accuracy ", 0.3, 1.1)
    drag(tab, "depth", -0.1, 0.4)
    tab.wait_for_function("() => location.hash.includes('select=')")
    before = selected(tab)
    assert before and {rows(server)[name]["params"]["depth"] for name in before} == {1}
    late = next(n for n, row in rows(server).items() if row["params"]["depth"] == 1 and n not in before)
    row = list(server.documents["state"]["members"]["rows"][late])
    row[AT["state"]], row[AT["metric"]] = "running", max(rows(server)[name]["metric"] for name in before)
    state = server.documents["state"]
    server.push({"offset": state["offset"] + 5, "now": state["now"] + 1, "members": {late: row}})
    tab.wait_for_function("id => location.hash.includes(id)", arg=late)
    assert selected(tab) == before | {late}


def test_the_selection_of_another_view_is_drawn_strong_and_a_clicked_mark_joins_it(
    tab: Any, open_page: Open
) -> None:
    server = open_page(make_documents(40, seed=2), "#search")
    name = next(iter(begun(server)))
    show(tab, f"search?select={name}")
    wait_strong(tab, 1)
    figure(tab, "Trials in order").locator("canvas").focus()
    for _ in range(3):
        tab.keyboard.press("ArrowRight")
    other = tab.inner_text(".tip strong >> visible=true")
    tab.keyboard.press("Enter")
    assert selected(tab) == {name} ^ {other}
    tab.keyboard.press("Escape")
    wait_strong(tab, len(begun(server)))


def test_a_clicked_line_selects_its_member(tab: Any, open_page: Open) -> None:
    open_page(make_documents(3, seed=2, ended=True), "#search")
    first, second = (box_of(tab, f"[data-axis={name}] .axis-line") for name in ("lr", "width"))
    middle = (first["x"] + second["x"]) / 2
    for y in range(int(first["y"]), int(first["y"] + first["height"]), 4):
        tab.mouse.move(middle, y)
        if tab.locator(".parallel .tip").is_visible():
            break
    name = tab.inner_text(".parallel .tip strong")
    tab.mouse.down()
    tab.mouse.up()
    tab.wait_for_function("() => location.hash.includes('select=')")
    assert selected(tab) == {name}


def test_the_slider_keeps_the_best_and_phases_can_be_switched_off(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(60, seed=2), "#search")
    states = [row["state"] for row in rows(server).values()]
    working, resting = states.count("running") + states.count("placed"), states.count("paused")
    assert tab.inner_text("[data-phase=running]") == f"{working} still running"
    assert tab.inner_text("[data-phase=standing]") == f"{resting} paused, stopped or interrupted"
    assert tab.inner_text("[data-phase=waiting]") == f"{states.count('waiting')} waiting, not drawn"
    tab.click("[data-phase=pruned]")
    left = len(begun(server)) - states.count("pruned")
    tab.wait_for_function("n => document.querySelector('canvas.lines').dataset.lines === String(n)", arg=left)
    assert tab.get_attribute("[data-phase=pruned]", "aria-pressed") == "false"
    tab.click("[data-phase=pruned]")
    slider = tab.get_by_label("Show the best trials only: how many")
    slider.focus()
    tab.keyboard.press("Home")
    for _ in range(4):
        tab.keyboard.press("ArrowRight")
    assert lines(tab) == 5 and "5 of" in tab.inner_text(".slider output")
    tab.keyboard.press("End")
    assert lines(tab) == len(begun(server))


def test_history_pruning_and_slices_count_their_marks(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(60, seed=2), "#search")
    tab.wait_for_function("() => document.querySelector('[data-slice] canvas').dataset.marks > 0")
    valued = {n: row for n, row in begun(server).items() if row["metric"] is not None}
    assert int(tab.get_attribute("[data-slice=lr] canvas", "data-marks")) == len(valued)
    pruning = figure(tab, "What was pruned when")
    pruned = {n: row for n, row in valued.items() if row["state"] == "pruned"}
    epoch = min(row["epoch"] for row in pruned.values())
    many = sum(row["epoch"] == epoch for row in pruned.values())
    reached = sum(row["epoch"] >= epoch for row in begun(server).values())
    assert f"Pruned: {many} of {reached} after epoch {epoch}" in pruning.inner_text()
    pruning.get_by_role("button", name="as a table").press("Enter")
    wait_until(tab, lambda: pruning.locator("tbody tr", has_text="pruned").count() == len(pruned))


def optimizing(documents: Any, further: list[str]) -> tuple[list[str], list[str]]:
    """Gives finished trials values of further objectives; returns those that are on the front, and the others."""
    members = documents["state"]["members"]
    at = {name: members["columns"].index(name) for name in ("state", "further")}
    done = [name for name, row in members["rows"].items() if row[at["state"]] == "finished"]
    for number, name in enumerate(done):
        members["rows"][name][at["further"]] = [100.0 * (1 + number), 0.25 * (1 + number % 5)][: len(further)]
    documents["state"]["run"] |= {
        "further": [{"name": name, "mode": "min"} for name in further],
        "front": done[:4],
    }
    return done[:4], done[4:]


def test_a_second_objective_has_its_front(tab: Any, open_page: Open) -> None:
    documents = make_documents(60, seed=2)
    on, off = optimizing(documents, ["energy_j"])
    open_page(documents, "#search")
    pareto = figure(tab, "Pareto front")
    pareto.get_by_role("button", name="as a table").click()
    shown = pareto.locator("tbody tr", has_text="on the front").locator("th").all_inner_texts()
    assert shown == on and pareto.locator("tbody tr").count() == len(on) + len(off)
    assert "100 J (measured)" in pareto.locator("tbody").inner_text()
    assert figure(tab, "What was pruned when").count() == 0, "nothing is pruned by several objectives"


def test_three_objectives_are_seen_two_at_a_time(tab: Any, open_page: Open) -> None:
    documents = make_documents(60, seed=2)
    optimizing(documents, ["cpu_s", "latency_ms"])
    documents["state"]["run"]["figures"]["latency_ms"] = describe_figure("latency_ms").as_document()
    open_page(documents, "#search")
    pareto = figure(tab, "Pareto front")
    pareto.wait_for()
    assert tab.locator("figure h3", has_text="Pareto front").all_inner_texts() == [
        "Pareto front, CPU-seconds (measured)",
        "Pareto front, latency in ms (lower is better)",
    ]
    pareto.get_by_role("button", name="as a table").click()
    head = pareto.locator("thead th").all_inner_texts()
    assert head[:4] == ["trial", "CPU-seconds (measured)", "latency in ms (lower is better)", "accuracy"]
    assert pareto.locator("tbody tr").first.locator("td").all_inner_texts()[:2] == ["100 s", "0.2500"]


def test_a_fixed_list_has_the_view_without_pruning_and_a_run_in_which_nothing_differs_has_none(
    tab: Any, open_page: Open
) -> None:
    documents = make_documents(8)
    documents["state"]["run"]["mode"] = "list"
    documents["importances"] = {"importances": [], "method": "", "missing": "The importances need 5 members."}
    open_page(documents, "#search")
    tab.wait_for_selector("text=The importances need 5 members.")
    assert tab.locator("h3 >> visible=true", has_text="What was pruned when").count() == 0
    documents["state"]["run"]["varied"] = []
    open_page(documents)
    assert tab.locator(".tab", has_text="Search").count() == 0


@pytest.mark.slow  # it measures time
def test_a_thousand_trials_of_twelve_hyperparameters_are_brushed_fast(tab: Any, open_page: Open) -> None:
    open_page(widened(make_documents(1000, seed=1), 9), "#search")
    assert tab.locator("[data-axis]").count() == 13
    tab.evaluate(
        """() => { window.frames_ = []; let last = performance.now();
        const tick = now => {
          frames_.push(now - last); last = now; window.ticking = requestAnimationFrame(tick); };
        requestAnimationFrame(tick); }"""
    )
    box = box_of(tab, "[data-axis=lr] .axis-line")
    tab.mouse.move(box["x"], box["y"] + 20)
    tab.mouse.down()
    for i in range(60):
        tab.mouse.move(box["x"], box["y"] + 20 + 3 * i)
    frames = sorted(tab.evaluate("() => { cancelAnimationFrame(window.ticking); return window.frames_; }"))
    tab.mouse.up()
    print(f"brushing: median frame {frames[len(frames) // 2]:.0f} ms, worst {frames[-1]:.0f} ms of {len(frames)}")
    assert frames[len(frames) // 2] < 100
    tab.wait_for_function("() => location.hash.includes('select=')")
