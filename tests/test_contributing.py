"""The map and the walks of CONTRIBUTING.md lead to what is there."""

from __future__ import annotations

import ast
import csv
import json
import re
from pathlib import Path

import pytest
from kit import cpu_seconds
from kit.extensions import read_extensions, read_packages

from ensemble import extend

ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    assert found is not None, f"CONTRIBUTING.md has no section {title!r}"
    return found[1]


def read_map(package: str) -> dict[tuple[str, ...], str]:
    """The rows of a package's map: files and folders, and whether they are the core or plug in by which seams."""
    table = section("The map").partition(f"| `{package}/` | |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    return {tuple(re.findall(r"`([\w./]+)`", paths)): seams for paths, _, seams in cells}


@pytest.mark.parametrize("package", ["ensemble", "pipelines"])
def test_the_map_has_every_folder_and_says_what_is_core_and_what_plugs_in_by_which_seam(package: str) -> None:
    extensions = list(read_extensions().values())
    expected = {}
    for paths in read_map(package):
        seams = set()
        files = [file for path in paths for file in read_packages() if file.startswith(f"{package}/{path}")]
        for file in files:
            owners = [extension for extension in extensions if extension.has(file)]
            is_code = len(read_packages()[file].splitlines()) > 1
            seams |= {owners[0].seam.partition(":")[0]} if owners else {"core"} if is_code else set()
        expected[paths] = ", ".join(sorted(seams, key=lambda seam: (seam != "core", seam)))
    assert read_map(package) == expected
    folders = {f"{path.parent.name}/" for path in (ROOT / package).glob("*/__init__.py")}
    named = {path for paths in read_map(package) for path in paths}
    assert {name for name in named if name.endswith("/")} == folders
    assert [name for name in named if not (ROOT / package / name).exists()] == []


def definitions(file: Path) -> set[str]:
    """Functions, classes and methods of a file, methods as `Class.method`."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, FUNCTIONS)}
    return found


def test_each_step_of_a_walk_is_a_function_that_is_there() -> None:
    for walk in ("A sample's way", "A member's way", "An event's way"):
        text = section("Three walks").partition(f"**{walk}**")[2].partition("\n**")[0]
        steps = re.findall(r"^\d+\. `([\w.]+)` in `([\w/]+\.py)`", text, re.M)
        assert 8 <= len(steps) <= 15, "a walk has at most fifteen lines"
        assert len(steps) == len(re.findall(r"^\d+\. ", text, re.M)), "each line names a function and its file"
        assert [f"{file}: {name}" for name, file in steps if name not in definitions(ROOT / file)] == []


def test_the_cpu_seconds_are_those_of_todays_tests() -> None:
    """A file whose tests were renamed since by a tenth is too old to decide by: `make test-seconds` makes it."""
    with (ROOT / "docs" / "how-to" / "test-cpu-seconds.csv").open(newline="") as file:
        measured = {row["test"] for row in csv.DictReader(file)}
    tests = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("tests/gpu/"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            marks = " ".join(ast.unparse(mark) for mark in getattr(node, "decorator_list", []))
            is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            if is_test and not re.search(r"pytest\.mark\.(slow|chaos)\b", marks):
                tests.add(f"{name}::{node.name}")
    assert len(tests - measured) < len(tests) / 10, sorted(tests - measured)[:20]
    assert len(measured - tests) < len(measured) / 10, sorted(measured - tests)[:20]


def test_cpu_seconds_are_written_where_the_page_has_its_marks(tmp_path: Path) -> None:
    spent = {"kind": "ray", "tier": "test-more", "own_s": 1.0, "below_s": 2.5}
    (tmp_path / "1.jsonl").write_text(
        "".join(json.dumps({"test": f"tests/ray/test_a.py::test_b[{case}]", **spent}) + "\n" for case in "xy")
    )
    rows, page = cpu_seconds.read_rows(tmp_path), tmp_path / "page.md"
    page.write_text(f"before\n{cpu_seconds.BEGIN}\nstale\n{cpu_seconds.END}\nafter\n")
    cpu_seconds.write_tables(rows, page)
    cpu_seconds.write_csv(rows, tmp_path / "rows.csv")
    text = page.read_text()
    assert "| tests/ray | 2, 7 |" in text and "| ray | 2, 7 |" in text and "stale" not in text
    assert text.startswith("before\n") and text.endswith(f"{cpu_seconds.END}\nafter\n")
    assert (tmp_path / "rows.csv").read_text().endswith("\ntests/ray/test_a.py::test_b,ray,test-more,2,7.00\n")


def test_each_test_that_is_named_as_a_guard_is_there_and_in_the_first_tier() -> None:
    text = (ROOT / "docs" / "how-to" / "test.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert len(named) > 15
    for file, name in named:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        body = ast.parse(source).body
        (found,) = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
        marks = [ast.unparse(each) for each in found.decorator_list]
        marks += re.findall(r"^pytestmark = \[?(.*)", source, re.M)
        dear = [mark for mark in marks if re.match(r"pytest\.mark\.(more|slow|chaos)\b", mark)]
        assert dear == [], f"{file}::{name}"


def test_every_table_of_the_packages_is_listed() -> None:
    made = re.compile(r"^(\w+) = Providers\(\s*\"(\w+)\"", re.MULTILINE)
    tables = [(kind, name) for text in read_packages().values() for name, kind in made.findall(text)]
    assert dict(tables).keys() == extend.TABLES.keys()
    assert [table.kind for table in extend.list_tables()] == list(extend.TABLES)


def test_all_of_ours_can_be_loaded_and_what_it_exports_imported() -> None:
    for table in extend.list_tables():
        assert all(provider.load() is not None for provider in table.list_providers())
    for name in extend.__all__:
        assert getattr(extend, name) is not None
    with pytest.raises(AttributeError, match="Sorce"):
        extend.Sorce  # noqa: B018


def test_the_page_has_the_group_of_every_table() -> None:
    page = (ROOT / "docs" / "how-to" / "write-an-extension.md").read_text(encoding="utf-8")
    assert {f"ray_ensemble.{kind}" for kind in extend.TABLES} == set(
        re.findall(r"^\| `([\w.]+)`", page, re.MULTILINE)
    )
