"""Makes documents of the live page by hand: seeded, of any size, with hostile names where asked for.

documents = make_documents(1000, seed=3)
documents["state"], documents["curves"], documents["quality"], documents["importances"], documents["tables"]
change = make_change(documents["state"], step=1, touched=20)
"""

from __future__ import annotations

import math
import random
from typing import Any

from document_parts import list_figures, make_combined, make_cost, make_node, make_quality, make_stream

from ensemble.reporting.dashboard.analysis import EMPTY
from ensemble.reporting.dashboard.progress import list_improvements, plot_progress
from ensemble.reporting.dashboard.search_plots import SearchInfo, Trial, plot_search
from ensemble.reporting.dashboard.streams import group_streams
from ensemble.reporting.dashboard.tiles import describe_quality, describe_tiles

START = 1_795_000_000.0
COLUMNS = (
    "id", "number", "state", "epoch", "epochs", "step", "steps", "done", "metric", "metrics", "further", "params",
    "options", "workers", "node", "place", "devices", "shares", "cohort", "attempts", "failures",
    "samples_per_s", "left_s", "waited", "synced", "memory_gb", "error", "reason", "advice", "first_epoch",
    "checkpoint", "lineage", "code", "private",
)  # fmt: skip
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    '"><script>window.hacked=1</script>',
    "javascript:alert(1)",
    "a,b&c=d?e#f%20g%",
    "%{x}<b>bold</b><br>line",
    "‮reversed‬",
    "__proto__",
    "constructor",
    "new\nline\ttab\x00nul",
    "ö" * 300,
    "' OR 1=1 --",
    "{{7*7}}${7*7}",
)
EPOCHS = 12
STATES = ("finished", "running", "waiting", "failed", "pruned", "paused", "cancelled", "placed")

Document = dict[str, Any]


def make_documents(
    members: int = 8, *, seed: int = 0, hostile: bool = False, ended: bool = False, gpus: int = 4, nodes: int = 2
) -> dict[str, Document]:
    """All documents of a run with so many members.

    Args:
        hostile: names of members, hyperparameters, nodes and texts try to become markup or to break the address.
        ended: the run is over and combined.
    """
    rng = random.Random(seed)
    names = _names(members, hostile)
    places = [f"node-{i}" + ("<b>&" if hostile else "") for i in range(nodes)]
    rows, curves, spans = {}, {}, {}
    for number, name in enumerate(names):
        state = _draw_state(rng, number, members, ended)
        curve = _make_curve(rng, state)
        curves[name] = curve
        rows[name] = _make_row(rng, number, name, state, curve, places[number % nodes], gpus, hostile)
        spans[name] = _make_spans(rng, state, places[number % nodes], number, nodes, gpus)
    ranked = sorted(
        (name for name in names if rows[name]["metric"] is not None), key=lambda name: -rows[name]["metric"]
    )
    state_document = _make_state(rng, rows, spans, ranked, places, gpus, ended, hostile)
    offset = state_document["offset"]
    return {
        "state": state_document,
        "curves": {"offset": offset, "thinned": False, "members": curves},
        "quality": make_quality(rng, ranked[:6])
        if ended and ranked
        else EMPTY | {"missing": "No member has finished yet."},
        "importances": {
            "importances": [["lr", 0.62], ["width", 0.27], ["depth", 0.11]],
            "method": "fANOVA",
            "missing": None,
        },
        "tables": _make_tables(names),
    }


def put_into_words(documents: dict[str, Document]) -> dict[str, Document]:
    """The documents with what the server says of them in words."""
    run, quality = documents["state"]["run"], documents["quality"]
    words = describe_quality(quality, ("accuracy", "max"), has_ended=run["ended"] is not None)
    curves = documents["curves"]["members"].items()
    found = ((name, curve["t"], curve["values"].get(run["objective"], ())) for name, curve in curves)
    series = ((name, times[: len(values)], values) for name, times, values in found)
    steps = list_improvements(series, run["direction"])
    progress = plot_progress(steps, run["objective"], run["started"], run["ended"] or run["updated"])
    state = documents["state"] | {"run": run | {"tiles": describe_tiles(run)}, "progress": progress}
    importances = documents["importances"] | {"plots": _plot_search(documents)}
    return documents | {"state": state, "quality": quality | words, "importances": importances}


def _plot_search(documents: dict[str, Document]) -> list[Document]:
    """The figures of the search, of the trials in the documents."""
    run, members, curves = documents["state"]["run"], documents["state"]["members"], documents["curves"]["members"]
    trials = []
    for name, row in members["rows"].items():
        known = dict(zip(members["columns"], row, strict=True))
        curve = curves.get(name, {"epoch": [], "values": {}})
        values = zip(curve["epoch"], curve["values"].get(run["objective"], ()), strict=False)
        fields = {field: known[field] for field in ("number", "state", "epoch", "params")}
        by_epoch = {epoch + 1: value for epoch, value in values}
        trials.append(Trial(name, value=known["metric"], further=known["further"], curve=by_epoch, **fields))
    names = [name for name, *_ in documents["importances"]["importances"]]
    further = [each["name"] for each in run["further"]]
    fields = (run["mode"], run["objective"], run["direction"], run["epochs"])
    return plot_search(trials, SearchInfo(*fields, further, run["further_origin"], run["front"], names))


def _make_tables(names: list[str]) -> Document:
    """Columns of members, and a table of another kind."""
    heads = (("computing", ""), ("sent by a worker", ""), ("planned", "text"))
    about = {"about": "Where their time went. All epochs.", "letters": 16}
    cells = {
        name: [[f"{i % 10}0.0%", i % 10 / 10], None if i % 3 else [f"{i} KiB", 1024 * i], "flat"]
        for i, name in enumerate(names)
    }
    roles = {"id": "cost_of_roles", "title": "Cost by role", "text": "", "head": [["role", "text"], ["CPU-s", ""]]}
    return {
        "columns": [{"id": f"exchange {name}", "title": name, "kind": kind, **about} for name, kind in heads],
        "members": cells,
        "tables": [roles | {"rows": [[["training", 0], 1234.5], [["feeding", 1], None]]}],
        "missing": ["Packing cannot be shown: KeyError: 'members'."],
    }


def make_change(state: Document, step: int, touched: int = 10, *, seed: int = 0) -> Document:
    """One change of a running run: `touched` members advance, and the run's counts and totals with them."""
    rng = random.Random((seed, step).__hash__())
    at = {name: i for i, name in enumerate(state["members"]["columns"])}
    now = state["now"] + 0.2 * step
    rows: dict[str, list[Any]] = {}
    epochs = []
    names = list(state["members"]["rows"])
    for name in rng.sample(names, min(touched, len(names))):
        row = list(state["members"]["rows"][name])
        row[at["state"]], row[at["epoch"]] = "running", step % EPOCHS
        row[at["step"]], row[at["done"]] = step % 17, (step % EPOCHS) / EPOCHS
        row[at["metric"]] = 0.5 + 0.4 * rng.random()
        row[at["metrics"]] = {"accuracy": row[at["metric"]], "loss": 1 - row[at["metric"]]}
        row[at["samples_per_s"]] = 1000 + 900 * rng.random()
        rows[name] = row
        values = {**row[at["metrics"]], "train_loss": 1.1 - row[at["metric"]], "lr": 0.01, "samples_per_s": 1500.0}
        epochs.append([name, step % EPOCHS, now, values])
    run = {**state["run"], "updated": now, "wall_s": now - START}
    return {
        "offset": state["offset"] + 1000 * step,
        "now": now,
        "run": run,
        "members": rows,
        "epochs": epochs,
    }


def make_notice(at_s: float, level: str, text: str) -> Document:
    """One notice, of nobody else."""
    return {"key": f"{level} {at_s}", "at_s": at_s, "level": level, "text": text, "who": "", "count": 1}


def _names(members: int, hostile: bool) -> list[str]:
    names = [f"member-{i}" for i in range(members)]
    if hostile:
        for i, name in enumerate(HOSTILE[:members]):
            names[i] = name
    return names


def _draw_state(rng: random.Random, number: int, members: int, ended: bool) -> str:
    if number < len(STATES) and members >= len(STATES) and not ended:
        return STATES[number]  # each is there at least once
    shares = (70, 0, 0, 5, 22, 1, 2, 0) if ended else (30, 25, 22, 4, 14, 2, 2, 1)
    return rng.choices(STATES, shares)[0]


def _make_curve(rng: random.Random, state: str) -> Document:
    lengths = {"finished": EPOCHS, "waiting": 0, "placed": 0}
    length = lengths.get(state, rng.randint(1, EPOCHS - 1))
    top, speed, lr = 0.72 + 0.24 * rng.random(), 0.3 + 0.5 * rng.random(), 10 ** rng.uniform(-4, -1)
    accuracy = [top * (1 - math.exp(-speed * (e + 1))) + rng.gauss(0, 0.008) for e in range(length)]
    return {
        "epoch": list(range(length)),
        "t": [START + 5 + 4 * (e + 1) + rng.random() for e in range(length)],
        "values": {
            "accuracy": accuracy,
            "loss": [2.2 * (1 - value) + 0.1 for value in accuracy],
            "train_loss": [2.4 * (1 - value) + 0.12 for value in accuracy],
            "lr": [lr * (1 + math.cos(math.pi * e / EPOCHS)) / 2 for e in range(length)],
            "samples_per_s": [1500 + 200 * rng.random() for _ in range(length)],
        },
    }


def _make_row(
    rng: random.Random, number: int, name: str, state: str, curve: Document, node: str, gpus: int, hostile: bool
) -> Document:
    length = len(curve["epoch"])
    metrics = {key: curve["values"][key][-1] for key in ("accuracy", "loss")} if length else {}
    lr = round(10 ** rng.uniform(-4, -1), 6)
    params = {"lr": lr, "width": rng.choice((16, 32, 64, 128)), "depth": rng.choice((1, 2, 3)), "optimizer": "sgd"}
    if hostile:
        params["<i>evil</i>&amp;"] = HOSTILE[number % len(HOSTILE)]
    is_placed = state not in ("waiting",)
    failed = state == "failed"
    gpu = f"GPU-{node}-{number % gpus}" if gpus else None
    return {
        "id": name,
        "number": number,
        "state": state,
        "epoch": length if length < EPOCHS else EPOCHS - 1,
        "epochs": EPOCHS,
        "step": rng.randint(0, 16) if state == "running" else 0,
        "steps": 17,
        "done": 1.0 if state == "finished" else length / EPOCHS,
        "metric": metrics.get("accuracy"),
        "metrics": metrics,
        "further": [],
        "params": params,
        "options": "bf16, batch_size 64, seed 0",
        "workers": 1 + (number % 7 == 0),
        "node": node if is_placed else None,
        "place": f"{node}, GPU {number % gpus}" if is_placed and gpus else node if is_placed else None,
        "devices": [gpu] if is_placed and gpus else [],
        "shares": {"cpus": 0.5, "gpus": 0.25 if gpus else 0.0},
        "cohort": number % 2 if is_placed else None,
        "attempts": 3 if failed else int(is_placed),
        "failures": 3 if failed else 0,
        "samples_per_s": 1500 + 400 * rng.random() if state == "running" else None,
        "left_s": 30 * rng.random() if state == "running" else None,
        "waited": 0.3 * rng.random() if length else None,
        "synced": 0.05 * rng.random() if length else None,
        "memory_gb": round(0.5 + rng.random(), 2) if is_placed else None,
        "error": f"loss is nan at step 113 (lr {lr})" if failed else None,
        "reason": "nan" if failed else None,
        "advice": "Lower lr, or clip gradients, and clone the member." if failed else None,
        "first_epoch": 0,
        "checkpoint": length or None,
        "lineage": {"from": "member-1", "epoch": 3, "warm": True} if number == 9 else None,
        "code": None,
        "private": 0.25 if number % 4 == 2 and length else 0.0,
    }


def _make_spans(rng: random.Random, state: str, node: str, number: int, nodes: int, gpus: int) -> list[list[Any]]:
    if state == "waiting":
        return []
    devices = [f"GPU-{node}-{number % gpus}"] if gpus else [None]
    begin = START + 3 * (number % 40)
    if state == "failed":
        ends = [(begin + 8 * i, begin + 8 * i + 6, "failed") for i in range(3)]
    else:
        last = None if state in ("running", "placed") else begin + 20 + 30 * rng.random()
        ends = [(begin, last, "running" if last is None else state)]
    return [
        [attempt, node, devices, number % 2, placed, None if state == "placed" else placed + 2, ended, outcome]
        for attempt, (placed, ended, outcome) in enumerate(ends)
    ]


def _make_state(
    rng: random.Random,
    rows: dict[str, Document],
    spans: Document,
    ranked: list[str],
    places: list[str],
    gpus: int,
    ended: bool,
    hostile: bool,
) -> Document:
    counts: dict[str, int] = {}
    for row in rows.values():
        counts[row["state"]] = counts.get(row["state"], 0) + 1
    now = START + 300.0
    best = {"member": ranked[0], "value": rows[ranked[0]]["metric"]} if ranked else None
    run = {
        "name": HOSTILE[0] if hostile else "digits",
        "run_id": "a73ec6fb09984d13",
        "dir": "/data/runs/digits",
        "state": {"word": "finished", "tone": "good"} if ended else {"word": "running", "tone": "warn"},
        "executor": "ray",
        "mode": "search",
        "objective": "accuracy",
        "direction": "max",
        "further": [],
        "further_origin": "measured",
        "front": [],
        "epochs": EPOCHS,
        "declared": len(rows),
        "started": START,
        "updated": now,
        "ended": now if ended else None,
        "wall_s": 300.0,
        "left": None if ended else "about 6:50 left",
        "done": 1.0 if ended else 0.42,
        "counts": counts,
        "best": best,
        "combined": make_combined(ranked[:3], rows) if ended and ranked else None,
        "benefit": {"text": "3 of 8 members were combined: 0.012 better than the best.", "tone": "good"},
        "metrics": ["accuracy", "loss"],
        "figures": {each["name"]: each for each in list_figures("accuracy", "loss", "nll", "ece")},
        "params": ["lr", "width", "depth", "optimizer"] + (["<i>evil</i>&amp;"] if hostile else []),
        "varied": ["lr", "width", "depth"] + (["<i>evil</i>&amp;"] if hostile else []),
        "facts": [
            {"label": "Limited by", "text": "members wait 18 % of the time for samples.", "tone": "warn"},
            {"label": "Waiting", "text": f"{counts.get('waiting', 0)} members wait for a GPU.", "tone": ""},
        ],
        "totals": {
            "cpu_s": 4870.4, "energy_j": 201234.0, "energy_origin": "measured", "watts": 690.0,
            "watts_origin": "measured", "prepared": 12936, "consumed": 103488, "reuse": 8.0,
            "samples_per_s": 21000.0, "models_per_minute": 3.4,
        },
        "failures": [
            {"text": "3 × loss is nan", "reason": "nan", "members": list(rows)[3:6], "more": 0, "attempt": 3,
             "advice": "Lower lr.", "log": f"Traceback\n{HOSTILE[0]}"}
        ] if len(rows) > 5 else [],
        "made_with": [["python", "3.12.4"], ["revision", "4f2a91c"]],
        "driver": None,
        "actions": [] if ended else ["stop", "pause", "resume", "cancel", "add"],
    }  # fmt: skip
    return {
        "v": 1,
        "offset": 123456,
        "log": "1f0c-88",
        "now": now,
        "run": run,
        "members": {"columns": COLUMNS, "rows": {name: [row[c] for c in COLUMNS] for name, row in rows.items()}},
        "spans": spans,
        "nodes": [make_node(rng, name, gpus) for name in places],
        "streams": group_streams(make_stream(node, cohort, len(rows)) for cohort, node in enumerate(places)),
        "notices": [
            make_notice(12.0, "warning", f"{places[0]}: CPU throttled for 3 s."),
            make_notice(40.5, "error", "member-3: loss is nan at step 113; it is not tried again."),
            make_notice(61.0, "info", "A second feeder was started for stream group 1."),
        ],
        "cost": make_cost(rng, rows),
    }
