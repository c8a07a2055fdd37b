"""The view "Samples" of a real server: who sees samples, what it asks for, and what a report has of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from dashboard_process import Server, serve

sys.path.insert(0, str(Path(__file__).parents[1] / "samples"))

import known_runs

from ensemble.cli.parser import main
from ensemble.store import RunDir


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("known")
    return known_runs.run(folder / "run", known_runs.declare(known_runs.write_images(folder / "images")))


def ask(server: Server, target: str) -> tuple[int, Any]:
    status, headers, body = server.ask(f"/api/runs/{server.key}/{target}")
    assert (
        headers["content-type"].startswith("application/json") and headers["x-content-type-options"] == "nosniff"
    )
    return status, json.loads(body)


def test_a_list_and_its_records_are_of_the_same_samples(run: Path) -> None:
    with serve(run) as server:
        status, listed = ask(server, "samples?order=wrong&page=1")
        assert status == 200 and listed["missing"] is None and listed["page"] == 1
        indices = [row["index"] for row in listed["rows"]]
        address = f"records?id={listed['id']}&index={','.join(map(str, indices))}"
        status, found = ask(server, address)
        assert status == 200 and found["missing"] is None and sorted(map(int, found["records"])) == sorted(indices)
        for row in listed["rows"]:
            number = known_runs.read_number(found["records"][str(row["index"])]["fields"])
            assert float(row["prediction"]) == pytest.approx(number + 0.125, rel=1e-3)
        assert ask(server, address.replace(listed["id"], "another.test"))[0] == 409
        assert ask(server, f"records?id={listed['id']}&index=-1")[0] == 400
        assert ask(server, f"records?id={listed['id']}&index={','.join(map(str, range(25)))}")[0] == 400
        assert ask(server, "samples?order=../state")[0] == 400
        assert ask(server, f"records?id={listed['id']}&index=123456789")[1]["records"] == {}  # not predicted


def test_nobody_sees_samples_where_the_page_is_started_without_them(run: Path) -> None:
    with serve(run, "--no-samples") as server:
        for target in ("samples", "records?id=a&index=1"):
            status, found = ask(server, target)
            assert status == 403 and "--no-samples" in found["error"]


@pytest.mark.more
def test_whether_viewers_see_samples_is_said_where_the_page_is_started(run: Path) -> None:
    for options, status in (((), 403), (("--viewer-samples",), 200)):
        with serve(run, "--viewer", *options) as server:
            assert ask(server, "samples")[0] == 200
            server.log_in(server.viewer_url)
            assert ask(server, "samples")[0] == status
            assert ask(server, "records?id=a&index=1")[0] == (409 if options else 403)


def test_a_report_has_samples_only_where_they_are_asked_for(run: Path, capsys: Any) -> None:
    report = RunDir(run).report
    assert main(["report", str(run)]) == 0 and b"data:image/png;base64" not in report.read_bytes()
    assert main(["report", str(run), "--samples", "3"]) == 0
    page = report.read_text()
    documents = json.loads(page.partition('id="documents">')[2].partition("</script>")[0])
    worst = documents["samples"]["wrong"]
    assert [len(each["rows"]) for each in documents["samples"].values()] == [3, 0, 3]
    for row in worst["rows"]:
        fields = worst["records"]["records"][str(row["index"])]["fields"]
        assert float(row["prediction"]) == pytest.approx(known_runs.read_number(fields) + 0.125, rel=1e-3)
    assert main(["verify", str(run)]) == 0
    assert main(["report", str(run)]) == 0 and b"data:image/png;base64" not in report.read_bytes()


@pytest.fixture(scope="module")
def classified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classified")
    return known_runs.run(folder / "run", known_runs.declare_classes(known_runs.write_images(folder / "images")))


def list_numbers(tab: Any) -> list[int]:
    """The numbers in the pictures that are drawn."""
    view = "document.querySelector('[data-view=samples]')"
    tab.wait_for_function(f"() => {view}?.querySelector('img') && !{view}.innerText.includes('being')")
    pictures = tab.eval_on_selector_all("[data-mark=sample] img", "all => all.map((each) => each.src)")
    return [round(known_runs.read_number([{"name": "image", "picture": each}])) for each in pictures]


@pytest.mark.browser
@pytest.mark.more
def test_a_cell_of_the_confusion_matrix_leads_to_its_samples(classified: Path, own_tab: Any) -> None:
    tab = own_tab
    valid = RunDir(classified).load_ensemble().valid
    assert valid is not None
    with serve(classified) as server:
        name, _, value = server.cookie.partition("=")
        tab.context.add_cookies([{"name": name, "value": value, "url": server.page}])
        tab.goto(server.page + "#ensemble")
        tab.click("a:has([data-mark='0,1'])")
        found = list_numbers(tab)
        assert found and all(each % 7 == 0 and each % 3 == 0 for each in found)
        assert "of class 0, predicted as 1" in tab.inner_text(".reading >> nth=0")
        tab.reload()
        assert list_numbers(tab) == found
        tab.select_option("select[aria-label='True class']", "")
        tab.wait_for_selector(".reading >> text=are predicted as 1")
        tab.select_option("select[aria-label='Predicted class']", "")
        tab.wait_for_selector("button >> text=Next")
        first = list_numbers(tab)
        assert len(first) == 24 and sorted(set(first)) == sorted(first)
        tab.click("button >> text=Next")
        tab.wait_for_selector("span >> text=2 of 2")
        rest = list_numbers(tab)
        assert len(first) + len(rest) == len(valid) and not set(first) & set(rest)
        tab.go_back()
        tab.wait_for_selector("span >> text=1 of 2")
        assert list_numbers(tab) == first
    report = RunDir(classified).report
    assert main(["report", str(classified), "--samples", "2"]) == 0
    tab.goto(report.as_uri() + "#samples")
    assert list_numbers(tab) == first[:2]
