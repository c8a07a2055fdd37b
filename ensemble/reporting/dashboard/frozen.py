"""The report: the live page as one HTML file, with its documents and its modules inside.

It opens from a disk, without a server and without a network: its content policy allows the script in it by its
hash, and nothing that has to be fetched. Where there is no JavaScript, the main figures and a table of the members
are shown.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ensemble.reporting import text
from ensemble.reporting.dashboard.link import link_modules, read_modules
from ensemble.reporting.dashboard.tiles import list_combined_figures

STATIC = Path(__file__).parent / "static"
#: Fields of the documents in `compose_report`'s order.
DOCUMENTS = ("state", "curves", "quality", "importances", "tables", "logs", "samples")
MOST_PARAMS = 6  # hyperparameters in the table for readers without JavaScript

escape = html.escape


def compose_report(documents: Mapping[str, Any]) -> str:
    """Returns the file's text; pure but for reading the page's own files.

    Args:
        documents: `state`, `curves`, `quality`, `importances`, `tables` as the live page gets them, and
            `logs`: the ends of members' logs by member; `samples`: lists of samples by order, or None. Their
            numbers are finite.

    Raises:
        LinkError: the page's modules cannot be linked.
        ValueError: a document holds a number that is not finite.
    """
    state = documents["state"]
    run = {**state["run"], "actions": []}  # nobody is there to ask
    frozen = {name: documents[name] for name in DOCUMENTS if name in documents} | {"state": {**state, "run": run}}
    script = _link_page()
    policy = (
        f"default-src 'none'; script-src 'sha256-{_hash(script)}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    icon = base64.b64encode((STATIC / "icon.svg").read_bytes()).decode()
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    for old, new in (
        ('<meta charset="utf-8">', '<meta charset="utf-8">\n' + _meta(policy)),
        ("<title>ensemble</title>", f"<title>{escape(str(run['name']))} · report</title>"),
        ('href="static/icon.svg"', f'href="data:image/svg+xml;base64,{icon}"'),
        (
            '<link rel="stylesheet" href="static/style.css">',
            f"<style>\n{(STATIC / 'style.css').read_text(encoding='utf-8')}</style>",
        ),
        (
            '<script type="module" src="static/app.js"></script>',
            f'<script type="module">{script}</script>',
        ),
        ('<p class="absent">The page needs JavaScript.</p>', _describe_plainly(state)),
        ("</body>", f"{_data('documents', _write_json(frozen))}</body>"),
    ):
        if page.count(old) != 1:
            raise ValueError(f"index.html has {old!r} {page.count(old)} times")
        page = page.replace(old, new)
    return page


@functools.cache  # a program may write the reports of many runs
def _link_page() -> str:
    """The page's modules as one script."""
    return link_modules(read_modules(STATIC), "app.js")


def _meta(policy: str) -> str:
    return f'<meta http-equiv="Content-Security-Policy" content="{policy}">'


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _data(id: str, content: str) -> str:
    """An element with data, which no browser runs."""
    return f'<script type="application/json" id="{id}">{content}</script>\n'


def _write_json(value: Any) -> str:
    """JSON that cannot end the element it lies in."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


# -- without JavaScript ------------------------------------------------------------------------------------------


def _describe_plainly(state: Mapping[str, Any]) -> str:
    """The main figures and the members as HTML."""
    run = state["run"]
    word, tone = run["state"]["word"], run["state"]["tone"]
    shown = [vars(tile) for tile in list_combined_figures(run)]
    shown = [tile for tile in run["tiles"] if tile["key"] != "combined" or not shown] + shown
    tiles = "".join(
        f'<div class="tile"><dt>{escape(tile["label"])}</dt><dd class="figure">{escape(tile["figure"])}</dd>'
        f'<dd class="note">{escape(tile["note"])}</dd></div>'
        for tile in shown
    )
    return (
        f'<div id="plain"><h1>{escape(str(run["name"]))}</h1>'
        f'<p><span class="pill {escape(tone)}">{escape(word)}</span></p>'
        f'<p class="soft">The figures and all other views need JavaScript.</p><dl class="tiles">{tiles}</dl>'
        f"<h2>Members</h2>{_tabulate_members(state)}</div>"
    )


def _tabulate_members(state: Mapping[str, Any]) -> str:
    run, members = state["run"], state["members"]
    at = {name: place for place, name in enumerate(members["columns"])}
    varied = run["varied"][:MOST_PARAMS]
    head = ["Member", "State", "Epoch", str(run["objective"]), *varied, "Attempts", "Error"]
    rows = []
    for row in members["rows"].values():
        params = row[at["params"]]
        cells = [row[at["id"]], row[at["state"]], row[at["epoch"]], text.score(row[at["metric"]])]
        cells += [text.value(params[name]) if name in params else "" for name in varied]
        cells += [row[at["attempts"]], row[at["error"]] or ""]
        rows.append("".join(f"<td>{escape(str(cell))}</td>" for cell in cells))
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = "".join(f"<tr>{row}</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>\n{lines}</tbody></table></div>'
