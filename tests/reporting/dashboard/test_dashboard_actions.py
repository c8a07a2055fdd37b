"""What the page asks of a run: after a question where it cannot be taken back, and with the answer shown."""

from __future__ import annotations

from typing import Any

import pytest
from documents import make_change, make_documents, renew
from page_server import PageServer
from page_steps import Open, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.more]


def posted(tab: Any, server: PageServer, count: int = 1) -> list[dict[str, Any]]:
    wait_until(tab, lambda: len(server.posted) == count)
    return server.posted


def press(tab: Any, name: str) -> None:
    tab.get_by_role("button", name=name, exact=True).click()


def test_stop_asks_first_may_be_at_once_and_is_said_until_it_has(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(8), "#overview?select=member-1")
    wait_until(tab, lambda: server.followers("run") == 1)
    press(tab, "Stop the run …")
    press(tab, "Back")
    focused = "() => document.activeElement.textContent"
    tab.get_by_role("button", name="Stop the run …").focus()
    tab.keyboard.press("Enter")
    tab.wait_for_selector("dialog[open]")
    assert tab.evaluate(focused) == "Back"
    tab.keyboard.press("Escape")
    tab.wait_for_selector("dialog", state="detached")
    assert tab.evaluate(focused) == "Stop the run …" and server.posted == []
    assert "select=member-1" in tab.url, "the key was the dialog's"
    press(tab, "Stop the run …")
    press(tab, "Stop the run")
    assert posted(tab, server) == [{"verb": "stop"}]
    tab.wait_for_selector("header >> text=stopping …")
    change = make_change(server.documents, 1)
    run = change["state"]["run"]
    run |= {"state": {"word": "stopped", "tone": "warn"}, "ended": change["state"]["now"], "actions": []}
    server.push(change)
    tab.wait_for_selector("header >> text=stopping …", state="detached")
    hint = tab.wait_for_selector("[data-mark=resume]")
    assert hint.inner_text() == f"To go on: ensemble resume {run['dir']}"
    open_page(make_documents(8))
    press(tab, "Stop the run …")
    tab.check("dialog input[type=checkbox]")
    press(tab, "Stop the run")
    assert posted(tab, server) == [{"verb": "stop", "at_once": True}]


def test_a_member_is_paused_resumed_and_cancelled_and_the_answer_is_heard(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(8), "#member?member=member-1")
    wait_until(tab, lambda: server.followers("run") == 1)
    live = "[aria-live=polite]"  # where screen readers hear it
    press(tab, "Pause")
    assert posted(tab, server) == [{"verb": "pause", "member": "member-1"}]
    tab.wait_for_selector(f"{live} >> text=Sent: pause member-1.")
    answer = {"request": "request-1", "verb": "pause", "member": "member-1", "done": False}
    answer |= {"message": "it <b>ended</b>"}
    others = {**answer, "request": "of-somebody-else", "message": "not ours"}
    server.push(renew(server.documents, 1, answers=[others, answer]))
    told = tab.wait_for_selector(f"{live} >> text=pause member-1: refused, it <b>ended</b>")
    assert "bad" in told.get_attribute("class") and "not ours" not in tab.text_content(live)
    press(tab, "Cancel …")
    assert "ends for good" in tab.text_content("dialog")
    press(tab, "Cancel member-1")
    assert posted(tab, server, 2)[-1] == {"verb": "cancel", "member": "member-1"}
    tab.evaluate("() => { location.hash = 'member?member=member-5'; }")
    press(tab, "Resume")
    assert posted(tab, server, 3)[-1] == {"verb": "resume", "member": "member-5"}
    server.refusal = (409, "the run has ended")
    tab.evaluate("() => { location.hash = 'member?member=member-7'; }")
    press(tab, "Pause")
    tab.wait_for_selector("text=pause member-7: not done, the run has ended")


def test_the_selected_members_are_paused_together(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(8), "#members?select=member-1,member-3,member-7")
    wait_until(tab, lambda: server.followers("run") == 1)
    press(tab, "Pause 2 …")  # one of the three has failed
    press(tab, "Back")
    press(tab, "Pause 2 …")
    press(tab, "Pause 2 members")
    [asked] = posted(tab, server)
    assert (asked["verb"], sorted(asked["members"])) == ("pause", ["member-1", "member-7"])
    said = "pausing 1 of 2; member-7 has ended already (finished)"
    answer = {"request": "request-1", "verb": "pause", "member": None, "done": True, "message": said}
    server.push(renew(server.documents, 1, answers=[answer]))
    tab.wait_for_selector(f"[aria-live=polite] >> text=pause 2 members: {said}")


def test_a_clone_sends_only_what_was_changed_and_needs_every_value(tab: Any, open_page: Open) -> None:
    documents = make_documents(8)
    server = open_page(documents, "#member?member=member-2")  # it waits: nothing to start from
    press(tab, "Clone with changes …")
    assert tab.is_disabled("dialog input[value='warm']")
    tab.fill("dialog input[name='lr']", " ")
    press(tab, "Add the clone")
    assert tab.text_content("dialog [role=alert]") == "lr needs a value."
    tab.fill("dialog input[name='lr']", "0.5")
    press(tab, "Add the clone")
    assert posted(tab, server) == [{"verb": "add", "from": "member-2", "warm": False, "params": {"lr": 0.5}}]
    open_page(documents, "#member?member=member-3")
    press(tab, "Clone with changes …")
    members = documents["state"]["members"]
    params = members["rows"]["member-3"][members["columns"].index("params")]
    shown = {name: tab.input_value(f"dialog input[name='{name}']") for name in params}
    assert shown == {name: str(value) for name, value in params.items()}
    tab.fill("dialog input[name='lr']", "1e-3")
    tab.fill("dialog input[name='optimizer']", "adam")
    tab.check("dialog input[value='warm']")
    press(tab, "Add the clone")
    wanted = {"verb": "add", "from": "member-3", "warm": True, "params": {"lr": 0.001, "optimizer": "adam"}}
    assert posted(tab, server) == [wanted]


def test_a_refused_clone_keeps_what_was_typed_and_the_refusal_stays_to_be_read(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(8), "#member?member=member-3")
    wait_until(tab, lambda: server.followers("run") == 1)
    press(tab, "Clone with changes …")
    tab.fill("dialog input[name='lr']", "-1")
    server.refusal = (409, "not yet")
    press(tab, "Add the clone")
    tab.wait_for_selector("dialog [role=alert] >> text=Not added: not yet")
    server.refusal = None
    press(tab, "Add the clone")
    tab.wait_for_selector("dialog [role=status] >> text=not answered yet")
    answer = {"request": "request-2", "verb": "add", "member": None, "done": False}
    server.push(renew(server.documents, 1, answers=[answer | {"message": "lr must be positive"}]))
    tab.wait_for_selector("dialog [role=alert] >> text=lr must be positive")
    assert tab.input_value("dialog input[name='lr']") == "-1"
    tab.fill("dialog input[name='lr']", "1")
    press(tab, "Add the clone")
    posted(tab, server, 3)
    done = answer | {"request": "request-3", "done": True, "message": "added"}
    server.push(renew(server.documents, 2, answers=[done]))
    tab.wait_for_selector("dialog", state="detached")
    tab.click("nav a >> text=Notices")
    tab.wait_for_selector("[data-mark=notice] >> text=lr must be positive")
