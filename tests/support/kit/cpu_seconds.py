"""CPU-seconds of every test, of its whole process tree: what decides in which tier a test belongs.

`make test-seconds` runs both tiers with `CPU_SECONDS=FOLDER`, where each process that runs tests writes a file;
then `python tests/support/kit/cpu_seconds.py FOLDER` rewrites test-cpu-seconds.csv and the tables of test.md.

Of its own process and of children that have ended, the kernel's counts (`getrusage`) are taken; of descendants
that still run, those of /proc. What a process left behind that nobody waited for is missing; what a fixture of a
module costs counts for the test that uses it first.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

TIERS = ("test", "test-more", "test-all", "chaos")
MARKED = {"chaos": "chaos", "slow": "test-all", "more": "test-more"}  # the dearest mark of a test decides
KINDS = ("one process", "processes", "ray", "browser")
HOW_TO = Path(__file__).resolve().parents[3] / "docs" / "how-to"
BEGIN, END = "<!-- written by `make test-seconds` -->", "<!-- until here -->"


def tree_cpu_s() -> tuple[float, float]:
    """CPU-seconds up to now of this process, and of all its descendants."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    below = ended.ru_utime + ended.ru_stime
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        below += times.user + times.system + times.children_user + times.children_system
    return own.ru_utime + own.ru_stime, below


class Measure:
    """Writes a row for each test that this process runs."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        own, below = tree_cpu_s()
        result = yield
        own_after, below_after = tree_cpu_s()
        marks = {mark.name for mark in item.iter_markers()}
        spent = {"own_s": own_after - own, "below_s": max(0.0, below_after - below)}
        self._file.write(json.dumps({"test": item.nodeid, **describe(marks, spent["below_s"]), **spent}) + "\n")
        return result


def describe(marks: set[str], below_s: float) -> dict[str, str]:
    """The tier and the kind of a test."""
    tier = next((tier for mark, tier in MARKED.items() if mark in marks), "test")
    kind = next((kind for kind in ("ray", "browser") if kind in marks), None)
    return {"tier": tier, "kind": kind or ("processes" if below_s > 0.02 else "one process")}


def add_up(rows: list[dict[str, Any]], *keys: str) -> dict[tuple[str, ...], tuple[int, float]]:
    """For each combination of what is in the keys: how many tests, how many CPU-seconds."""
    sums: dict[tuple[str, ...], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for row in rows:
        key = tuple(row[name] for name in keys)
        sums[key] = sums[key][0] + 1, sums[key][1] + row["cpu_s"]
    return sums


def make_table(rows: list[dict[str, Any]], by: str, names: list[str]) -> str:
    """Tests and CPU-seconds of each tier, in Markdown."""
    sums = add_up(rows, by, "tier")
    tiers = [tier for tier in TIERS if any(key[1] == tier for key in sums)]
    lines = [f"| {by} | " + " | ".join(f"`make {tier}`: tests, CPU-s" for tier in tiers) + " |"]
    lines.append("|---" * (len(tiers) + 1) + "|")
    for name in [*names, "all"]:
        cells = []
        for tier in tiers:
            figures = [value for key, value in sums.items() if key[1] == tier and name in (key[0], "all")]
            tests, cpu_s = sum(figure[0] for figure in figures), sum(figure[1] for figure in figures)
            cells.append(f"{tests:,}, {cpu_s:,.0f}" if tests else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """A row for each test that was measured, with its function and its folder."""
    rows = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.open()]
    for row in rows:
        row["cpu_s"] = row["own_s"] + row["below_s"]
        row["folder"] = "/".join(row["test"].split("::")[0].split("/")[:-1])
        row["function"] = row["test"].split("[")[0]
    return rows


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """A row for each test function."""
    functions = add_up(rows, "function", "kind", "tier")
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("test", "kind", "tier", "cases", "cpu_s"))
        writer.writerows((*key, cases, f"{cpu_s:.2f}") for key, (cases, cpu_s) in sorted(functions.items()))


def write_tables(rows: list[dict[str, Any]], page: Path) -> None:
    """The tables of the page, between its two marks."""
    kinds = make_table(rows, "kind", [kind for kind in KINDS if any(row["kind"] == kind for row in rows)])
    folders = make_table(rows, "folder", sorted({row["folder"] for row in rows}))
    before, _, following = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(
        f"{before}{BEGIN}\n\n{kinds}\n\n{folders}\n\n{END}{following.partition(END)[2]}", encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="rewrite the CPU-seconds of tests in docs/how-to")
    parser.add_argument("folder", type=Path, help="where tests have written their rows")
    options = parser.parse_args()
    if not (rows := read_rows(options.folder)):
        parser.error(f"{options.folder} holds no *.jsonl: `CPU_SECONDS={options.folder} make test` writes them")
    write_csv(rows, HOW_TO / "test-cpu-seconds.csv")
    write_tables(rows, HOW_TO / "test.md")


if __name__ == "__main__":
    main()
