"""The view "Placement" in a real browser: members by share on cores and GPUs, now and at another moment."""

from __future__ import annotations

from typing import Any

import pytest
from documents import make_documents, renew
from kit.run_events import START
from page_steps import Open

pytestmark = [pytest.mark.browser, pytest.mark.more]

VIEW = "[data-view=placement]"
PIECE = f"{VIEW} [data-mark=piece]"


def place(documents: dict[str, Any], spans: dict[str, list[Any]], shares: dict[str, float], **more: Any) -> None:
    """Puts members where these attempts are, each with these shares; `more` are further columns of theirs."""
    state = documents["state"]
    state["spans"] = {name: [spans[name]] if name in spans else [] for name in state["members"]["rows"]}
    for row in state["members"]["rows"].values():
        for column, value in {"shares": shares, "workers": 1, "place": None, **more}.items():
            row[state["members"]["columns"].index(column)] = value


def run_on(node: str, *devices: str) -> list[Any]:
    return [0, node, list(devices), 0, START, START + 1, None, "running"]


def test_gpus_show_users_memory_use_watts_quarantine_and_nodes_that_are_gone(tab: Any, open_page: Open) -> None:
    documents, gpu = make_documents(8, gpus=2), "GPU-node-0-0"
    spans = {"member-0": run_on("node-0", gpu), "member-1": run_on("node-0", gpu), "member-5": run_on("node-9")}
    place(documents, spans, {"cpus": 1.0, "gpus": 0.25}, memory_gb=4.0)
    first, second = documents["state"]["nodes"][0]["gpus"]
    first |= {"memory_gb": 80.0, "free_gb": 70.0, "use": 0.64, "watts": 250.0}
    second["quarantined"] = "ECC error"
    documents["state"]["nodes"][1] |= {"gone": True}
    open_page(documents, "#placement")
    device = tab.locator(f"{VIEW} [data-device='{gpu}']")
    assert device.locator("[data-mark=piece]").count() == 2
    text = device.inner_text()
    for words in ("50 % reserved", "64 %", "250 W", "18 of 80 GiB", "10 GiB of others"):
        assert words in text
    assert "quarantined: ECC error" in tab.locator(f"{VIEW} .quarantined").inner_text()
    gone = tab.locator(f"{VIEW} .node.gone").evaluate_all("all => all.map(each => each.dataset.node)")
    assert gone == ["node-1", "node-9"]


def test_a_change_moves_a_member(tab: Any, open_page: Open) -> None:
    documents, span = make_documents(8, gpus=2), run_on("node-0", "GPU-node-0-0")
    place(documents, {"member-0": span}, {"cpus": 1.0, "gpus": 0.5})
    server = open_page(documents, "#placement")
    now = documents["state"]["now"]
    moved = [[*span[:6], now - 1, "moved"], [0, "node-1", ["GPU-node-1-1"], 1, now - 1, None, None, "running"]]
    server.push(renew(documents, 1, spans=documents["state"]["spans"] | {"member-0": moved}))
    tab.wait_for_selector(f"{VIEW} [data-device='GPU-node-1-1'] [data-member=member-0]")
    assert tab.locator(f"{VIEW} [data-node='node-0'] [data-mark=piece]").count() == 0


def test_a_click_selects_and_arrow_keys_go_from_member_to_member(tab: Any, open_page: Open) -> None:
    documents = make_documents(8, gpus=0)
    place(documents, {f"member-{i}": run_on("node-0") for i in range(3)}, {"cpus": 2.0, "gpus": 0.0})
    open_page(documents, "#placement")
    tab.locator(f"{PIECE}[data-member=member-0]").click()
    tab.wait_for_function("() => location.hash.includes('select=member-0')")
    tab.wait_for_selector(f"{PIECE}[data-member=member-1].pale")
    tab.keyboard.press("ArrowRight")
    assert "member-1" in tab.locator(f"{VIEW} .tip:not(.chart .tip)").inner_text()
    tab.keyboard.press("Enter")
    tab.wait_for_function("() => location.hash.includes('select=member-0,member-1')")
    assert tab.locator(f"{PIECE}[tabindex='0']").count() == 1
