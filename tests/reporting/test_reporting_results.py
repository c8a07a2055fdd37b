"""results.json and metrics.csv: what programs read of a run."""

from __future__ import annotations

import csv
import io
import json

from event_dicts import fold, project
from run_events import list_run

from ensemble.reporting import status_rows
from ensemble.reporting.results import EPOCH_COLUMNS, format_metrics, make_results

EVENTS = list_run()
RUN = project(EVENTS)
STATE, USED = RUN.state, RUN.ledger


def test_the_table_has_each_epoch_of_each_members_lineage_once_with_all_digits() -> None:
    rows = list(csv.DictReader(io.StringIO(format_metrics(STATE))))
    expected = [(member.id, epoch) for member in STATE.members.values() for epoch in member.history]
    assert [(row["member"], int(row["epoch"])) for row in rows] == [(id, epoch.epoch) for id, epoch in expected]
    for row, (_, epoch) in zip(rows, expected, strict=True):
        assert float(row["valid/accuracy"]) == epoch.metrics["accuracy"]
        assert float(row["train/loss"]) == epoch.train_loss and float(row["t"]) == epoch.t
        assert float(row["train/waited_share"]) == epoch.waited_s / epoch.wall_s
    assert set(EPOCH_COLUMNS) <= set(rows[0])


def test_metrics_that_only_some_report_are_empty_for_the_others() -> None:
    events = [
        {**e, "metrics": {"other": 1.0}} if e["type"] == "epoch" and e["member"] == "member-0" else e
        for e in EVENTS
    ]
    rows = list(csv.DictReader(io.StringIO(format_metrics(fold(events)))))
    assert {
        (row["member"] == "member-0", row["valid/other"] == "1.0", row["valid/accuracy"] == "") for row in rows
    } == {
        (True, True, True),
        (False, False, False),
    }


def test_the_results_agree_with_the_status_and_the_ledger() -> None:
    found = json.loads(json.dumps(make_results(RUN), allow_nan=False))
    assert found["run"]["state"] == "finished, with failures" and found["run"]["name"] == "digits"
    for row, result in zip(status_rows(RUN), found["members"], strict=True):
        assert {name: result[name] for name in row} == json.loads(json.dumps(row))
        assert result["params"] == STATE.members[row["member"]].params
    best = max((m for m in STATE.members.values() if m.state == "finished"), key=lambda m: m.metrics["accuracy"])
    assert found["best"] == best.id
    assert STATE.combined is not None and found["combined"]["metrics"] == STATE.combined.metrics
    assert found["totals"]["cpu_s"] == USED.run.cpu_s and found["totals"]["energy_j"] == USED.run.energy_j
    assert sum(of["cpu_s"] for of in found["totals"]["roles"].values()) >= found["totals"]["cpu_s"] * 0.999


def test_a_run_that_was_stopped_says_why() -> None:
    stopped = {"v": 2, "t": EVENTS[-1]["t"], "type": "run_stopped", "reason": "request"}
    found = make_results(project([*EVENTS[:60], stopped]))
    assert (found["run"]["state"], found["run"]["reason"]) == ("stopped", "request")
