"""Every view of a run says the same figures, wherever its log has come to."""

from __future__ import annotations

import dataclasses
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
    """A run whose driver was killed, and that went on after an hour."""
    events = list_run()
    kill = next(at for at, event in enumerate(events) if event["type"] == "failed" and event["reason"] == "lost")
    later = [event | {"t": event["t"] + 3600.0} for event in events[kill + 1 :]]
    return [*events[: kill + 1], events[0] | {"t": later[0]["t"], "resumed": True}, *later]


RUNS = {"list": measured(list_run()), "search": search_run(), "resumed": resumed()}


@dataclasses.dataclass
class Figures:
    """What a view says; None where it does not say it."""

    word: str | None = None
    counts: Mapping[str, int] | None = None
    best: tuple[str, float] | None = None
    cpu_s: float | None = None
    energy_j: float | None = None
    states: dict[str, str] | None = None
    epochs: dict[str, int] | None = None
    values: dict[str, float | None] | None = None
    members_cpu_s: dict[str, float] | None = None
    members_full_j: dict[str, float] | None = None

    @classmethod
    def of_rows(cls, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Those of members, from rows as `ensemble status --json` has them."""
        return {
            "states": {row["member"]: row["state"] for row in rows},
            "epochs": {row["member"]: row["epoch"] for row in rows},
            "values": {row["member"]: row["metric"] for row in rows},
            "members_cpu_s": {row["member"]: row["cpu_s"] for row in rows if row["cpu_s"]},
            "members_full_j": {row["member"]: row["full_energy_j"] for row in rows if row["full_energy_j"]},
        }


def read_views(run_dir: RunDir, events: list[Event], reader: LogReader, capsys: Any) -> dict[str, Figures]:
    """What each view says of the run in a directory."""
    path = str(run_dir.path)
    assert main(["status", path, "--json", "-"]) == 0
    command = json.loads(capsys.readouterr().out)
    page = reader.read().view.state_document()
    members = [dict(zip(page["members"]["columns"], row, strict=True)) for row in page["members"]["rows"].values()]
    cost = {
        name: dict(zip(page["cost"]["members"]["columns"], row, strict=True))
        for name, row in page["cost"]["members"]["rows"].items()
    }
    [listed] = ensemble.list_runs(path)
    compared = read_declared(path).as_row("one")
    run = RunProjection(fold(events), ledger(events), reader.view.driver)
    found = make_results(run)
    end = describe_end(run)

    def best(member: str | None, value: float | None) -> tuple[str, float] | None:
        return None if member is None or value is None else (member, value)

    return {
        "command": Figures(**Figures.of_rows(command)),
        "handle": Figures(**Figures.of_rows(ensemble.attach(path).status())),
        "page": Figures(
            word=page["run"]["state"]["word"],
            counts=page["run"]["counts"],
            best=page["run"]["best"] and best(*page["run"]["best"].values()),
            cpu_s=page["run"]["used"]["cpu_s"],
            energy_j=page["run"]["used"]["energy_j"],
            states={row["id"]: row["state"] for row in members},
            epochs={row["id"]: row["epoch"] for row in members},
            values={row["id"]: row["metric"] for row in members},
            members_cpu_s={name: row["cpu_s"] for name, row in cost.items() if row["cpu_s"]},
            members_full_j={name: row["full_energy_j"] for name, row in cost.items() if row["full_energy_j"]},
        ),
        "list": Figures(
            word=listed["state"],
            best=best(listed["best_member"], listed["best"]),
            cpu_s=listed["cpu_s"],
            energy_j=listed["energy_j"],
        ),
        "comparison": Figures(
            word=compared["state"],
            best=best(compared["best_member"], compared["best"]),
            cpu_s=compared["cpu_s"],
            energy_j=compared["energy_j"],
        ),
        "results.json": Figures(
            word=found["run"]["state"],
            cpu_s=found["totals"]["cpu_s"],
            energy_j=found["totals"]["energy_j"],
            **Figures.of_rows(found["members"]),
        ),
        "loggers": Figures(
            cpu_s=end.values.get("cost/cpu_s"),
            energy_j=end.values.get("cost/energy_j"),
            epochs={name: member.epochs for name, member in end.members.items()},
            members_cpu_s={
                name: member.values["cost/cpu_s"]
                for name, member in end.members.items()
                if member.values["cost/cpu_s"]
            },
        ),
    }


def check_texts(run_dir: RunDir, run: RunProjection) -> None:
    """The same figures as text: closing lines, the line of progress, a notebook's table."""
    closing, line, table = summary_text(run_dir, members=99), head_line(run.state, None), run_html(run_dir)
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


def check_metrics(state: Any, events: list[Event], figures: Figures) -> None:
    """A scrape has the same counts and the same best, and what is settled of the rest: all of it in the end."""
    account = LedgerView()
    for event in events:
        account.apply(typed(event))
    samples = list(project("run", state, account))
    by_family = {
        name: [sample for sample in samples if sample.family.name == name]
        for name in {s.family.name for s in samples}
    }
    said = {sample.labels[1]: int(sample.value) for sample in by_family["ensemble_run_members"] if sample.value}
    logged = RunProjection(state).counts
    assert said == {("waiting" if name == "measuring" else name): many for name, many in logged.items()} or (
        said["waiting"] == logged["waiting"] + logged["measuring"]
    )
    assert [s.value for s in by_family.get("ensemble_run_best_objective", [])] == (
        [figures.best[1]] if figures.best else []
    )
    cpu_s = sum(sample.value for sample in by_family.get("ensemble_run_cpu_seconds_total", []))
    energies = by_family.get("ensemble_run_energy_joules_total", [])
    energy_j = sum(s.value for s in energies if s.labels[1] not in ("idle", "other"))
    known_j = figures.energy_j or 0.0
    if state.ended is not None:
        assert cpu_s == pytest.approx(figures.cpu_s, rel=1e-9) and energy_j == pytest.approx(known_j, rel=1e-9)
    assert cpu_s <= (figures.cpu_s or 0.0) * (1 + 1e-9) and energy_j <= known_j * (1 + 1e-9)


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
        for field in dataclasses.fields(Figures):
            said = {of: getattr(view, field.name) for of, view in views.items()}
            known = {of: value for of, value in said.items() if value is not None}
            first = next(iter(known.values()), None)
            for of, value in known.items():
                assert same(value, first), (
                    f"{field.name} at {end} of {len(events)} events: {of} and {next(iter(known))}"
                )
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
