"""Lines are a decision: rooms, files and functions stay within the limits that CONTRIBUTING.md lists.

`python tests/test_budgets.py` prints its table with the figures of today.
"""

from __future__ import annotations

import ast
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
    top = {"JavaScript": (ROOT / "ensemble").rglob("*.js"), "ensemble/*.py": (ROOT / "ensemble").glob("*.py")}
    return sum(map(count_lines, top[room] if room in top else python_files(room)))


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


def test_no_file_is_longer_than_400_lines_and_no_function_than_80() -> None:
    too_long = []
    for file in python_files(*PACKAGES):
        if count_lines(file) > LONGEST_FILE:
            too_long.append(f"{file.relative_to(ROOT)}: {count_lines(file)}")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                too_long += [f"{file.relative_to(ROOT)}:{node.name}: {lines}"] * (lines > LONGEST_FUNCTION)
    assert too_long == []


if __name__ == "__main__":
    for room, (budget, _) in ROOMS.items():
        lines = count_room(room)
        print(f"| `{room}` | {int(budget):,} | {f'{lines:,}' if lines > int(budget) else ''} |")
