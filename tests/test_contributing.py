"""The map and the walks of CONTRIBUTING.md lead to what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import cpu_seconds
import pytest

ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text below a heading, up to the next heading of that depth."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    assert found is not None, f"CONTRIBUTING.md has no section {title!r}"
    return found[1]


def named_in_map(package: str) -> set[str]:
    table = section("The map").partition(f"| `{package}/` |")[2].partition("\n\n")[0]
    return {
        name
        for row in table.splitlines()
        for name in re.findall(r"`([\w./]+)`", row.partition("|")[2].split("|")[0])
    }


@pytest.mark.parametrize("package", ["ensemble", "pipelines"])
def test_the_map_has_every_folder_and_nothing_else(package: str) -> None:
    folders = {f"{path.parent.name}/" for path in (ROOT / package).glob("*/__init__.py")}
    named = named_in_map(package)
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


@pytest.mark.parametrize("walk", ["A sample's way", "A member's way", "An event's way"])
def test_each_step_of_a_walk_is_a_function_that_is_there(walk: str) -> None:
    text = section("Three walks").partition(f"**{walk}**")[2].partition("\n**")[0]
    steps = re.findall(r"^\d+\. `([\w.]+)` in `([\w/]+\.py)`", text, re.M)
    assert 8 <= len(steps) <= 15, "a walk has at most fifteen lines"
    assert len(steps) == len(re.findall(r"^\d+\. ", text, re.M)), "each line names a function and its file"
    missing = [f"{file}: {name}" for name, file in steps if name not in definitions(ROOT / file)]
    assert missing == []


def test_a_folder_without_cpu_seconds_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["cpu_seconds.py", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cpu_seconds.main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.endswith(f"{tmp_path} holds no *.jsonl: `CPU_SECONDS={tmp_path} make test` writes them\n")


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
