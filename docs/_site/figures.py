"""Figures on pages, which are made from what the studies have measured.

`docs/studies/figures/NAME.json` is a record: a command, the machine, the seconds and the rows. A page shows it
between a comment and `<!-- end -->`; `python docs/_site/figures.py` writes what is between:

    <!-- claims RECORD -->                                      what the paper claims beside what was measured
    <!-- table RECORD KEY=VALUE ...: FIELD; FIELD as HEADING -->           a line for each row with these values
    <!-- pivot RECORD KEY=VALUE ...: FIELD across FIELD of FIELD -->       a line, and a column, for each value
    <!-- text RECORD: It takes {KEY=VALUE ...: FIELD} s, {KEY=VALUE ...: FIELD / KEY=VALUE ...: FIELD} times
    as long, by {command}. -->                         sentences with a value, or the ratio of two, of one row each
    <!-- given -->                         what a study is set to, and what papers say; it is kept as it stands

Elsewhere on such a page in docs/studies no figure may stand: no number with a decimal point or before a unit, and
no cell of a table that is only numbers. Code (options, what a command prints), links and headings may have any. So
a page has no figure that no command can make again. KEY=None finds the rows without it.

`python -m benchmarks STUDY ... --record docs/studies/figures/NAME.json` runs a study and keeps what it measured.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

STUDIES = Path(__file__).resolve().parents[1] / "studies"
RECORDS = STUDIES / "figures"
END = "<!-- end -->"
BLOCK = re.compile(
    rf"^<!-- (?:(claims|table|pivot|text) ([\w-]+)(.*?)|given) -->\n.*?^{END}$", re.MULTILINE | re.DOTALL
)
_CLAIMS = "claim; published; measured; ratio; spread; loses as where it loses"
_UNITS = r"%|times\b|x\b|points\b|(?:CPU-)?(?:milli|micro)?seconds?\b|minutes?\b|min\b|hours?\b|[\w-]+/s\b"
_UNITS += r"|[kMGTmnµ]?(?:s|h|W|Wh|J|B)\b|[KMG]iB\b|bytes\b"
_NUMBER = r"\d+(?:,\d{3})*"
_FIGURE = re.compile(
    rf"(?<![\w.,^])(?<!\w-)(?:{_NUMBER}\.\d+|{_NUMBER}(?=\s?(?:{_UNITS}))|(?<=\| ){_NUMBER}(?=[^|A-Za-z]*\|))"
)
_NOT_PROSE = re.compile(r"^```.*?^```$|^#+ [^\n]*|`[^`]*`|\[[^\]]*\]\([^)]*\)", re.MULTILINE | re.DOTALL)
Row = Mapping[str, Any]


def read_record(name: str) -> dict[str, Any]:
    """A record by its name."""
    record: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def write_figures(page: str) -> str:
    """A page with what its comments ask for."""
    return BLOCK.sub(lambda block: block[0] if block[1] is None else _write(block), page)


def _write(block: re.Match[str]) -> str:
    made = _make(*block.groups())
    return f"<!-- {block[1]} {block[2]}{block[3]} -->\n{made}\n{END}"


def _make(kind: str, name: str, asked: str) -> str:
    record = read_record(name)
    if kind == "text":
        sentences = asked.removeprefix(":").strip()
        return f"\n{re.sub(r'{([^}]*)}', lambda found: _fill(record, ' '.join(found[1].split())), sentences)}\n"
    given, _, columns = asked.partition(":")
    if kind == "claims":
        given, columns = "part=claim", _CLAIMS
    rows = _find_rows(record, given)
    made = _pivot(rows, columns) if kind == "pivot" else _tabulate(rows, columns)
    minutes = f"{record['seconds'] / 60:.0f} min" if record["seconds"] >= 90 else f"{record['seconds']:.0f} s"
    return "\n".join(["", *made, "", f"`{record['command']}`: {minutes} on {record['machine']}", ""])


def _find_rows(record: Mapping[str, Any], given: str) -> list[Row]:
    """The rows with these values, at least one."""
    wanted = dict(each.split("=", 1) for each in shlex.split(given))
    rows = [row for row in record["rows"] if all(str(row.get(key)) == value for key, value in wanted.items())]
    if not rows:
        raise ValueError(f"no row of `{record['command']}` has {given.strip()}")
    return rows


def _fill(record: Mapping[str, Any], asked: str) -> str:
    """What stands in braces, as text."""
    if ":" not in asked:
        return str(record[asked])
    found = []
    for given, _, field in (each.partition(":") for each in asked.split(" / ")):
        rows = _find_rows(record, given)
        if len(rows) > 1:
            raise ValueError(f"{len(rows)} rows of `{record['command']}` have {given.strip()}: say of which one")
        found.append((rows[0], field.strip()))
    if len(found) == 1:
        return _show(*found[0])
    (over, field), (under, other) = found
    return format_value(float(over[field] / under[other]))


def _tabulate(rows: Sequence[Row], columns: str) -> list[str]:
    named = [each.strip().partition(" as ") for each in columns.split(";")]
    lines = ([_show(row, field) for field, _, _ in named] for row in rows)
    return _lay_out([heading or field.replace("_", " ") for field, _, heading in named], lines)


def _pivot(rows: Sequence[Row], columns: str) -> list[str]:
    match = re.fullmatch(r"\s*(\S+) across (\S+) of (\S+)\s*", columns)
    if match is None:
        raise ValueError(f"not FIELD across FIELD of FIELD: {columns}")
    down, across, of = match.groups()
    heads = list(dict.fromkeys(_show(row, across) for row in rows))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        line, head = cells.setdefault(_show(row, down), {}), _show(row, across)
        if head in line:
            raise ValueError(f"several rows have {down} {_show(row, down)} and {across} {head}: say which")
        line[head] = _show(row, of)
    lines = ([name, *(found.get(head, "") for head in heads)] for name, found in cells.items())
    return _lay_out([f"{down.replace('_', ' ')} \\ {across.replace('_', ' ')}", *heads], lines)


def _lay_out(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in (heads, *lines))
    head, *body = [f"| {' | '.join(line)} |" for line in escaped]
    return [head, "|" + "---|" * len(heads), *body]


def _show(row: Row, field: str) -> str:
    """A value as text: an interval as mean ± half, a spread as median (least to most)."""
    if field not in row:
        raise ValueError(f"there is no {field} in {sorted(row)}")
    value, low, high = row[field], row.get(f"{field}_low"), row.get(f"{field}_high")
    if field.endswith("bps") and value is not None:
        return f"{format_value(value / 1e9)} Gbit/s"
    if value is None or low is None or high is None:
        return format_value(value)
    digits = _count_digits(max(abs(value), abs(high - low)))
    if abs((low + high) / 2 - value) <= 1e-9 * max(1.0, abs(value)):
        return f"{value:,.{digits}f} ± {(high - low) / 2:,.{digits}f}"
    return f"{value:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def format_value(value: Any) -> str:
    """A value of a row as text; a float with three digits at least."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{_count_digits(abs(value))}f}"


def _count_digits(size: float) -> int:
    """Of three significant digits those after the point."""
    return 0 if size == 0 else next((digits for digits, least in enumerate((100, 10, 1, 0.1)) if size >= least), 4)


# --- the check -------------------------------------------------------------------------------------------------


def find_figures(page: str) -> list[str]:
    """Figures that stand outside of the blocks, where no record holds them."""
    return _FIGURE.findall(_NOT_PROSE.sub("", BLOCK.sub("", page)))


def pages() -> list[Path]:
    """The pages of studies, and the one at the top of the repository."""
    return [*sorted(STUDIES.glob("*.md")), STUDIES.parents[1] / "README.md"]


if __name__ == "__main__":
    for path in pages():
        path.write_text(write_figures(path.read_text(encoding="utf-8")), encoding="utf-8")
