"""Every view of a run says the same figures, wherever its log has come to."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.event_dicts import fold, ledger, lines, typed
from kit.property_examples import examples
from kit.run_events import Event, list_run, measured, search_run

import ensemble
from ensemble.cli.parser import main
from ensemble.meter import LedgerView
from ensemble.reporting import RunProjection, summary_text, text
from ensemble.reporting.comparison.compare import read_declared
from ensemble.reporting.dashboard.feed import LogReader
from ensemble.reporting.loggers.points import describe_end
from ensemble.reporting.metrics.families import project
from ensemble.reporting.notebook import run_html
from ensemble.reporting.progress import head_line
from ensemble.reporting.results import make_results
from ensemble.store import RunDir, RunStatus


def resumed() -> list[Event]:
    events = list_run()
    kill = next(at for at, event in enumerate(events) if event["type"] == "failed" and event["reason"] == "lost")
    later = [event | {"t": event["t"] + 3600.0} for event in events[kill + 1 :]]
    return [*events[: kill + 1], events[0] | {"t": later[0]["t"], "resumed": True}, *later]


RUNS = {"list": measured(list_run()), "search": search_run(), "resumed": resumed()}


def of_rows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = {"states": "state", "epochs": "epoch", "values": "metric"}
    used = {"members_cpu_s": "cpu_s", "members_full_j": "full_energy_j"}
    found = {of: {row["member"]: row[name] for row in rows} for of, name in names.items()}
    return found | {of: {row["member"]: row[name] for row in rows if row[name]} for of, name in used.items()}


def of_run(row: Mapping[str, Any], word: str | None, best: tuple[Any, Any] | None) -> dict[str, Any]:
    shown = best if best is not None and None not in best else None
    return {"word": word, "best": shown, "cpu_s": row["cpu_s"], "energy_j": row["energy_j"]}


def read_views(run_dir: RunDir, events: list[Event], reader: LogReader, capsys: Any) -> dict[str, dict[str, Any]]:
    """What each view says of the run in a directory: figures by their names, as far as it says them."""
    path = str(run_dir.path)
    assert main(["status", path, "--json", "-"]) == 0
    command = json.loads(capsys.readouterr().out)
    page = reader.read().view.state_document()
    cost, on_page = page["cost"]["members"], []
    for cells in page["members"]["rows"].values():
        row = dict(zip(page["members"]["columns"], cells, strict=True))
        used = dict(zip(cost["columns"], cost["rows"].get(row["id"], []), strict=False))
        of_cost = {name: used.get(name) for name in ("cpu_s", "full_energy_j")}
        on_page.append({"member": row["id"], **row, **of_cost})
    [listed] = ensemble.list_runs(path)
    compared = read_declared(path).as_row("one")
    run = RunProjection(fold(events), ledger(events), reader.view.driver)
    found, end, shown = make_results(run), describe_end(run), page["run"]
    cpu_s = {name: member.values["cost/cpu_s"] for name, member in end.members.items()}
    return {
        "command": of_rows(command),
        "handle": of_rows(ensemble.attach(path).status()),
        "page": of_run(shown["used"], shown["state"]["word"], shown["best"] and tuple(shown["best"].values()))
        | {"counts": shown["counts"], **of_rows(on_page)},
        "list": of_run(listed, listed["state"], (listed["best_member"], listed["best"])),
        "comparison": of_run(compared, compared["state"], (compared["best_member"], compared["best"])),
        "results.json": of_run(found["totals"], found["run"]["state"], None) | of_rows(found["members"]),
        "loggers": {name: end.values.get(f"cost/{name}") for name in ("cpu_s", "energy_j")}
        | {"epochs": {name: member.epochs for name, member in end.members.items()}}
        | {"members_cpu_s": {name: value for name, value in cpu_s.items() if value}},
    }


def check_texts(run_dir: RunDir, run: RunProjection) -> None:
    """The same figures as text: closing lines, the line of progress, a notebook's table."""
    closing, line, table = summary_text(run_dir, everything=True), head_line(run.state, None), run_html(run_dir)
    if run.used.cpu_s:
        assert f"{text.cpu(sum(run.ledger.cpu_by_role().values()))}: " in closing
    if run.used.energy_j is not None:
        assert f"{text.joules(run.used.energy_j)} {run.used.origin}" in closing
    finished, all_of_them = run.counts["finished"], run.counts.total()
    assert f"{finished}/{all_of_them} finished" in line
    for member in run.state.members.values():
        assert member.id in closing and f"<td>{member.id}</td>" in table
    if run.best is not None:
        shown = text.score(run.best_value)
        assert f"best {run.best.id} {run.state.objective} {shown}" in line and shown in closing and shown in table


def check_metrics(state: Any, events: list[Event], figures: dict[str, Any]) -> None:
    """A scrape has the same counts and the same best, and what is settled of the rest: all of it in the end."""
    account = LedgerView()
    for event in events:
        account.apply(typed(event))
    by_family: dict[str, list[Any]] = {}
    for sample in project("run", state, account):
        by_family.setdefault(sample.family.name, []).append(sample)
    counts = {sample.labels[1]: int(sample.value) for sample in by_family["ensemble_run_members"] if sample.value}
    assert counts == dict(RunProjection(state).counts)
    best = [sample.value for sample in by_family.get("ensemble_run_best_objective", [])]
    assert best == ([figures["best"][1]] if figures["best"] else [])
    cpu_s = sum(sample.value for sample in by_family.get("ensemble_run_cpu_seconds_total", []))
    energies = by_family.get("ensemble_run_energy_joules_total", [])
    energy_j = sum(s.value for s in energies if s.labels[1] not in ("idle", "other"))
    known_j = figures["energy_j"] or 0.0
    if state.ended is not None:
        assert cpu_s == pytest.approx(figures["cpu_s"], rel=1e-9) and energy_j == pytest.approx(known_j, rel=1e-9)
    assert cpu_s <= (figures["cpu_s"] or 0.0) * (1 + 1e-9) and energy_j <= known_j * (1 + 1e-9)


@settings(examples(9), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(RUNS)),
    cuts=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3).map(sorted),
    is_lost=st.booleans(),
)
def test_every_view_says_the_same_at_any_prefix_of_the_log(
    name: str, cuts: list[float], is_lost: bool, tmp_path_factory: pytest.TempPathFactory, capsys: Any
) -> None:
    run_dir = RunDir(tmp_path_factory.mktemp("run"))
    host = {"host": socket.gethostname(), "pid": 2**22 + 1} if is_lost else {}  # no process has such a number
    events = [event | host if event["type"] == "run_started" else event for event in RUNS[name]]
    reader, written = LogReader(run_dir), 0
    for cut in cuts:
        end = max(1, round(cut * len(events)))
        with open(run_dir.events, "ab") as log:
            log.write(lines(events[written:end]))
        written = end
        shown = events[:end]
        views = read_views(run_dir, shown, reader, capsys)
        run = RunProjection(fold(shown), ledger(shown), reader.view.driver)
        assert (reader.view.driver is not None) == (is_lost and run.state.ended is None)
        for figure in set().union(*views.values()):
            shown_by = {of: view[figure] for of, view in views.items() if view.get(figure) is not None}
            odd = [of for of, value in shown_by.items() if not same(value, next(iter(shown_by.values())))]
            assert odd == [], f"{figure} at {end} of {len(events)} events: {next(iter(shown_by))} has another"
        check_texts(run_dir, run)
        check_metrics(run.state, shown, views["page"])
        if end % 2:  # a snapshot of the controller's changes nothing
            status = RunStatus.load(run_dir)
            status.update()
            status.save_if_grown()


def same(one: Any, other: Any) -> bool:
    """Whether figures are the same; a page has nine digits of them."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == pytest.approx(other, rel=1e-8) if isinstance(one, float) else one == other
