"""Where members' time went, read off the log of a run."""

from __future__ import annotations

from typing import Any

import pytest
from event_dicts import fold, ledger

from ensemble.reporting.sections.exchange import describe_plan, list_columns, measure_member, summarize, tabulate
from ensemble.store import RunState


def run(*members: dict[str, Any]) -> RunState:
    """A run whose members have each done two epochs."""
    events: list[dict[str, Any]] = []

    def add(type: str, **fields: Any) -> None:
        events.append({"v": 2, "t": float(len(events)), "type": type, **fields})

    add(
        "run_started", name="r", declared=len(members), mode="members", objective="loss", direction="min", epochs=2
    )
    for number, given in enumerate(members):
        name, epochs = f"member-{number}", given.pop("epochs")
        identity = {"member": name, "number": number, "params": {}, "precision": "fp32", "workers": 1, **given}
        add("member", **identity)
        add("placed", member=name, attempt=0, node="n", cohort=0)
        add("started", member=name, attempt=0, epoch=0, step=0)
        for epoch, fields in enumerate(epochs):
            step = {"metrics": {"loss": 1.0}, "step": 5, "samples": 10, "samples_per_s": 1.0, "wall_s": 11.0}
            add("epoch", member=name, attempt=0, epoch=epoch, **step, **fields)
    return fold(events)


WIDE = {
    "workers": 2,
    "precision": "fp16",
    "compression": {"name": "qsgd4", "bucket": 512},
    "epochs": [
        {
            "train_s": 10.0,
            "sync_s": 2.0,
            "waited_s": 1.0,
            "sent_bytes": 3e6,
            "loss_scale": 65536.0,
            "skipped_steps": 1,
        },
        {
            "train_s": 10.0,
            "sync_s": 4.0,
            "waited_s": 0.0,
            "sent_bytes": 3e6,
            "loss_scale": 32768.0,
            "skipped_steps": 0,
        },
    ],
}
ALONE = {"epochs": [{"train_s": 5.0, "sync_s": 0.0, "waited_s": 1.0, "sent_bytes": 0.0, "skipped_steps": 0}] * 2}


def test_a_members_time_is_computing_synchronizing_or_waiting() -> None:
    row = measure_member(run(dict(WIDE)).members["member-0"])
    shares = [row[part] for part in ("computing", "synchronizing", "waiting for data")]
    assert shares == pytest.approx([0.65, 0.3, 0.05])
    assert [row[name] for name in ("sent by a worker", "loss scale", "skipped steps")] == [6e6, 32768.0, 1]


def test_the_table_shows_what_is_known_of_at_least_one_member() -> None:
    state = run(dict(WIDE), dict(ALONE))
    head, rows = list_columns(state.members.values())
    assert head == [
        "member",
        "workers",
        "precision",
        "compression",
        "computing",
        "synchronizing",
        "waiting for data",
        "waited, s",
        "sent by a worker",
        "loss scale",
        "skipped steps",
    ]
    assert [row[:4] for row in rows] == [["member-0", 2, "fp16", "qsgd4"], ["member-1", 1, "fp32", None]]
    head, _ = list_columns(run(dict(ALONE)).members.values())
    assert head == ["member", "workers", "precision", "computing", "waiting for data", "waited, s"]


def test_shares_and_bytes_are_shown_in_words_and_sorted_by_their_numbers() -> None:
    (table,) = tabulate(run(dict(WIDE), dict(ALONE)), ledger([]))
    rows = {str(row[0]): dict(zip([name for name, _ in table.head], row, strict=True)) for row in table.rows}
    assert rows["member-0"]["synchronizing"] == ("30.0%", pytest.approx(0.3))
    assert rows["member-0"]["sent by a worker"] == ("5.72 MiB", 6e6) and rows["member-1"]["compression"] is None
    assert tabulate(run(), ledger([])) == []


def test_the_summary_speaks_of_members_with_several_workers_only() -> None:
    assert summarize(run(dict(ALONE)), ledger([])) == []
    ((label, line),) = summarize(run(dict(WIDE), dict(ALONE)), ledger([]))
    assert label == "exchange" and line.startswith("1 member of several workers: 30% of the time synchronizing")
    assert "5.72 MiB sent" in line


def test_what_was_measured_is_said_in_words() -> None:
    tuned = {"groups": [[0, 2], [1, 3]], "ways": [[65536, "hierarchical"], [2**20, "flat"]], "bucket_bytes": 2**22}
    said = describe_plan({"tuned": tuned, "rates": None, "auto": [["none", 1]]})
    assert said == "groups of 2, hierarchical up to 64 KiB, flat above 64 KiB, buckets of 4 MiB"
    rates = {"latency_s": 1e-4, "bytes_per_s": 2.0**30, "codecs": {}}
    said = describe_plan(
        {"tuned": {**tuned, "groups": [], "ways": []}, "rates": rates, "auto": [["none", 1], ["bf16", 3]]}
    )
    assert said == "buckets of 4 MiB, link 1 GiB/s: fp32 for 1 of 4 buckets, bf16 for 3 of 4 buckets"


def test_members_are_told_apart_by_their_words() -> None:
    from ensemble.reporting.ranking import describe_options

    first, second = run(dict(WIDE), dict(ALONE)).members.values()
    assert describe_options(first, [first, second]) == "fp16, workers 2, qsgd4"
    assert describe_options(second, [first, second]) == "fp32, workers 1"
    assert describe_options(first, [first, first]) == ""
