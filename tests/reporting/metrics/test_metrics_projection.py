"""What a scrape says: right figures, counters that never fall, a bounded number of series, any name."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from kit.event_dicts import ledger, lines
from kit.run_events import START, Event, list_run, measured, write_run
from kit.task_events import TASKS, make_combined
from local_prometheus import promtool
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from ensemble.meter.ledger_view import MARGIN_S
from ensemble.reporting.metrics.collector import Exposition
from ensemble.reporting.metrics.families import FAMILIES, project
from ensemble.reporting.metrics.scrape import KEPT_S
from ensemble.store import RunDir, RunStatus

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(exposition: Exposition, accept: str = OPENMETRICS) -> Series:
    body, content_type = exposition.render(accept)
    assert content_type.startswith(accept.partition(";")[0] or "text/plain")
    parse = parse_openmetrics if accept else parse_text
    samples = [sample for family in parse(body.decode()) for sample in family.samples]
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(found) == len(samples), "a series was there twice"
    return found


def one(path: Path, most_members: int = 1000, **options: Any) -> Exposition:
    return Exposition(lambda: {"digits": path}, most_members, **options)


def values(series: Series, name: str, by: str = "member") -> dict[str, float]:
    return {dict(labels)[by]: value for (of, labels), value in series.items() if of == name}


def start_over(event: Event) -> Event:
    """The event of processes that were started again, and count from zero."""
    if event["type"] == "feeder" and event["t"] > START + 40.0:
        return {**event, **{name: event[name] // 100 for name in ("prepared", "consumed", "skipped")}}
    if event["type"] == "usage" and event["t"] > START + 60.0:
        return {**event, "cpu_s": max(0.0, event["cpu_s"] - 40.0), "pid": event["pid"] + 1000}
    return event


def resumed(seed: int) -> list[Event]:
    """A run that is killed or stopped after a minute, and goes on; its feeder was replaced before."""
    events = measured(list_run(epochs=30, seed=seed))
    middle, end = START + 60.0, events[-1]["t"]
    for number, t in enumerate(range(1, int(end - START), 3)):
        role = "ray" if number % 40 < 4 or seed % 2 else "orchestrate"
        who = {"v": 2, "type": "usage", "node": "node-0", "pid": 77, "role": role, "member": None}
        events.append({**who, "t": START + t, "cpu_s": 0.5 * t, "origin": "measured"})
    events = [start_over(event) for event in sorted(events, key=lambda event: event["t"])]
    stopped = [{"v": 2, "t": middle - 0.1, "type": "run_stopped", "reason": "request"}] if seed % 2 else []
    before, after = ([e for e in events if (e["t"] > middle) == is_later] for is_later in (False, True))
    return [*before, *stopped, {**events[0], "t": middle, "resumed": True}, *after]


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.more), 1])
def test_counters_never_fall_whoever_reads_the_log_and_end_as_the_ledgers(tmp_path: Path, seed: int) -> None:
    events, rng = resumed(seed), random.Random(seed)
    path = write_run(tmp_path / "run", [])
    counters = {family.name for family in FAMILIES if family.kind == "counter"}
    last: dict[tuple[str, tuple[str, ...]], float] = {}
    status, at = RunStatus.load(RunDir(path)), 1
    while True:
        (path / "events.jsonl").write_bytes(lines(events[:at]))
        status = rng.choice((status, RunStatus.load(RunDir(path))))  # perhaps of a server that was started anew
        status.update()
        now: dict[tuple[str, tuple[str, ...]], float] = {}
        for sample in project("digits", status.state, status.used):
            if sample.family.name in counters:  # a counter goes on where its origin changes
                named = zip(sample.family.labels, sample.labels, strict=True)
                key = (sample.family.name, tuple(value for label, value in named if label != "origin"))
                now[key] = now.get(key, 0.0) + sample.value
        assert [key for key in now if now[key] < last.get(key, 0.0)] == [], f"after {at} of {len(events)} events"
        last |= now
        if at == len(events):
            break
        # Always when it has just been stopped, and when it has just been started again.
        starts = [number for number, event in enumerate(events) if event["type"] in ("run_stopped", "run_started")]
        stops = [each for start in starts for each in (start + 1, start + 2) if each > at]
        at = min([len(events), at + rng.randrange(1, 250), *stops])
    used = ledger(events)
    assert len(used.by_member()) == 8
    for member, total in used.by_member().items():
        assert last["ensemble_member_energy_joules_total", ("digits", member)] == total.energy_j
        assert last["ensemble_member_cpu_seconds_total", ("digits", member)] == total.cpu_s
    for role, total in used.by_role().items():
        assert last.get(("ensemble_run_energy_joules_total", ("digits", role))) == total.energy_j
        assert last.get(("ensemble_run_cpu_seconds_total", ("digits", role)), 0.0) == total.cpu_s
    assert last["ensemble_run_samples_consumed_total", ("digits",)] == used.reuse.consumed


def test_a_member_has_power_while_it_trains_and_energy_with_its_origin(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", list_run(epochs=30, until=30.0))
    series = scrape(one(path))
    watts = {key: value for key, value in series.items() if key[0] == "ensemble_member_power_watts"}
    assert {dict(labels)["origin"] for _, labels in watts} == {"estimated"}
    assert len(watts) == 5 and all(5 < value < 15 for value in watts.values())  # 12 W for a core at 0.93
    assert values(series, "ensemble_node_power_watts", "node").keys() == {"node-0", "node-1"}
    assert set(values(series, "ensemble_stream_queue_level_ratio", "queue")) == {"ring", "workers", "waiting"}
    assert values(series, "ensemble_run_members", "state")["running"] == 5
    ratios = values(series, "ensemble_member_progress_ratio").values()
    assert len(ratios) == 5 and all(0 <= ratio <= 1 for ratio in ratios), "of members that had a place"


def test_every_family_is_seen_in_a_run_and_promtool_finds_no_fault(tmp_path: Path) -> None:
    events = measured(list_run(epochs=30, until=200.0))
    health = {"type": "node_health", "node": "node-0", "free_gb": {"/tmp": 1.0}}
    events += [{"v": 2, "t": events[-1]["t"], **e} for e in (health, {"type": "node_draining", "node": "node-0"})]
    going = scrape(one(write_run(tmp_path / "going", events)))
    made = make_combined(TASKS["gaussian"], ["member-0", "member-1"])
    ended = [e | made if e["type"] == "combined" else e for e in measured(list_run())]
    over = one(write_run(tmp_path / "over", ended))
    labels = {name: tuple(sorted(dict(given))) for name, given in (*going, *scrape(over))}
    assert labels == {family.name: tuple(sorted(family.labels)) for family in FAMILIES}
    assert promtool("check", "metrics", given=over.render("")[0].decode()) == ""


def test_a_members_series_end_five_minutes_after_it(tmp_path: Path) -> None:
    events = list_run(epochs=6)
    until = next(event for event in events if event["type"] == "finished" and event["member"] == "member-0")["t"]
    going = [event for event in events if not event["type"].startswith("run_f")]
    late = {"v": 2, "type": "usage", "node": "node-0", "pid": 1, "role": "orchestrate", "cpu_s": 9.0}
    for wait_s, is_there in ((KEPT_S - 1.0, True), (KEPT_S + 1.0, False)):
        later = [{**late, "member": None, "t": until + wait_s - before_s} for before_s in (MARGIN_S, 0.0)]
        series = scrape(one(write_run(tmp_path / f"{wait_s}", [*going, *later])))
        assert ("member-0" in values(series, "ensemble_member_energy_joules_total")) is is_there
        assert values(series, "ensemble_run_members", "state")["finished"] == 7


def test_a_runs_series_end_five_minutes_after_its_last_event_and_another_log_is_read_anew(tmp_path: Path) -> None:
    path, clock = write_run(tmp_path / "run", list_run()), [time.time()]
    exposition = one(path, clock=lambda: clock[0])
    assert values(scrape(exposition), "ensemble_run_members", "state")["finished"] == 7
    clock[0] += KEPT_S + 1
    assert scrape(exposition) == {}
    os.utime(path / "events.jsonl", (clock[0], clock[0]))  # it goes on
    assert scrape(exposition)
    shutil.rmtree(path)
    assert scrape(exposition) == {}
    write_run(path, list_run(epochs=30, until=30.0))
    os.utime(path / "events.jsonl", (clock[0], clock[0]))
    assert values(scrape(exposition), "ensemble_run_members", "state")["finished"] == 0


def read_states(series: Series) -> dict[tuple[str, str], str]:
    infos = [dict(labels) for name, labels in series if name == "ensemble_member_info"]
    return {(info["run"], info["member"]): info["state"] for info in infos}


def test_of_too_many_members_those_that_train_have_series(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", list_run(epochs=30, until=220.0))
    series = scrape(one(path))
    states = {member: state for (_, member), state in read_states(series).items()}
    training = {member for member, state in states.items() if state == "running"}
    ended = [member for member, state in states.items() if state in ("finished", "failed")]
    assert 0 < len(training) < len(states) and ended
    few, more = (scrape(one(path, most_members=len(training) + further)) for further in (0, 1))
    assert set(values(few, "ensemble_member_progress_ratio")) == training
    assert values(few, "ensemble_members_left_out", "run") == {"digits": len(states) - len(training)}
    assert set(values(more, "ensemble_member_progress_ratio")) == training | {ended[0]}
    assert values(few, "ensemble_run_members", "state") == values(series, "ensemble_run_members", "state")


def test_the_limit_holds_for_all_runs_together_and_a_damaged_log_hides_no_other(tmp_path: Path) -> None:
    paths = {name: write_run(tmp_path / name, list_run()) for name in ("a", "b", "c")}
    series = scrape(Exposition(lambda: paths, most_members=10))
    assert len(read_states(series)) == 10
    assert values(series, "ensemble_members_left_out", "run") == {"a": 0, "b": 6, "c": 8}
    (paths["a"] / "events.jsonl").write_text("not json\n" * 3)
    series = scrape(Exposition(lambda: paths))
    assert set(values(series, "ensemble_run_progress_ratio", "run")) == {"b", "c"}


HOSTILE = ['"} 1\nensemble_run_members{run="x', "a\\", "nul\x00bell\x07", "\x1b[2J", "lone \udc80"]
HOSTILE += ["日本" * 300, ""]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_values_of_labels_and_nothing_else(tmp_path: Path, name: str) -> None:
    names, events = ("name", "member", "node", "objective", "role"), list_run(members=1, epochs=2)
    renamed = [event | {key: name for key in names if key in event} for event in events]
    path, plain = write_run(tmp_path / "run", renamed), scrape(one(write_run(tmp_path / "plain", events)))
    named = Exposition(lambda: {name: path})
    for accept in ("", OPENMETRICS):
        assert {family.name for family in FAMILIES}.issuperset(of for of, _ in scrape(one(path), accept))
        assert not any(letter < 32 and letter != 10 for letter in named.render(accept)[0])
    series = scrape(named)
    assert len(series) <= len(plain)
    assert all(len(value) <= 200 for _, labels in series for _, value in labels)
    assert promtool("check", "metrics", given=named.render("")[0].decode()) == ""
