"""Tables and files of a run: where members' time went, what it cost, results.json and metrics.csv."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import pytest
from kit import run_events as runs
from kit.event_dicts import fold, ledger, project

from ensemble.meter.impact import Impact
from ensemble.reporting import status_rows
from ensemble.reporting.ranking import describe_options
from ensemble.reporting.results import EPOCH_COLUMNS, format_metrics, make_results
from ensemble.reporting.sections import cost
from ensemble.reporting.sections.member_details import describe_plan, list_details
from ensemble.reporting.sections.training import summarize_exchange
from ensemble.reporting.summary import summary_lines
from ensemble.reporting.text import amount, clock, duration, emissions, joules
from ensemble.spec import Energy

Event = dict[str, Any]
RUN = runs.list_run()
MEASURED = runs.measured(RUN)


def read_members(events: list[Event], section: str) -> dict[str, dict[str, Any]]:
    """The cells of each member in a section's columns, by their titles."""
    columns, cells = list_details(project(events))
    ours = [(at, column["title"]) for at, column in enumerate(columns) if column["id"].startswith(f"{section} ")]
    return {name: {title: row[at] for at, title in ours} for name, row in cells.items()}


def declare_members(*members: dict[str, Any]) -> list[Event]:
    log = runs.Log()
    runs.run_started(log, "r", "members", 2, len(members), objective="loss", direction="min")
    for number, given in enumerate(members):
        name = f"member-{number}"
        identity = runs.identity(number, {}, 2) | {"precision": "fp32"} | given
        epochs = identity.pop("epochs")
        log.add(1.0, "member", **identity, epochs=2)
        log.add(2.0, "placed", member=name, attempt=0, node="n", cohort=0)
        log.add(3.0, "started", member=name, attempt=0, epoch=0, step=0)
        for epoch, fields in enumerate(epochs):
            step = {"metrics": {"loss": 1.0}, "step": 5, "samples": 10, "samples_per_s": 1.0, "wall_s": 11.0}
            log.add(4.0 + epoch, "epoch", member=name, attempt=0, epoch=epoch, **step, **fields)
    return log.events()


def time(train_s: float, sync_s: float, waited_s: float, sent: float, skipped: int, **more: float) -> Event:
    spent = {"train_s": train_s, "sync_s": sync_s, "waited_s": waited_s, "sent_bytes": sent}
    return spent | {"skipped_steps": skipped} | more


WIDE: Event = {"workers": 2, "precision": "fp16", "compression": {"name": "qsgd4", "bucket": 512}}
WIDE["epochs"] = [time(10.0, 2.0, 1.0, 3e6, 1, loss_scale=65536.0)]
WIDE["epochs"] += [time(10.0, 4.0, 0.0, 3e6, 0, loss_scale=2.0**15)]
ALONE = {"epochs": [time(5.0, 0.0, 1.0, 0.0, 0)] * 2}
BOTH, ONE = declare_members(WIDE, ALONE), declare_members(ALONE)


def test_a_members_time_is_computing_synchronizing_or_waiting() -> None:
    wide, alone = read_members(BOTH, "exchange").values()
    titles = "precision; compression; computing; synchronizing; waiting for data; waited, s; sent by a worker; "
    assert list(wide) == f"{titles}loss scale; skipped steps".split("; ")
    assert (wide["precision"], wide["compression"]) == ("fp16", "qsgd4")
    shares = [wide[part][1] for part in ("computing", "synchronizing", "waiting for data")]
    assert shares == pytest.approx([0.65, 0.3, 0.05]) and wide["synchronizing"][0] == "30.0%"
    assert (wide["sent by a worker"], wide["loss scale"], wide["skipped steps"]) == (["5.72 MiB", 6e6], 2.0**15, 1)
    assert (alone["precision"], alone["compression"]) == ("fp32", None)
    [known] = read_members(ONE, "exchange").values()
    assert list(known) == ["precision", "computing", "waiting for data", "waited, s"], "what a member has"
    assert list_details(project(declare_members())) == ([], {})
    first, second = fold(BOTH).members.values()
    assert describe_options(first, [first, second]) == "fp16, workers 2, qsgd4"
    assert describe_options(second, [first, second]) == "fp32, workers 1"
    assert describe_options(first, [first, first]) == ""
    assert summarize_exchange(fold(ONE), ledger([])) == [], "of members with several workers only"
    ((label, line),) = summarize_exchange(fold(BOTH), ledger([]))
    assert label == "exchange" and line.startswith("1 member of several workers: 30% of the time synchronizing")
    assert "5.72 MiB sent" in line


def test_what_was_measured_of_an_exchange_is_said_in_words() -> None:
    tuned = {"groups": [[0, 2], [1, 3]], "ways": [[65536, "hierarchical"], [2**20, "flat"]], "bucket_bytes": 2**22}
    words = describe_plan({"tuned": tuned, "rates": None, "auto": [["none", 1]]})
    assert words == "groups of 2, hierarchical up to 64 KiB, flat above 64 KiB, buckets of 4 MiB"
    plan = {"tuned": tuned | {"groups": [], "ways": []}, "auto": [["none", 1], ["bf16", 3]]}
    words = describe_plan(plan | {"rates": {"latency_s": 1e-4, "bytes_per_s": 2.0**30, "codecs": {}}})
    assert words == "buckets of 4 MiB, link 1 GiB/s: fp32 for 1 of 4 buckets, bf16 for 3 of 4 buckets"


def test_what_was_measured_of_a_member_stands_beside_what_was_given() -> None:
    profile = {"v": 2, "t": 1.0, "type": "profile", "shape": "s", "device": "cpu", "members": ["member-1"]}
    profile |= {"step_s": {"1": 0.0125}, "samples_per_s": {"1": 5120.0}, "cpus": {"1": 0.9}, "memory_gb": 0.25}
    rows = read_members([*RUN, profile], "packing")
    one = rows["member-1"]
    assert (one["a step alone, ms"], one["samples/s alone"], "memory, GiB" in one) == (12.5, 5120.0, False)
    assert rows["member-2"]["a step alone, ms"] is None
    assert set(map(len, read_members(RUN, "packing").values())) == {0}, "nothing was measured: no columns"


def add_gpu(event: Event) -> Event:
    """The event where each node has a GPU, whose use by process is known on node-0 and not on node-1."""
    gpu = f"GPU-{event.get('node')}"
    part = {"name": "gpu", "kind": "gpu", "device": gpu, "energy_j": 50.0, "idle_j": 10.0, "origin": "measured"}
    if event.get("node") == "node-0":
        part["activity"] = [["train", "member-0", 0.5], ["train", "member-2", 1.5]]
    changed = {"node": {"gpu_ids": [gpu]}, "placed": {"devices": [gpu] * len(event.get("devices", ()))}}
    changed["power"] = {"parts": [*event.get("parts", ()), part]}
    return event | changed.get(event["type"], {})


def read_roles(events: list[Event]) -> list[dict[str, Any]]:
    """The rows of the table of roles, as they are sorted but for the names."""
    tables = [table.as_dict() for table in cost.tabulate(fold(events), ledger(events))]
    cells = [(table["head"], row) for table in tables for row in table["rows"]]
    return [{n: c[0] if isinstance(c, list) else c for (n, _), c in zip(*each, strict=True)} for each in cells]


def test_other_programs_are_no_role_of_the_run() -> None:
    busy = [event | {"busy_s": 4 * event["interval_s"]} if event["type"] == "power" else event for event in RUN]
    assert ledger(busy).by_role().keys() > {"other"} and "other processes" not in str(read_roles(busy))
    assert "Other programs on the nodes used" in texts(busy)


def texts(events: list[Event]) -> str:
    abouts = dict.fromkeys(column["about"] for column in list_details(project(events))[0])
    return " ".join([*abouts, *(table.text for table in cost.tabulate(fold(events), ledger(events)))])


def test_each_method_by_which_gpus_were_split_is_named_and_adds_up() -> None:
    events = [add_gpu(event) for event in MEASURED]
    book = ledger(events)
    words = r"idle .* by reservation, dynamic .* by CPU time, .* by SM utilization and .* by declared share .*"
    assert any(re.fullmatch(words, line) for _, line in cost.summarize(fold(events), book))
    methods = cost.sum_methods(book.rows)
    assert set(methods) == {"reservation", "cpu_time", "sm_utilization", "share"} <= set(cost.METHOD_WORDS)
    assert sum(methods.values()) == book.total.energy_j
    shown = {name: row["GPU-s"] for name, row in read_members(events, "cost_of_members").items() if row["GPU-s"]}
    gpu_s = {member: total.gpu_s for member, total in book.by_member().items() if total.gpu_s}
    assert set(shown) == set(gpu_s) == {"member-0", "member-2"}
    assert all("GPU-s" in row for row in read_roles(events))
    assert shown["member-2"] == pytest.approx(gpu_s["member-2"], abs=0.1)


def test_the_report_has_the_full_cost_of_each_member_and_both_of_each_role() -> None:
    book, members, roles = ledger(MEASURED), read_members(MEASURED, "cost_of_members"), read_roles(MEASURED)
    assert texts(MEASURED).count("All joules and watts are attributed.") == 2
    assert list(members["member-0"]) == ["full J", "full CPU-s", "idle J", "mean W", "split by"]
    assert list(members) == [f"member-{number}" for number in range(8)]
    for name, row in members.items():
        direct, full = book.member(name), book.member(name, full=True)
        assert direct.energy_j and full.energy_j and full.energy_j > direct.energy_j
        expected = [full.energy_j, full.cpu_s, direct.idle_j, direct.mean_w]
        assert list(row.values())[:4] == pytest.approx(expected, rel=0.01)
        assert re.fullmatch(r"CPU time \d\d%, reservation \d\d%", row["split by"])
    by_role = {row["role"]: row for row in roles}
    assert list(roles[0])[:4] == ["role", "J (attributed)", "direct J", "full J"]
    preparing, idle = by_role["preparing samples"], by_role["idle, not reserved"]
    assert preparing["direct J"] is None and preparing["J (attributed)"] == preparing["full J"] is not None
    assert idle["direct J"] is idle["full J"] is None, "in neither view a member's"
    assert idle["split by"] == "reservation 100%"
    pairs = zip(RUN, MEASURED, strict=True)  # the node of the feeders has but an estimate
    half = [old if old["type"] == "power" and old["node"] == "node-0" else new for old, new in pairs]
    members = read_members(half, "cost_of_members")
    assert "All joules" not in texts(half) and all("J is" in row for row in read_roles(half))
    origins = [members[member]["J is"] for member in ("member-0", "member-1")]
    assert origins == ["estimated", "attributed, full estimated"]


@pytest.mark.parametrize("events", [runs.search_run(), []], ids=["no power", "empty"])
def test_without_energy_there_are_no_joules_in_a_table(events: list[Event]) -> None:
    assert all("full J" not in row for row in read_members(events, "cost_of_members").values())
    assert all(row[name] is None for row in read_roles(events) for name in row if name.startswith("J"))


GIVEN = Energy(intensity_g_per_kwh=300.0, pue=1.25, price_per_kwh=0.2, currency="CHF")


def with_energy(events: list[Event], energy: Energy = GIVEN) -> list[Event]:
    return [e | {"energy": energy.as_event()} if e["type"] == "run_started" else e for e in events]


def impact_lines(events: list[Event]) -> list[tuple[str, str]]:
    return cost.summarize_impact(fold(events), ledger(events))


def impact(events: list[Event]) -> Impact:
    return cost.run_impact(fold(events), ledger(events))


def test_the_work_of_a_run_is_that_of_its_members_log() -> None:
    work, epochs = cost.measure_work(fold(RUN)), [e for e in RUN if e["type"] == "epoch"]
    assert work.models == 7 and work.samples == sum(e["samples"] for e in epochs) == 46 * 5000
    last = [e["metrics"]["accuracy"] for e in epochs if e["epoch"] == 5 and e["member"] != "member-6"]
    assert work.best == max(last) and work.maximized, "member-6 failed"
    assert sorted(work.reported) == sorted(e["metrics"]["accuracy"] for e in epochs)


def test_the_figures_follow_the_ledger_and_what_the_last_start_was_given() -> None:
    events, joules = with_energy(RUN), ledger(RUN).run.energy_j
    found = impact(events)
    assert joules and found.energy.total == joules and found.energy.per["per_model"] == joules / 7
    assert found.emissions.total == pytest.approx(joules / 3.6e6 * 1.25 * 300)
    again = with_energy(RUN, Energy(intensity_g_per_kwh=30.0))
    resumed = [*events, again[0] | {"t": events[-1]["t"] + 1, "resumed": True}]
    assert fold(resumed).starts == 2 and not impact(resumed).price.given
    assert impact(resumed).emissions.total == pytest.approx(joules / 3.6e6 * 30)


def test_the_summary_has_joules_per_unit_and_names_what_was_given() -> None:
    events = with_energy(RUN)
    lines = dict(impact_lines(events))
    units = r".* k?J per finished model, .* J per 1,000 samples trained, .* J per percentage point of accuracy"
    assert re.fullmatch(units, lines[""])
    emitted = r"\d.* m?gCO2e estimated, .*gCO2e per finished model \(given: 300 gCO2e per kWh, PUE 1.25\)"
    assert re.fullmatch(emitted, lines["emissions"])
    assert re.search(r"^0\.\d+ CHF estimated, .* \(given: 0.2 CHF per kWh, PUE 1.25\)$", lines["price"])
    labels = [label for label, _ in summary_lines(project(events))]
    assert labels[labels.index("energy") :][:6] == ["energy", "", "", "", "emissions", "price"]
    assert [label for label, _ in impact_lines(RUN)] == [""], "nobody gave anything"
    assert impact_lines(runs.search_run()) == [], "no node had a power source"
    begun = with_energy(runs.list_run(until=9.0))
    (per_unit, *_), shown = zip(*impact_lines(begun), strict=True)
    assert per_unit == "" and "per 1,000 samples" in shown[0] and "model" not in "".join(shown)
    assert "no model" in impact(begun).reasons["per_model"]


@pytest.mark.parametrize("energy", [GIVEN, Energy(), Energy(currency="<b>", price_per_kwh=1.0)])
def test_there_is_a_row_for_each_quantity_and_others_are_said_to_be_absent(energy: Energy) -> None:
    events = with_energy(RUN, energy)
    (table,) = cost.tabulate_impact(fold(events), ledger(events))
    emitted, paid = energy.intensity_g_per_kwh is not None, energy.price_per_kwh is not None
    names = ["energy", "electricity", *["emissions"] * emitted, *["price"] * paid]
    assert [str(row[0]).partition(" (")[0] for row in table.rows] == names
    assert ("No emissions: no carbon intensity is given" in table.text) == (not emitted)
    assert ("No price: no price is given" in table.text) == (not paid)
    assert "location-based" in table.text and all("estimated" in row for row in table.rows)


def test_numbers_read_well() -> None:
    spans = ["0.0 s", "9.9 s", "1 min 00 s", "3 min 05 s", "2 h 07 min", "1 d 3 h"]
    assert [duration(s) for s in (0.04, 9.94, 59.6, 185, 7620, 1e5)] == spans
    assert [clock(s) for s in (7, 750, 3723)] == ["0:07", "12:30", "1:02:03"]
    assert [joules(j) for j in (None, 12.34, 41_300.0)] == ["–", "12.3 J", "41.3 kJ"]
    sums = ["0.00", "1,234.57", "0.012", "0.000015"]
    assert [amount(value) for value in (0.0, 1234.567, 0.0123, 1.49e-05)] == sums, "no exponent"
    shown = ["17.9 mgCO2e", "12.3 gCO2e", "5.6 kgCO2e", "2.5 tCO2e"]
    assert [emissions(grams) for grams in (0.0179, 12.34, 5600.0, 2.5e6)] == shown


ENDED = project(RUN)
STATE, USED = ENDED.state, ENDED.ledger
OTHER = {"type": "epoch", "member": "member-0"}
ODD = [event | {"metrics": {"other": 1.0}} if event.items() >= OTHER.items() else event for event in RUN]


def test_the_table_has_each_epoch_of_each_members_lineage_once_with_all_digits() -> None:
    rows, mixed = (list(csv.DictReader(io.StringIO(format_metrics(fold(log))))) for log in (RUN, ODD))
    expected = [(member.id, epoch) for member in STATE.members.values() for epoch in member.history]
    assert [(row["member"], int(row["epoch"])) for row in rows] == [(id, epoch.epoch) for id, epoch in expected]
    for row, (_, epoch) in zip(rows, expected, strict=True):
        assert float(row["valid/accuracy"]) == epoch.metrics["accuracy"]
        assert float(row["train/loss"]) == epoch.train_loss and float(row["t"]) == epoch.t
        assert float(row["train/waited_share"]) == epoch.waited_s / epoch.wall_s
    assert set(EPOCH_COLUMNS) <= set(rows[0])
    for row in mixed:  # metrics that only some report are empty for the others
        assert (row["valid/other"] == "1.0") == (row["valid/accuracy"] == "") == (row["member"] == "member-0")


def test_the_results_agree_with_the_status_and_the_ledger() -> None:
    results = json.loads(json.dumps(make_results(ENDED), allow_nan=False))
    assert results["run"]["state"] == "finished, with failures" and results["run"]["name"] == "digits"
    for row, result in zip(status_rows(ENDED), results["members"], strict=True):
        assert {name: result[name] for name in row} == json.loads(json.dumps(row))
        assert result["params"] == STATE.members[row["member"]].params
    assert results["best"] == ENDED.best.id
    assert STATE.combined is not None and results["combined"]["metrics"] == STATE.combined.metrics
    totals = results["totals"]
    assert totals["cpu_s"] == USED.run.cpu_s and totals["energy_j"] == USED.run.energy_j
    assert sum(of["cpu_s"] for of in totals["roles"].values()) >= totals["cpu_s"] * 0.999
    stop = {"v": 2, "t": RUN[-1]["t"], "type": "run_stopped", "reason": "why"}
    stopped = make_results(project([*RUN[:60], stop]))["run"]
    assert (stopped["state"], stopped["reason"]) == ("stopped", "why")
