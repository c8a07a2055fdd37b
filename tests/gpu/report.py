"""Prints the results of `tests/gpu/run.sh` as Markdown: `python tests/gpu/report.py FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HIDDEN = ("what", "passed", "reasons", "error")


def as_markdown(results: dict[str, Any]) -> str:
    """A section for each case: a table for the rows with the same figures, and what is missing and why."""
    lines = [f"# Checks on {results['kind']}", "", f"Revision: {results['revision'] or 'unknown'}"]
    for name, case in results["cases"].items():
        seconds = f", {case['seconds']:.0f} s" if "seconds" in case else ""
        lines += ["", f"## {name}: {case['state']}{seconds}", ""]
        on = f" Device: {case['device']}." if case.get("device") else ""
        lines += [f"{case['summary'][0].upper()}{case['summary'][1:]}.{on}", ""]
        lines += [f"Absent: {case['reason']}", ""] if case.get("reason") else []
        lines += _tabulate(case.get("rows", []))
        if case.get("log"):
            lines += ["", "```", *case["log"].strip().splitlines()[-12:], "```"]
    return "\n".join(lines) + "\n"


def _tabulate(rows: list[dict[str, Any]]) -> Iterator[str]:
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(key for key in row if key not in _HIDDEN), []).append(row)
    for columns, group in groups.items():
        checked = any("passed" in row for row in group)
        heads = ["what", *(["passed"] if checked else []), *columns]
        yield "| " + " | ".join(heads) + " |"
        yield "|" + "---|" * len(heads)
        for row in group:
            yield "| " + " | ".join(_format(row.get(head)) for head in heads) + " |"
        yield ""
    yield from _missing(rows)


def _missing(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Errors, and the reasons of figures that are missing, each once."""
    yield from (f"- {row['what']}: {row['error']}" for row in rows if "error" in row)
    reasons: dict[str, set[str]] = {}
    for row in rows:
        for figure, reason in row.get("reasons", {}).items():
            reasons.setdefault(reason, set()).add(figure)
    yield from (f"- missing, {reason}: {', '.join(sorted(figures))}" for reason, figures in reasons.items())


def _format(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, list):
        return ", ".join(map(_format, value))
    return str(value).replace("|", "\\|")


if __name__ == "__main__":
    print(as_markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), end="")
