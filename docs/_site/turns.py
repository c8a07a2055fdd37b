"""Draws which run held a cluster when, for the page about sharing one.

`python docs/_site/turns.py BEFORE=RUN_DIR,RUN_DIR AFTER=RUN_DIR,RUN_DIR` reads the logs of runs and keeps what it
draws in `docs/how-to/share-a-cluster.json`; without arguments it draws what is kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ensemble.store import read_events

RECORD = Path(__file__).resolve().parents[1] / "how-to" / "share-a-cluster.json"
_ENDS = ("paused", "finished", "failed", "stopped", "cancelled")
_COLOURS = ("#3366aa", "#cc7722", "#338855", "#884488")
_WIDE, _LEFT, _ROW, _HEAD = 760, 60, 26, 30
Row = Mapping[str, Any]


def list_turns(title: str, run_dirs: Sequence[str]) -> Iterator[Row]:
    """From when to when each member of these runs had its place, in seconds since the first run began."""
    logs = {Path(each).name: read_events(Path(each) / "events.jsonl") for each in run_dirs}
    began = min(event.t for events in logs.values() for event in events if event.type == "run_started")
    for run, events in logs.items():
        placed: dict[str, float] = {}
        for event in events:
            member = getattr(event, "member", "")
            if event.type == "placed":
                placed[member] = event.t
            elif event.type in _ENDS and member in placed:
                since = placed.pop(member)
                span = {"from_s": round(since - began, 1), "until_s": round(event.t - began, 1)}
                yield {"title": title, "run": run, "member": member, **span, "end": event.type}


def draw(rows: Sequence[Row]) -> str:
    """The chart: a line for each run, a bar for each member while it had its place."""
    last = max(row["until_s"] for row in rows)
    lines: list[str] = []
    y = 6.0
    for title in dict.fromkeys(row["title"] for row in rows):
        lines.append(f'<text x="4" y="{y + 16}" font-weight="bold">{escape(title)}</text>')
        y += _HEAD
        own = [row for row in rows if row["title"] == title]
        for number, run in enumerate(sorted({row["run"] for row in own})):
            lines.append(f'<text x="4" y="{y + 15}">run {escape(run)}</text>')
            for row in (row for row in own if row["run"] == run):
                x, end = (_LEFT + row[at] / last * (_WIDE - _LEFT - 10) for at in ("from_s", "until_s"))
                colour = _COLOURS[number % len(_COLOURS)]
                lines.append(f'<rect x="{x:.1f}" y="{y}" width="{end - x:.1f}" height="20" fill="{colour}"/>')
                lines.append(f'<text x="{x + 4:.1f}" y="{y + 14}" fill="#ffffff">{escape(row["member"])}</text>')
            y += _ROW
        y += 8
    lines.append(f'<text x="{_LEFT}" y="{y + 12}">0 s</text>')
    lines.append(f'<text x="{_WIDE - 10}" y="{y + 12}" text-anchor="end">{last:.0f} s</text>')
    size = f'width="{_WIDE}" height="{y + 20:.0f}" viewBox="0 0 {_WIDE} {y + 20:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui,sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *lines, "</svg>", ""])


if __name__ == "__main__":
    given = [argument.partition("=") for argument in sys.argv[1:]]
    if given:
        made = [row for title, _, dirs in given for row in list_turns(title, dirs.split(","))]
        RECORD.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    RECORD.with_suffix(".svg").write_text(draw(json.loads(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")
