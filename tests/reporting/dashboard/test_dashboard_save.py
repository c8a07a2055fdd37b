"""Figures saved as SVG and PNG, tables as CSV: what a reader gets as files."""

from __future__ import annotations

import base64
import csv
import io
import struct
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from documents import HOSTILE, make_documents
from page_steps import Open, figure, wait_until

from ensemble.reporting.tables import format_csv

SVG = "{http://www.w3.org/2000/svg}"
CELLS = [
    ["=1+1", "+a", "-3", "@x", '="a";b', "a,b", 'say "a"', "two\nlines", "\u202e\x07", "plain"],
    [0.1 + 0.2, -1e-7, 123456789012, None, 3, "", "\uff1dx", "-", " =1", "ä"],
]


def save(tab: Any, card: Any, kind: str, path: Path) -> Path:
    """Saves a card's figure or table by its menu."""
    card.locator("summary", has_text="save").click()
    with tab.expect_download() as found:
        card.get_by_role("button", name=kind, exact=True).click()
    assert found.value.suggested_filename.endswith(f".{kind.lower()}")
    found.value.save_as(path)
    return path


def test_the_page_and_the_command_write_the_same_csv_that_no_spreadsheet_runs(call: Any) -> None:
    head = ["=head", *"bcdefghij"]
    written = call("save.js", "(m, head, rows) => m.csvOf({ head, rows })", head, CELLS)
    rows = list(csv.reader(io.StringIO(written, newline="")))
    assert len(rows) == 3 and all(len(row) == 10 for row in rows)
    assert rows[1][:5] == ["'=1+1", "'+a", "'-3", "'@x", '\'="a";b'] and rows[0][0] == "'=head"
    assert rows[1][5:] == ["a,b", 'say "a"', "two\nlines", "\\u202e\\u0007", "plain"]
    assert [float(rows[2][i]) for i in (0, 1, 2, 4)] == [0.1 + 0.2, -1e-7, 123456789012, 3]
    assert rows[2][3] == "" and written.endswith("\r\n")
    ours = list(csv.reader(io.StringIO(format_csv(head, CELLS), newline="")))
    assert [[_number(cell) for cell in row] for row in ours] == [[_number(cell) for cell in row] for row in rows]


def _number(cell: str) -> Any:
    try:
        return float(cell)
    except ValueError:
        return cell


@pytest.mark.browser
@pytest.mark.more
@pytest.mark.parametrize("view", ["search", "curves"])
def test_a_saved_figure_is_whole_outside_of_the_page(
    view: str, tab: Any, open_page: Open, tmp_path: Path, browser: Any
) -> None:
    """It shows marks, axes and title, in light colours, in a program that knows nothing of the page."""
    open_page(make_documents(60, seed=2, hostile=True), f"#{view}")
    tab.emulate_media(color_scheme="dark")
    if view == "search":
        card = figure(tab, "What was pruned when")
        card.scroll_into_view_if_needed()
        wait_until(tab, lambda: int(card.locator("canvas").get_attribute("data-marks") or 0) > 50)
    else:
        card = figure(tab, "accuracy")
    ticks = card.locator(".axes text").all_text_contents()
    path = save(tab, card, "SVG", tmp_path / "figure.svg")
    wanted = int(card.locator("canvas").get_attribute("data-marks" if view == "search" else "data-count"))
    root = ET.parse(path).getroot()
    paths = [each for each in root.iter(f"{SVG}path") if each.get("d", "").startswith("M")]
    drawn = [each for each in paths if each.get("stroke-linejoin") == "round"] if view == "curves" else paths
    assert wanted <= len(drawn) <= wanted + 2, "one for each mark; beside them the clip and the legend"
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert set(ticks) <= set(texts) and texts[0] == ("What was pruned when" if view == "search" else "accuracy")
    assert root.find(f"{SVG}rect").get("fill") == "rgb(255, 255, 255)"
    assert "foreignObject" not in path.read_text() and "href" not in path.read_text()
    # Another page, which knows no style of ours, and the PNG show the same picture.
    png = save(tab, card, "PNG", tmp_path / "figure.png").read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    assert (width, height) == (2 * int(root.get("width")), 2 * int(root.get("height")))
    alone = browser.new_page(viewport={"width": width // 2, "height": height // 2}, device_scale_factor=2)
    alone.goto(path.as_uri())
    inked = """async (data) => {
        const image = new Image();
        image.src = "data:image/png;base64," + data;
        await image.decode();
        const canvas = document.createElement("canvas");
        [canvas.width, canvas.height] = [60, 40];
        const context = canvas.getContext("2d");
        context.drawImage(image, 0, 0, 60, 40);
        return [...context.getImageData(0, 0, 60, 40).data];
    }"""
    pictures = [tab.evaluate(inked, base64.b64encode(each).decode()) for each in (png, alone.screenshot())]
    alone.close()
    apart = sum(abs(a - b) for a, b in zip(*pictures, strict=True)) / len(pictures[0])
    assert apart < 2 and min(pictures[0]) < 200, "the same, and not blank"


@pytest.mark.browser
@pytest.mark.more
def test_a_table_is_saved_with_all_digits_in_the_order_and_the_columns_that_are_shown_and_of_a_selection_only_that(
    tab: Any, open_page: Open, tmp_path: Path
) -> None:
    documents = make_documents(20, hostile=True)

    def save_members() -> tuple[list[str], list[list[str]]]:
        with (save(tab, tab, "CSV", tmp_path / "members.csv")).open(newline="", encoding="utf-8") as file:
            head, *rows = csv.reader(file)
        return head, rows

    open_page(documents, "#members")
    tab.click("th[data-column='metric'] button")
    head, rows = save_members()
    members = documents["state"]["members"]
    at = {name: members["columns"].index(name) for name in ("id", "metric")}
    known = [row[at["metric"]] for row in members["rows"].values() if row[at["metric"]] is not None]
    values = [float(row[head.index("accuracy")]) for row in rows if row[head.index("accuracy")]]
    assert values == sorted(known, reverse=True) and len(rows) == 20
    names = {row[head.index("member")] for row in rows}
    assert {name for name in HOSTILE if name.isprintable()} <= names
    open_page(documents, "#members?select=member-13,member-18")
    tab.wait_for_selector(".chip:has-text('2 selected')")
    assert {row[head.index("member")] for row in save_members()[1]} == {"member-13", "member-18"}
