"""What nodes and streams did over time, from the log's events."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from event_dicts import typed

from ensemble.reporting.dashboard.history import MOST
from ensemble.reporting.dashboard.projection import RunView
from ensemble.store import RunDir

BEGIN = 1e9


def power(t: float, **fields: Any) -> dict[str, Any]:
    part = {
        "kind": "gpu",
        "device": "GPU-a",
        "energy_j": 50.0,
        "origin": "measured",
        "activity": [["train", "m", 0.25]],
    }
    known = {
        "node": "n",
        "watts": 100.0,
        "interval_s": 1.0,
        "energy_j": 100.0,
        "origin": "measured",
        "busy_s": 2.0,
        "parts": [part],
    }
    return {"v": 2, "t": BEGIN + t, "type": "power", **known, **fields}


def feeder(t: float, recorded_s: float, ring: float, pid: int = 7) -> dict[str, Any]:
    known = {"node": "n", "cohort": 0, "pid": pid, "fullness": {"ring": ring}, "recorded_s": recorded_s}
    return {"v": 2, "t": BEGIN + t, "type": "feeder", **known}


def document(events: list[dict[str, Any]]) -> dict[str, Any]:
    head = {"v": 2, "t": BEGIN, "type": "run_started", "name": "x"}
    node = {"v": 2, "t": BEGIN, "type": "node", "node": "n", "cpus": 4, "gpus": ["H100"], "gpu_ids": ["GPU-a"]}
    view = RunView(RunDir("/nowhere/digits"))
    view.apply([typed(event) for event in (head, node, *events)], 1)
    found = view.history_document()
    json.dumps(found, allow_nan=False)
    return {plot["id"]: plot for plot in found["plots"]}


def test_use_of_cores_and_gpus_and_watts_lie_over_the_time_of_the_run() -> None:
    found = document([power(1.0), power(2.0, busy_s=4.0), power(20.0), power(300.0, busy_s=None)])
    (cpu,), (gpu,) = (found[name]["series"] for name in ("cpu", "gpu"))
    shares = [(round(60 * x, 2), y) for x, y, *_ in cpu["points"]]
    assert shares[:4] == [(0.0, 0.5), (1.0, 0.5), (1.0, 1.0), (2.0, 1.0)]
    assert gpu["label"] == "n, GPU 0" and {y for _, y, *_ in gpu["points"]} == {0.25, None}
    assert found["cpu"]["x"]["title"] == "minutes since the start" and found["cpu"]["view"] == "placement"
    assert found["power"]["said"] == "n: 50 W measured" and found["power"]["view"] == ["cost", "placement"]


def test_levels_of_streams_are_those_between_two_reports_not_means_since_the_beginning() -> None:
    # Full for ten seconds, then empty for thirty: the mean goes from 1 to 0.25.
    found = document(
        [feeder(10, 10.0, 1.0), feeder(40, 40.0, 0.25), feeder(50, 5.0, 0.9, pid=8), feeder(55, 10.0, 0.9, pid=8)]
    )
    (ring,) = found["ring"]["series"]
    values = [y for _, y, *_ in ring["points"] if y is not None]
    assert values == pytest.approx([0.0, 0.0, 0.9, 0.9]) and ring["label"] == "n, group 0"


def test_an_hour_is_no_longer_than_a_minute_and_keeps_its_mean() -> None:
    rng = random.Random(1)
    busy = [4 * rng.random() for _ in range(7200)]
    found = document([power(i + 1.0, busy_s=each) for i, each in enumerate(busy)])
    points = [(x, y) for x, y, *_ in found["cpu"]["series"][0]["points"]]
    assert len(points) <= 2 * MOST + 2 and len(json.dumps(found)) < 400_000
    area = sum((b[0] - a[0]) * a[1] for a, b in itertools.pairwise(points))
    assert area * 60 == pytest.approx(sum(busy) / 4, rel=0.01)
