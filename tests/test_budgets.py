"""Lines are a decision: rooms, files and functions stay within the limits that CONTRIBUTING.md lists.

`python tests/test_budgets.py` prints its table with the figures of today.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
LONGEST_FILE = 400
LONGEST_FUNCTION = 80
PACKAGES = ("ensemble", "pipelines", "benchmarks")
SLACK = 1.02  # a limit that is higher than the real figure by more than this factor is out of date


def count_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def python_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def count_room(room: str) -> int:
    """Lines of a room: Python of a folder, of the files at the top of `ensemble/`, or the page's JavaScript."""
    if room == "JavaScript":
        return sum(count_lines(file) for file in (ROOT / "ensemble").rglob("*.js"))
    if room == "ensemble/*.py":
        return sum(count_lines(file) for file in (ROOT / "ensemble").glob("*.py"))
    return sum(count_lines(file) for file in python_files(room))


def functions_of(file: Path) -> Iterator[tuple[str, int]]:
    """Name and length of each function and method of a file, methods as `Class.method`."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{prefix}{child.name}", (child.end_lineno or 0) - child.lineno + 1
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)

    yield from walk(ast.parse(file.read_text(encoding="utf-8")), "")


def read_rooms() -> dict[str, list[str]]:
    """The table of the section on budgets: each room's budget, and what it has for now."""
    section = CONTRIBUTING.read_text(encoding="utf-8").partition("## Budgets of lines\n")[2].partition("\n## ")[0]
    cells = [
        [cell.strip().replace("`", "").replace(",", "") for cell in row.strip("|").split("|")]
        for row in section.splitlines()
        if row.startswith("| `")
    ]
    return {first: others for first, *others in cells}


ROOMS = read_rooms()


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_no_more_lines_than_its_budget_or_what_it_has_for_now(room: str) -> None:
    budget, for_now = ROOMS[room]
    lines = count_room(room)
    allowed = int(for_now or budget)
    assert lines <= allowed, f"{room} has {lines:,} lines, allowed are {allowed:,}: take something out first"
    if for_now:
        assert lines * SLACK > allowed, f"{room} became smaller: CONTRIBUTING.md may say {lines:,}"
        assert allowed > int(budget), f"{room} is within its budget: its last cell in CONTRIBUTING.md is empty"


def test_every_folder_has_a_budget() -> None:
    folders = {f"ensemble/{path.parent.name}" for path in (ROOT / "ensemble").glob("*/__init__.py")}
    assert set(ROOMS) == folders | {"ensemble/*.py", "pipelines", "benchmarks", "tests", "JavaScript"}


def test_no_file_is_longer_than_400_lines() -> None:
    files = {str(file.relative_to(ROOT)): count_lines(file) for file in python_files(*PACKAGES)}
    assert {name: lines for name, lines in files.items() if lines > LONGEST_FILE} == {}


def test_no_function_is_longer_than_80_lines() -> None:
    functions = {
        f"{file.relative_to(ROOT)}:{name}": lines
        for file in python_files(*PACKAGES)
        for name, lines in functions_of(file)
    }
    assert {name: lines for name, lines in functions.items() if lines > LONGEST_FUNCTION} == {}


def print_table() -> None:
    for room, (budget, _) in ROOMS.items():
        lines = count_room(room)
        print(f"| `{room}` | {int(budget):,} | {f'{lines:,}' if lines > int(budget) else ''} |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit("usage: python tests/test_budgets.py")
    print_table()
