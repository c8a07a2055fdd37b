"""Writes the report of a run, which may have ended, run or be broken off: one HTML file for any browser.

It is the live page with its documents and its modules inside. It opens from a disk, without a network: its content
policy allows the script in it by its hash, and nothing that has to be fetched.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.reporting.dashboard.link import link_modules, read_modules

if TYPE_CHECKING:
    from ensemble.events import Event
    from ensemble.reporting.dashboard.projection import RunView
    from ensemble.store import RunDir, RunState

STATIC = Path(__file__).parent / "dashboard" / "static"
#: Of the logs of members that failed: lines of each, bytes of each, bytes of all.
LOG_LINES, LOG_BYTES, LOGS_BYTES = 60, 16 * 2**10, 2**20


def write_report(run_dir: RunDir, events: Sequence[Event] | None = None) -> Path:
    """Write `report.html` into the run directory, whole or not at all, and return its path.

    Args:
        events: of the run; None: as the log has them.

    Raises:
        StoreError: there is no run, or the file cannot be written.
    """
    from ensemble.reporting.dashboard.projection import RunView
    from ensemble.reporting.status import describe_lost_controller
    from ensemble.store import read_events
    from ensemble.store.files import write_bytes

    events = read_events(run_dir.events) if events is None else events
    view = RunView(run_dir)
    view.apply(events, run_dir.events.stat().st_size)
    if events:
        view.driver = describe_lost_controller(run_dir, view.state)
    page = compose_report(read_documents(run_dir, view))
    write_bytes(run_dir.report, page.encode(errors="backslashreplace"))
    return run_dir.report


def read_documents(run_dir: RunDir, view: RunView) -> dict[str, Any]:
    """Returns all documents of a run, and the ends of the logs of members that failed."""
    from ensemble.reporting.dashboard.analysis import read_importances, read_quality

    state = view.state
    return {
        "state": view.state_document(),
        "curves": view.curves_document(),
        "quality": read_quality(run_dir, state),
        # Those of a list take two seconds of CPU time, which the end of every run would pay.
        "importances": read_importances(run_dir, state, computes=state.mode == "search"),
        "tables": view.tables_document(),
        "logs": read_logs(run_dir, state) if any(member.error for member in state.members.values()) else {},
    }


def read_logs(run_dir: RunDir, state: RunState) -> dict[str, str]:
    """Returns the last lines of the log of each member that failed, as far as they have room."""
    from ensemble.reporting.dashboard.member_log import tidy
    from ensemble.store.errors import StoreError
    from ensemble.store.regular_files import open_regular

    logs: dict[str, str] = {}
    room = LOGS_BYTES
    for member in state.members.values():
        if member.error is None or room <= 0:
            continue
        try:
            with open_regular(run_dir.log(member.id), follows_link=True) as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - LOG_BYTES))
                end = file.read().decode(errors="replace")
        except (OSError, StoreError):
            continue  # it has written none
        logs[member.id] = "\n".join(tidy(end).splitlines()[-LOG_LINES:]) + "\n"
        room -= len(logs[member.id])
    return logs


def compose_report(documents: Mapping[str, Any]) -> str:
    """Returns the file's text; pure but for reading the page's own files.

    Args:
        documents: see `read_documents`; their numbers are finite.

    Raises:
        LinkError: the page's modules cannot be linked.
        ValueError: a document holds a number that is not finite.
    """
    run = {**documents["state"]["run"], "actions": []}  # nobody is there to ask
    frozen = {**documents, "state": {**documents["state"], "run": run}}
    script, style = _link_page(), (STATIC / "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    icon = base64.b64encode((STATIC / "icon.svg").read_bytes()).decode()
    # JSON that cannot end the element it lies in.
    data = json.dumps(frozen, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    for old, new in (
        (
            '<meta charset="utf-8">',
            f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        ),
        ("<title>ensemble</title>", f"<title>{html.escape(str(run['name']))} · report</title>"),
        ('href="static/icon.svg"', f'href="data:image/svg+xml;base64,{icon}"'),
        ('<link rel="stylesheet" href="static/style.css">', f"<style>\n{style}</style>"),
        ('<script type="module" src="static/app.js"></script>', f'<script type="module">{script}</script>'),
        ("</body>", f'<script type="application/json" id="documents">{data}</script>\n</body>'),
    ):
        if page.count(old) != 1:
            raise ValueError(f"index.html has {old!r} {page.count(old)} times")
        page = page.replace(old, new)
    return page


@functools.cache  # a program may write the reports of many runs
def _link_page() -> str:
    return link_modules(read_modules(STATIC), "app.js")
