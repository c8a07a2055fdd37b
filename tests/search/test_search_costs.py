"""A search with a second objective: what the log says that a trial has cost is what the study is told."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from event_dicts import apply_event, fold, ledger, read_events, write_study
from hypothesis import given
from hypothesis import strategies as st
from optuna.study import StudyDirection
from property_examples import examples
from studies import read_study
from test_search_failures import declared, run

from ensemble.api import resume, submit
from ensemble.reporting.ranking import front_members
from ensemble.run import make_result
from ensemble.search.searcher import Searcher
from ensemble.spec import Ensemble, Search, SpecError, choice, loguniform
from ensemble.store import RunDir, RunState

SPACE = {"lr": loguniform(1e-3, 1.0), "width": choice(4, 8, 16)}
BOTH = [StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"second_objective": "joules"}, "Search.second_objective cannot be 'joules'.*valid: energy_j, cpu_s"),
        ({"sampler": "cmaes"}, r"needs a sampler of two objectives \(valid: tpe, random, grid, gp\), not 'cmaes'"),
        ({"pruner": "hyperband"}, "needs pruner='none' or no pruner: Optuna prunes by one objective only"),
        ({"pruner": {"name": "patience"}}, "needs pruner='none' or no pruner"),
        ({"objective": "gain"}, "needs objective='metric'"),
    ],
)
def test_what_two_objectives_do_not_go_with_is_refused_in_a_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        Search(SPACE, **{"second_objective": "energy_j", **options})
    assert "\n" not in str(caught.value)


def test_a_search_with_two_objectives_has_no_pruner_and_one_with_one_has_hyperband() -> None:
    assert Search(SPACE).pruner_options["name"] == "hyperband"
    assert Search(SPACE, pruner="none", second_objective="cpu_s").pruner_options == {"name": "none"}
    two = Search(SPACE, second_objective="energy_j")
    assert two.pruner_options == {"name": "none"}
    assert pickle.loads(pickle.dumps(two)) == two


def cost_of(params: dict[str, Any]) -> float:
    return float(params["width"]) + params["lr"]


class Run:
    """Trials that finish one after another, two at a time: the cost of each is known when the next has begun."""

    def __init__(self, search: Search, storage: Any = None, events: list[dict[str, Any]] | None = None) -> None:
        self.search, self.state = search, RunState()
        self.events: list[dict[str, Any]] = []
        self.searcher = Searcher(search, direction="max", epochs=1, storage=storage)
        header = {"name": "s", "run_id": "r", "mode": "search", "objective": "accuracy", "direction": "max"}
        first = {"type": "run_started", **header, "second_objective": search.second_objective}
        for event in events or [first]:
            self.log(**event)
        self.searcher.restore(self.state)

    def log(self, **event: Any) -> None:
        event = {"v": 2, "t": float(len(self.events)), **event}
        self.events.append(event)
        apply_event(self.state, event)

    def go_on(self) -> Run:
        """Whatever is missing, in its order: a declaration, an end, the cost of the trial before."""
        members = self.state.members
        while True:
            ended = [m for m in members.values() if m.state == "finished"]
            owed = [m for m in ended if m.cost is None]
            if len(members) == len(ended) < self.searcher.trials:
                number = len(members)
                self.log(type="member", member=f"member-{number}", number=number, params=self.searcher.ask(number))
            elif owed:
                member = owed[0]
                figures = {"energy_j": cost_of(member.params), "energy_origin": "estimated", "cpu_s": 1.0}
                self.log(type="cost", member=member.id, attempt=0, **figures)
                self.searcher.tell(member.number, "finished", member.metrics["accuracy"], member.cost)
            elif len(members) > len(ended):
                member = next(m for m in members.values() if m.state != "finished")
                metrics = {"accuracy": member.params["width"] / (1 + member.params["lr"])}
                self.log(type="finished", member=member.id, attempt=0, metrics=metrics)
            else:
                self.searcher.catch_up()
                return self


def show(study: optuna.Study) -> list[tuple[Any, ...]]:
    return [(trial.number, trial.state.name, trial.values) for trial in study.trials]


WHOLE: dict[str, Run] = {}


def whole(sampler: str) -> Run:
    if sampler not in WHOLE:
        space = {"lr": choice(0.1, 0.2, 0.4, 0.8), "width": SPACE["width"]} if sampler == "grid" else SPACE
        search = Search(space, trials=14, sampler=sampler, seed=3, second_objective="energy_j")
        WHOLE[sampler] = Run(search).go_on()
    return WHOLE[sampler]


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid", pytest.param("gp", marks=pytest.mark.slow)])
@examples(3)
@given(share=st.floats(0.0, 1.0))
def test_a_search_of_two_objectives_goes_on_as_if_it_had_not_been_interrupted(sampler: str, share: float) -> None:
    expected = whole(sampler)
    resumed = Run(expected.search, events=expected.events[: max(1, int(share * len(expected.events)))]).go_on()
    params = [member.params for member in resumed.state.members.values()]
    assert params == [member.params for member in expected.state.members.values()]
    assert show(resumed.searcher.study) == show(expected.searcher.study)


@pytest.mark.filterwarnings("ignore:PedAnovaImportanceEvaluator computes:UserWarning")  # of low values: as meant
def test_the_sampler_learns_from_both() -> None:
    study = whole("tpe").searcher.study
    assert study.directions == BOTH
    members = whole("tpe").state.members.values()
    assert [trial.values for trial in study.trials] == [
        [member.metrics["accuracy"], cost_of(member.params)] for member in members
    ]
    assert [trial.number for trial in study.best_trials] == sorted(
        member.number for member in front_members(whole("tpe").state)
    )
    importances = optuna.importance.get_param_importances(study, target=lambda trial: trial.values[1])
    assert set(importances) == {"lr", "width"}


def test_the_study_on_disk_has_two_directions_and_the_values_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "optuna.journal"
    search = Search(SPACE, trials=6, sampler="random", second_objective="energy_j")
    followed = Run(search, storage=path).go_on()
    study = read_study(path, "s")
    assert study.directions == BOTH and study.metric_names == ["accuracy", "energy_j"]
    assert study.user_attrs["energy_origin"] == "estimated"
    assert show(study) == show(followed.searcher.study)
    assert [trial.user_attrs["energy_j"] for trial in study.trials] == [trial.values[1] for trial in study.trials]
    size = path.stat().st_size
    assert show(write_study(followed.events, path)) == show(study)
    assert path.stat().st_size == size, "nothing new, nothing written"
    for cut in range(1, len(followed.events) + 1):
        begun = write_study(followed.events[:cut], tmp_path / "again")
        assert begun.directions == BOTH
    assert show(begun) == show(study) and begun.user_attrs == study.user_attrs


def test_a_trial_runs_in_the_study_until_its_cost_is_logged_and_fails_without_one() -> None:
    events = Run(Search(SPACE, trials=1, second_objective="energy_j")).go_on().events
    assert [event["type"] for event in events] == ["run_started", "member", "finished", "cost"]
    unknown = [*events[:-1], {**events[-1], "energy_j": None, "energy_origin": "unavailable"}]
    seen = [
        [trial.state.name for trial in write_study(each, None).trials] for each in (events[:-1], unknown, events)
    ]
    assert seen == [["RUNNING"], ["FAIL"], ["COMPLETE"]]
    restored = Run(Search(SPACE, trials=1, second_objective="energy_j"), events=unknown).searcher.study
    assert [trial.state.name for trial in restored.trials] == ["FAIL"]


def test_a_study_of_one_objective_is_written_anew_for_two(tmp_path: Path) -> None:
    events = Run(Search(SPACE, trials=2, second_objective="energy_j")).go_on().events
    one = [{**events[0], "second_objective": None}, *events[1:]]
    assert write_study(one[:2], tmp_path / "journal").directions == BOTH[:1]
    assert write_study(events[:2], tmp_path / "journal").directions == BOTH
    assert write_study(one, tmp_path / "journal").directions == BOTH[:1]
    assert show(write_study(events, tmp_path / "journal")) == show(write_study(events, None))


# -- whole runs ------------------------------------------------------------------------------------------------


def two_objectives(second_objective: str = "energy_j", trials: int = 3) -> Ensemble:
    search = Search({"lr": loguniform(1e-2, 1.0)}, trials=trials, second_objective=second_objective)
    return replace(declared({"lr": 0.1}, 1, epochs=1), search=search)


def told(path: Path) -> list[tuple[str, list[float] | None]]:
    """(state, values) of each trial of the study on disk."""
    return [(trial.state.name, trial.values) for trial in read_study(path / "optuna.journal", "failures").trials]


def logged_costs(path: Path) -> dict[str, dict[str, Any]]:
    return {event["member"]: event for event in read_events(path / "events.jsonl") if event["type"] == "cost"}


def test_a_run_is_told_what_its_log_says_and_a_resume_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run"
    state = run(path, two_objectives())
    costs = logged_costs(path)
    assert list(costs) == ["member-0", "member-1", "member-2"]
    assert all(cost["energy_j"] > 0 and cost["cpu_s"] > 0 for cost in costs.values())
    values = [("COMPLETE", [m.metrics["accuracy"], costs[m.id]["energy_j"]]) for m in state.members.values()]
    assert told(path) == values
    assert make_result(RunDir(path)).front == [member.id for member in front_members(state)] != []

    lines = (path / "events.jsonl").read_bytes().splitlines(keepends=True)
    at = [i for i, line in enumerate(lines) if b'"type":"cost"' in line]
    for case, cut in enumerate(
        (at[0], at[1], at[2], at[2] + 1)
    ):  # a trial had finished, its cost was not logged yet
        broken_off = tmp_path / f"broken-{case}"
        shutil.copytree(path, broken_off)
        (broken_off / "events.jsonl").write_bytes(b"".join(lines[:cut]))
        resume(broken_off, executor="inline").wait()
        again = logged_costs(broken_off)
        assert list(again) == list(costs), "each once"
        kept = [event for event in read_events(path / "events.jsonl")[:cut] if event["type"] == "cost"]
        assert [again[event["member"]] for event in kept] == kept
        found = fold(read_events(broken_off / "events.jsonl")).members.values()
        assert told(broken_off) == [
            ("COMPLETE", [member.metrics["accuracy"], again[member.id]["energy_j"]]) for member in found
        ]


def test_a_cost_is_what_the_account_says_when_all_of_it_is_logged(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(path, two_objectives("cpu_s", 2))
    rows = {row["member"]: row for row in make_result(RunDir(path)).members}
    assert {member: cost["cpu_s"] for member, cost in logged_costs(path).items()} == {
        member: row["cpu_s"] for member, row in rows.items()
    }
    assert [values for _, values in told(path)] == [[row["metric"], row["cpu_s"]] for row in rows.values()]


@pytest.mark.parametrize("executor", ["inline", pytest.param("local", marks=pytest.mark.more)])
def test_the_joules_of_a_trial_are_those_of_the_ledger(tmp_path: Path, executor: str) -> None:
    path = tmp_path / "run"
    submit(two_objectives(), path, executor).wait()
    events = read_events(path / "events.jsonl")
    used = ledger(events).by_member()
    for member, cost in logged_costs(path).items():
        assert cost["energy_j"] == pytest.approx(used[member].energy_j, rel=0.02)
        at = events.index(cost)
        seen = next(t for t in range(at, 0, -1) if events[t].get("role") == "orchestrate")
        ends = [t for t in range(at) if (events[t]["type"], events[t].get("member")) == ("finished", member)]
        assert seen > max(ends), "what the driver has used since is not spread over the trial later"


def test_a_search_that_minimizes_joules_stops_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ensemble.meter.power.meter.open_power_sources", lambda *_, **__: [])
    monkeypatch.setattr("ensemble.controller.costs.WAIT_S", 0.0)
    path = tmp_path / "run"
    state = run(path, two_objectives(trials=50))
    assert state.ended is not None and state.ended.type == "run_stopped"
    assert "member-0 has no joules, which the search minimizes: no power source" in state.ended.reason
    assert len(state.members) < 10 and logged_costs(path)["member-0"]["energy_j"] is None
    assert told(path)[0] == ("FAIL", None)
    assert make_result(RunDir(path)).front == []
    assert len(run(tmp_path / "cpu", two_objectives("cpu_s", 2)).members) == 2, "CPU-seconds are known anywhere"
