"""Makes documents of the live page from events: "state", "curves", "quality", "importances", "tables"."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

from kit.event_dicts import typed
from kit.run_events import START, Log, identity, run_started

from ensemble.reporting.dashboard.plots import plot_reliability
from ensemble.reporting.dashboard.projection import RunView
from ensemble.store import RunDir

HOSTILE = (
    *("<img src=x onerror=alert(1)>", '"><script>window.hacked=1</script>', "javascript:alert(1)"),
    *("a,b&c=d?e#f%20g%", "%{x}<b>bold</b><br>line", "\u202ereversed\u202c", "__proto__", "constructor"),
    *("new\nline\ttab\x00nul", "ö" * 300, "' OR 1=1 --", "{{7*7}}${7*7}"),
)
EPOCHS = 12
NOW_S = 300.0
STATES = ("finished", "running", "waiting", "failed", "pruned", "paused", "cancelled", "placed")

Document = dict[str, Any]


def make_documents(
    members: int = 8, *, seed: int = 0, hostile: bool = False, ended: bool = False, gpus: int = 4
) -> dict[str, Document]:
    """All documents of a run with so many members on two nodes, hostile in all its names, or over and combined."""
    rng, log = random.Random(seed), Log()
    names = [HOSTILE[i] if hostile and i < len(HOSTILE) else f"member-{i}" for i in range(members)]
    run_started(log, HOSTILE[0] if hostile else "digits", "search", EPOCHS, members)
    nodes = [f"node-{i}" + ("<b>&" if hostile else "") for i in range(2)]
    for node in nodes:
        devices = [f"GPU-{node}-{i}" for i in range(gpus)]
        of_gpus = {"gpu_memory_gb": [80.0] * gpus, "gpu_free": [0.8] * gpus, "gpu_shares": [1.0] * gpus}
        log.add(0.1, "node", node=node, cpus=32.0, memory_gb=256.0, gpus=devices, gpu_ids=devices, **of_gpus)
        log.add(NOW_S, "power", node=node, watts=345.0, energy_j=690.0, interval_s=2.0, origin="measured")
    for number, name in enumerate(names):
        state = _draw_state(rng, number, members, ended)
        _log_member(log, rng, number, name, state, nodes[number % 2], gpus, hostile)
    if ended:
        log.add(NOW_S, "run_finished")
    view = RunView(RunDir("/data/runs/digits"))
    view.apply([typed(event) for event in log.events()], 123456)
    ranked = [name for name, member in view.state.members.items() if member.metrics][: 6 * ended]
    shares = [["lr", 0.62, 0.5, 0.7], ["width", 0.27, 0.2, 0.3], ["depth", 0.11, 0.11, 0.11]]
    documents = {"state": view.state_document(), "curves": view.curves_document()}
    documents |= {"quality": make_quality(rng, ranked), "tables": view.tables_document() | _make_tables(names)}
    documents["importances"] = {"importances": shares, "method": "fANOVA", "missing": None, "plots": []}
    return dict(json.loads(json.dumps(documents)))


def _log_member(
    log: Log, rng: random.Random, number: int, name: str, state: str, node: str, gpus: int, hostile: bool
) -> None:
    params = {"lr": round(10 ** rng.uniform(-4, -1), 6), "width": rng.choice((16, 32, 64, 128))}
    params |= {"depth": rng.choice((1, 2, 3)), "optimizer": "sgd"}
    params |= {"<i>evil</i>&amp;": HOSTILE[number % len(HOSTILE)]} if hostile else {}
    declared = {"member": name, "cpus_per_worker": 0.5, "gpus_per_worker": 0.25 if gpus else 0.0}
    declared |= {"lineage": {"from": "member-1", "epoch": 3, "warm": True}} if number == 9 else {}
    log.add(0.2, "member", **identity(number, params, EPOCHS) | declared)
    if state == "waiting":
        return
    devices = [f"GPU-{node}-{number % gpus}"] if gpus else [None]
    error = {"error": f"loss is nan at step 113 (lr {params['lr']})", "reason": "nan"}
    for attempt in range(3 if state == "failed" else 1):
        who = {"member": name, "attempt": attempt}
        log.add(1.0 + attempt / 4, "placed", **who, node=node, devices=devices, cohort=number % 2)
        if attempt < 2 and state == "failed":
            log.add(1.1 + attempt / 4, "failed", **who, **error, retry=True)
    if state == "placed":
        return
    log.add(2.0, "started", **who, epoch=0, step=0)
    length = EPOCHS if state == "finished" else rng.randint(1, EPOCHS - 1)
    top, speed = 0.72 + 0.24 * rng.random(), 0.3 + 0.5 * rng.random()
    metrics = {}
    for epoch in range(length):
        accuracy = top * (1 - math.exp(-speed * (epoch + 1))) + rng.gauss(0, 0.008)
        metrics = {"accuracy": accuracy, "loss": 2.2 * (1 - accuracy) + 0.1}
        more = {"train_loss": 2.4 * (1 - accuracy) + 0.12, "samples_per_s": 1500 + 200 * rng.random()}
        more |= {"lr": params["lr"] * (1 - epoch / EPOCHS) ** 4, "samples": 1000, "wall_s": 4.0}
        log.add(5 + 4 * (epoch + 1) + rng.random(), "epoch", **who, epoch=epoch, step=17, metrics=metrics, **more)
    t = 60 + 30 * rng.random()
    log.add(t, "checkpoint", **who, epoch=length, step=0, path="x", weights_sha256="ab")
    if state == "running":
        log.add(t, "progress", **who, epoch=length, step=rng.randint(1, 16), steps=17, samples_per_s=1500.0)
    else:
        more = error | {"retry": False} if state == "failed" else {"epoch": length, "metrics": metrics}
        log.add(t, state, **who, **more)


def _make_tables(names: list[str]) -> Document:
    heads = (("computing", ""), ("sent by a worker", ""), ("planned", "text"))
    about = {"about": "Where their time went. All epochs."}
    sent = [None if i % 3 else [f"{i} KiB", 1024 * i] for i in range(len(names))]
    cells = {name: [[f"{i % 10}0.0%", i % 10 / 10], sent[i], "flat"] for i, name in enumerate(names)}
    roles = {"id": "cost_of_roles", "title": "Cost by role", "text": "", "head": [["role", "text"], ["CPU-s", ""]]}
    columns = [{"id": f"exchange {name}", "title": name, "kind": kind, **about} for name, kind in heads]
    tables = [roles | {"rows": [[["training", 0], 1234.5], [["feeding", 1], None]]}]
    missing = ["Packing cannot be shown: KeyError: 'members'."]
    words = {"lines": [["energy", "1.2 kJ estimated"]], "tiles": []}
    return {"columns": columns, "members": cells, "tables": tables, **words, "missing": missing}


def make_change(documents: dict[str, Document], step: int, touched: int = 10) -> dict[str, Document]:
    """The documents of a running run a while later: `touched` members advance by an epoch."""
    rng = random.Random((0, step).__hash__())
    documents = copy.deepcopy(documents)
    state, curves = documents["state"], documents["curves"]["members"]
    at = {name: i for i, name in enumerate(state["members"]["columns"])}
    state["now"] = state["run"]["updated"] = now = START + NOW_S + 0.2 * step
    state["offset"], state["stamps"]["curves"] = state["offset"] + 1000, state["stamps"]["curves"] + 1
    rows = state["members"]["rows"]
    for name in rng.sample(list(rows), min(touched, len(rows))):
        row, curve = rows[name], curves.setdefault(name, {"epoch": [], "t": [], "values": {}})
        row[at["state"]], row[at["epoch"]] = "running", len(curve["epoch"]) + 1
        row[at["step"]], row[at["done"]] = step % 17, (step % EPOCHS) / EPOCHS
        row[at["metric"]] = 0.5 + 0.4 * rng.random()
        row[at["metrics"]] = {"accuracy": row[at["metric"]], "loss": 1 - row[at["metric"]]}
        values = {**row[at["metrics"]], "train_loss": 1.1 - row[at["metric"]], "lr": 0.01, "samples_per_s": 1500.0}
        curve["epoch"].append(len(curve["epoch"]))
        curve["t"].append(now)
        for figure, value in values.items():
            curve["values"].setdefault(figure, []).append(value)
    return documents


def renew(documents: dict[str, Document], step: int, **parts: Any) -> dict[str, Document]:
    """The documents a while later, in which nothing but these parts of the state has changed."""
    changed = make_change(documents, step, touched=0)
    changed["state"] |= parts
    return changed


def make_notice(at_s: float, level: str, text: str) -> Document:
    return {"at_s": at_s, "level": level, "text": text, "who": "", "count": 1}


def _draw_state(rng: random.Random, number: int, members: int, ended: bool) -> str:
    if number < len(STATES) <= members and not ended:
        return STATES[number]  # each is there at least once
    shares = (70, 0, 0, 5, 22, 1, 2, 0) if ended else (30, 25, 22, 4, 14, 2, 2, 1)
    return rng.choices(STATES, shares)[0]


def make_quality(rng: random.Random, ids: list[str]) -> Document:
    if not ids:
        none = {"title": "The combined model", "origin": "", "names": {"best": "", "combined": "combined"}}
        none |= {"missing": "The run combines its members at its end."}
        return none | {name: [] for name in ("tiles", "plots", "matrices", "tables")}
    bins = [[x, min(1.0, x + rng.gauss(0, 0.04)), rng.randint(3, 90)] for x in (0.25 + 0.1 * i for i in range(8))]
    names = {"best": f"best member ({ids[0]})", "combined": "combined"}
    rows = [[name, ["0.9000", 0.9], 0.35] for name in ("combined", *ids)]
    columns = [["model", "text"], ["accuracy ↑", ""], ["NLL ↓", ""]]
    table = {"id": "models", "title": "Combined model and members", "text": "", "head": columns, "rows": rows}
    matrix = {"names": ["cat", "dog"], "cells": [[0, 0, 30, 0.9], [0, 1, 3, 0.1], [1, 1, 20, 1.0]]}
    tile = {"key": "nll", "label": "NLL", "figure": "0.3582", "note": "−0.0782 to the best member", "tone": "good"}
    plots = list(plot_reliability("classification", {"best": bins, "combined": bins}, names))
    head = {"title": "The combined model", "origin": "All figures are of the same 359 samples of the test split."}
    head |= {"names": names, "plots": plots, "tiles": [tile | {"link": None, "about": "lower is better"}]}
    matrices = [matrix | {"of": of} for of in ("combined model", "best member")]
    return head | {"matrices": matrices, "tables": [table | {"of_members": False}], "missing": None}
