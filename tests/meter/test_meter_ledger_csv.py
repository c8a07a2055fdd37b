"""The ledger's rows as a table: each view sums to the total exactly, however it is cut."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

from kit.event_dicts import ledger

from ensemble.meter import Ledger
from ensemble.meter.energy_allocator import METHODS
from ensemble.meter.ledger import COLUMNS, KINDS

Event = dict[str, Any]


def a_run() -> Ledger:
    """Two members on one node with a feeder, whose processors and GPU are metered, with their idle power."""
    node = {"v": 2, "t": 0.0, "type": "node", "node": "n", "cpus": 4, "gpu_ids": ["GPU-a"]}
    events: list[Event] = [{"v": 2, "t": 0.0, "type": "run_started"}, node]
    for number in (0, 1):
        who = {"v": 2, "t": 0.0, "member": f"member-{number}", "node": "n"}
        events.append(who | {"type": "member", "cpus_per_worker": 1.0, "gpus_per_worker": 0.3})
        events.append(who | {"type": "placed", "attempt": 0, "cohort": 0, "devices": ["GPU-a"]})
    for second in (1.0, 2.0):
        usage = {"v": 2, "t": second, "type": "usage", "node": "n", "rank": 0, "origin": "measured"}
        for pid, (role, member) in enumerate((("train", "member-0"), ("train", "member-1"), ("feed", None))):
            more = {"gpu_busy_s": 0.3 * second * (pid + 1)} if member else {"cohort": 0}
            fields = {"role": role, "member": member, "pid": pid, "cpu_s": second * (0.1 + 0.3 * pid)}
            events.append(usage | fields | more)
        metered = (("cpu", None, 33.3, 10.1), ("gpu", "GPU-a", 77.7, 20.2))
        parts = [
            {"name": kind, "kind": kind, "device": gpu, "energy_j": used_j, "idle_j": idle_j, "origin": "measured"}
            for kind, gpu, used_j, idle_j in metered
        ]
        power = {
            "v": 2,
            "t": second,
            "type": "power",
            "node": "n",
            "interval_s": 1.0,
            "busy_s": 3.0,
            "parts": parts,
        }
        events.append(power | {"energy_j": 111.0, "watts": 111.0, "origin": "measured", "source": "RAPL"})
    shared = {"v": 2, "t": 2.0, "type": "epoch", "epoch": 0, "samples": 100, "shared_batches": 10}
    return ledger([*events, *(shared | {"member": f"member-{number}"} for number in (0, 1))])


def test_each_column_is_documented() -> None:
    page = Path(__file__).parents[2] / "docs" / "concepts" / "accounting.md"
    documented = page.read_text().split("`ledger.csv` has")[1]
    table = documented.split("| column | |")[1].split("Numbers have")[0]
    cells = [line.split("|")[1] for line in table.strip().splitlines()]
    assert [name for cell in cells for name in re.findall(r"`(\w+)`", cell)] == list(COLUMNS)


def read(book: Ledger) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(book.as_csv())))


def test_each_view_has_a_line_for_each_row_that_says_the_same() -> None:
    book = a_run()
    lines = read(book)
    rows = [("direct", row) for row in book.rows] + [("full", row) for row in book.full_rows]
    assert len(lines) == len(rows) > 8
    for line, (view, row) in zip(lines, rows, strict=True):
        assert list(line) == list(COLUMNS)
        assert (line["view"], line["role"], line["member"]) == (view, row.role, row.member or "")
        assert (line["node"], line["cohort"]) == (row.node, "" if row.cohort is None else str(row.cohort))
        assert (line["cpu_origin"], line["origin"]) == (row.cpu_origin, row.origin)
        for name, value in (("cpu_s", row.cpu_s), ("energy_j", row.energy_j), ("gpu_s", row.gpu_s)):
            assert line[name] == ("" if value is None else repr(value)), "with all digits"


def test_the_parts_of_each_line_and_the_lines_of_each_view_sum_to_the_whole_exactly() -> None:
    book = a_run()
    lines = read(book)

    def total(of: list[dict[str, str]], *names: str) -> float:
        return sum(float(line[name] or 0) for line in of for name in names)

    for line in lines:
        kinds, methods = [f"{kind}_j" for kind in KINDS], [f"by_{method}_j" for method in METHODS]
        assert total([line], *kinds) == total([line], *methods) == total([line], "energy_j")
    used = {name for line in lines for name, value in line.items() if value}
    assert {"cpu_j", "gpu_j", "by_reservation_j", "by_cpu_time_j", "by_busy_time_j", "cohort"} <= used
    for view in ("direct", "full"):
        of_view = [line for line in lines if line["view"] == view]
        assert total(of_view, "energy_j") == book.total.energy_j == 222.0
        assert total(of_view, "cpu_s") == book.total.cpu_s
