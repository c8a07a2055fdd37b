"""A search of several objectives: what the log says of a trial is what the study is told, costs too."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import optuna
import pytest
import small_run
from hypothesis import given
from hypothesis import strategies as st
from kit.event_dicts import fold, ledger, read_events
from kit.property_examples import examples
from optuna.study import StudyDirection
from small_run import loss, run
from studies import read_study
from test_search_failures import declared

from ensemble.api import resume
from ensemble.controller.starts import make_trials
from ensemble.reporting.ranking import front_members
from ensemble.reporting.sections.training import summarize_search
from ensemble.run import make_result
from ensemble.search.foreign import compute_constraints
from ensemble.spec import Ensemble, Recipe, Search, SpecError, choice, loguniform
from ensemble.store import RunDir, RunState

SPACE = {"lr": loguniform(1e-3, 1.0), "width": choice(4, 8, 16)}


def wide_model(params: dict[str, Any]) -> Any:
    from torch import nn

    width = params["width"]
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 2))


BOTH = [StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE]


def cost_of(params: dict[str, Any]) -> float:
    return float(params["width"]) + params["lr"]


class Run(small_run.Run):
    """Trials that finish one after another, two at a time: the cost of each is known when the next has begun."""

    epochs = 1

    def go_on(self) -> Run:
        """Whatever is missing, in its order: a declaration, an end, the cost of the trial before."""
        members, has_costs = self.state.members, any(each.is_cost for each in self.search.objectives)
        while True:
            ended = [m for m in members.values() if m.state == "finished"]
            owed = [m for m in ended if m.cost is None] if has_costs else []
            if len(members) == len(ended) < self.searcher.trials:
                number = self.searcher.next_number
                self.log(type="member", member=f"member-{number}", number=number, params=self.searcher.ask(number))
            elif owed:
                figures = {"energy_j": cost_of(owed[0].params), "energy_origin": "estimated", "cpu_s": 1.0}
                self.log(type="cost", member=owed[0].id, attempt=0, **figures)
                self.tell(owed[0])
            elif len(members) > len(ended):
                member = next(m for m in members.values() if m.state != "finished")
                metrics = figures_of(member.params)
                violated = compute_constraints(self.search, member.number, metrics)
                self.log(type="finished", member=member.id, attempt=0, metrics=metrics, constraints=violated)
                if not has_costs:
                    self.tell(member)
            else:
                self.searcher.flush()
                return self

    def tell(self, member: Any) -> None:
        value, known = member.metrics["accuracy"], (member.cost, member.metrics, member.constraints)
        self.searcher.tell(member.number, "finished", value, *known)


def figures_of(params: dict[str, Any]) -> dict[str, float]:
    accuracy = params["width"] / (1 + params["lr"])
    return {"accuracy": accuracy, "nll": 1 / (0.1 + params["lr"]), "price": -abs(params["lr"] - 0.3)}


def show(study: optuna.Study) -> list[tuple[Any, ...]]:
    return [(trial.number, trial.state.name, trial.values) for trial in study.trials]


def branching(trial: Any) -> dict[str, Any]:
    """A space of which the one half has a hyperparameter more, and hyperparameters that nobody asked for."""
    width = trial.suggest_int("width", 4, 16)
    lr = trial.suggest_float("lr", 0.01, 1.0) if width > 8 else trial.suggest_float("small", 0.01, 0.1)
    return {"width": width, "lr": lr, "widths": [width, width]}


NSGA2, NSGA3 = ({"name": name, "population_size": 5} for name in ("nsga2", "nsga3"))
RARE = {"metric": "rare", "mode": "max"}
PRICE = {"metric": "price", "mode": "max"}
NARROW = {"further_objectives": ["nll"], "constraints": lambda metrics: {"narrow": metrics["accuracy"] - 6.0}}
SEARCHES: dict[str, dict[str, Any]] = {
    **{name: {"sampler": name} for name in ("tpe", "random", "gp")},
    "grid": {"sampler": "grid", "space": {"lr": choice(0.1, 0.2, 0.4, 0.8), "width": SPACE["width"]}},
    "nsga2": {"sampler": NSGA2, "further_objectives": ["nll"]},
    "nsga2 of joules, with conditions": {"sampler": NSGA2, "space": branching},
    "nsga3 of three": {"sampler": NSGA3, "further_objectives": ["nll", PRICE]},
    "nsga3 with a guess": {"sampler": NSGA3, "further_objectives": ["nll", "energy_j"], "enqueue": [{"width": 8}]},
    "tpe of three": {"sampler": "tpe", "further_objectives": [PRICE, "energy_j"]},
    **{f"{name} with constraints": NARROW | {"sampler": how} for name, how in (("tpe", "tpe"), ("nsga2", NSGA2))},
}
WHOLE: dict[str, Run] = {}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Makes the whole run of one of `SEARCHES`."""

    def make(case: str) -> Run:
        if case not in WHOLE:
            options = {"space": SPACE, "trials": 14, "seed": 3, "further_objectives": ["energy_j"]}
            journal = tmp_path_factory.mktemp("whole") / "journal"
            WHOLE[case] = Run(Search(**{**options, **SEARCHES[case]}), journal).go_on()
        return WHOLE[case]

    return make


CASES = [pytest.param(name, marks=pytest.mark.slow) if name == "gp" else name for name in SEARCHES]


@pytest.mark.parametrize("case", CASES)
@examples(3)
@given(share=st.floats(0.0, 1.0), is_logged=st.booleans())
def test_a_search_of_several_objectives_killed_at_any_byte_goes_on_as_if_it_had_not_been(
    case: str, share: float, is_logged: bool, whole: Callable[[str], Run], tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = whole(case)
    journal = tmp_path_factory.mktemp("killed") / "journal"
    at = int(share * expected.journal.stat().st_size)
    resumed = expected.killed(at, journal, is_logged=is_logged).go_on()
    params = [member.params for member in resumed.state.members.values()]
    assert params == [member.params for member in expected.state.members.values()]
    assert show(resumed.searcher.study) == show(expected.searcher.study)
    assert resumed.searcher.study.trials[0].constraints == expected.searcher.study.trials[0].constraints


@pytest.mark.parametrize("case", CASES)
def test_the_front_is_that_of_optuna_and_keeps_the_constraints(case: str, whole: Callable[[str], Run]) -> None:
    run = whole(case)
    study, front = run.searcher.study, front_members(run.state)
    values = [[member.value_of(each) for each in run.state.objectives] for member in run.state.members.values()]
    assert [trial.values for trial in study.trials] == values
    assert [trial.number for trial in study.best_trials] == sorted(member.number for member in front)
    if "constraints" in case:
        assert len(front) > 0 and all(member.metrics["accuracy"] <= 6.0 for member in front)
        assert any(member.metrics["accuracy"] > 6.0 for member in run.state.members.values())


@pytest.mark.parametrize("case", ["nsga2", "nsga3 of three", "nsga2 of joules, with conditions"])
def test_a_genetic_sampler_breeds_from_its_generations(case: str, whole: Callable[[str], Run]) -> None:
    expected = whole(case)
    study = expected.searcher.study
    (key,) = {name for trial in study.trials for name in trial.system_attrs if name.endswith(":generation")}
    generations = [trial.system_attrs[key] for trial in study.trials]
    assert generations[:5] == [0] * 5 and generations == sorted(generations) and generations[-1] >= 2
    random = Run(Search(SPACE, trials=14, seed=3, sampler="random", further_objectives=["nll"])).go_on()
    ours, drawn = ([m.params["width"] for m in run.state.members.values()][5:] for run in (expected, random))
    assert ours != drawn


def test_what_a_constraint_says_is_kept_and_without_it_nobody_is_on_the_front(whole: Callable[[str], Run]) -> None:
    expected = whole("tpe with constraints")
    changed = replace(expected.search, constraints=lambda metrics: {"narrow": 1 / 0})
    study = Run(changed, expected.journal, expected.events).searcher.study
    narrow = [{"narrow": member.metrics["accuracy"] - 6.0} for member in expected.state.members.values()]
    assert [trial.constraints for trial in study.trials] == narrow, "it is not asked again"
    events = expected.events
    gone = front_members(fold(events))[0].id
    for kind, change in (("finished", {"constraints": None}), ("member", {"outside": "as told"})):
        without = [{**e, **change} if (e["type"], e.get("member")) == (kind, gone) else e for e in events]
        assert gone not in {member.id for member in front_members(fold(without))}


def test_constraints_are_of_members_from_outside_too_and_an_infinite_one_holds_or_not(tmp_path: Path) -> None:
    search = Search({"lr": loguniform(1e-2, 1.0)}, trials=3, constraints=lambda metrics: {"c": 1 / 0})
    trials = make_trials(replace(two_objectives(), search=search), RunDir(tmp_path), RunState(), sharing=False)
    trials.next()
    trials.final(trials.add({"lr": 50.0}).number, {"accuracy": 0.5})
    assert "Search.constraints of member-1" in str(trials.abort_reason)
    for excess, holds in ((math.inf, False), (-math.inf, True), (math.nan, False)):
        search = Search(
            SPACE, further_objectives=["nll"], constraints=lambda metrics, excess=excess: {"c": excess}
        )
        (value,) = (compute_constraints(search, 0, {}) or {}).values()
        assert math.isfinite(value) and (value <= 0) == holds


def test_the_study_on_disk_has_two_directions_and_the_values_of_the_log(tmp_path: Path) -> None:
    search = Search(SPACE, trials=6, sampler="random", further_objectives=["energy_j"])
    followed = Run(search, tmp_path / "journal").go_on()
    study = read_study(tmp_path / "journal", "s")
    assert study.directions == BOTH and study.metric_names == ["accuracy", "energy_j"]
    assert show(study) == show(followed.searcher.study)
    shown = [(trial.user_attrs["energy_j"], trial.user_attrs["energy_origin"]) for trial in study.trials]
    assert shown == [(trial.values[1], "estimated") for trial in study.trials]
    with pytest.raises(SpecError, match="optimizes accuracy, energy_j, and the search accuracy, or"):
        Run(Search(SPACE, trials=6), tmp_path / "journal", followed.events)


def test_a_trial_runs_in_the_study_until_its_cost_is_logged_and_fails_without_one(tmp_path: Path) -> None:
    search = Search(SPACE, trials=1, further_objectives=["energy_j"])
    whole = Run(search, tmp_path / "journal").go_on()
    assert [event["type"] for event in whole.events] == ["run_started", "member", "finished", "cost"]
    before = whole.killed(whole.sizes[2], tmp_path / "before").searcher
    assert [trial.state.name for trial in before.study.trials] == ["RUNNING"] or whole.sizes[2] == whole.sizes[3]
    unknown = [*whole.events[:-1], {**whole.events[-1], "energy_j": None, "energy_origin": "unavailable"}]
    (tmp_path / "unknown").write_bytes((tmp_path / "journal").read_bytes()[: whole.sizes[-1]])
    Run(search, tmp_path / "unknown", unknown)
    seen = [read_study(tmp_path / name, "s").trials[0].state.name for name in ("unknown", "journal")]
    assert seen == ["FAIL", "COMPLETE"]


def two_objectives(further: str = "energy_j", trials: int = 3) -> Ensemble:
    search = Search({"lr": loguniform(1e-2, 1.0)}, trials=trials, further_objectives=[further])
    return replace(declared({"lr": 0.1}, 1, epochs=1), search=search)


def told(path: Path) -> list[tuple[str, list[float] | None]]:
    """(state, values) of each trial of the study on disk."""
    return [(trial.state.name, trial.values) for trial in read_study(path / "optuna.journal", "failures").trials]


def logged_costs(path: Path) -> dict[str, dict[str, Any]]:
    return {event["member"]: event for event in read_events(path / "events.jsonl") if event["type"] == "cost"}


def test_a_run_is_told_what_its_log_says_and_a_resume_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run"
    state = run(path, two_objectives())
    events, costs = read_events(path / "events.jsonl"), logged_costs(path)
    assert list(costs) == ["member-0", "member-1", "member-2"]
    assert all(cost["energy_j"] > 0 and cost["cpu_s"] > 0 for cost in costs.values())
    used = ledger(events).by_member()
    for member, cost in costs.items():
        assert cost["energy_j"] == pytest.approx(used[member].energy_j, rel=0.02)
        at = events.index(cost)
        seen = next(t for t in range(at, 0, -1) if events[t].get("role") == "orchestrate")
        ends = [t for t in range(at) if (events[t]["type"], events[t].get("member")) == ("finished", member)]
        assert seen > max(ends), "what the driver has used since is not spread over the trial later"
    values = [("COMPLETE", [m.metrics["accuracy"], costs[m.id]["energy_j"]]) for m in state.members.values()]
    assert told(path) == values
    assert make_result(RunDir(path)).front == [member.id for member in front_members(state)] != []
    lines = (path / "events.jsonl").read_bytes().splitlines(keepends=True)
    at_costs = [i for i, line in enumerate(lines) if b'"type":"cost"' in line]
    # A trial had finished, and its cost was not logged yet, so that the study was not told either.
    journal = (path / "optuna.journal").read_bytes().splitlines(keepends=True)
    ends = [i for i, line in enumerate(journal) if b'"op_code":6' in line]
    for case, (cut, end) in enumerate(zip((*at_costs, at_costs[2] + 1), (*ends, len(journal)), strict=True)):
        broken_off = tmp_path / f"broken-{case}"
        shutil.copytree(path, broken_off)
        (broken_off / "events.jsonl").write_bytes(b"".join(lines[:cut]))
        (broken_off / "optuna.journal").write_bytes(b"".join(journal[:end]))
        resume(broken_off, executor="inline").wait()
        again = logged_costs(broken_off)
        assert list(again) == list(costs), "each once"
        kept = [event for event in events[:cut] if event["type"] == "cost"]
        assert [again[event["member"]] for event in kept] == kept
        members = fold(read_events(broken_off / "events.jsonl")).members.values()
        values = [("COMPLETE", [m.metrics["accuracy"], again[m.id]["energy_j"]]) for m in members]
        assert told(broken_off) == values


def test_a_search_for_few_joules_stops_where_there_are_none_and_cpu_seconds_are_known_anywhere(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("ensemble.meter.power.meter.open_power_sources", lambda *_, **__: [])
    monkeypatch.setattr("ensemble.controller.costs.WAIT_S", 0.0)
    path, cpu = tmp_path / "run", tmp_path / "cpu"
    state = run(path, two_objectives(trials=50))
    assert state.ended is not None and state.ended.type == "run_stopped"
    assert "member-0 has no joules, which the search minimizes: no power source" in state.ended.reason
    assert len(state.members) < 10 and logged_costs(path)["member-0"]["energy_j"] is None
    assert told(path)[0] == ("FAIL", None) and make_result(RunDir(path)).front == []
    run(cpu, two_objectives("cpu_s", 2))
    rows = {row["member"]: row for row in make_result(RunDir(cpu)).members}
    costs = {member: cost["cpu_s"] for member, cost in logged_costs(cpu).items()}
    assert costs == {member: row["cpu_s"] for member, row in rows.items()} and len(costs) == 2
    assert [values for _, values in told(cpu)] == [[row["metric"], row["cpu_s"]] for row in rows.values()]


def test_a_log_with_a_second_objective_of_before_is_read(tmp_path: Path) -> None:
    events = Run(Search(SPACE, trials=3, sampler="random", further_objectives=["energy_j"])).go_on().events
    older = [{**events[0], "second_objective": "energy_j"}, *events[1:]]
    del older[0]["further_objectives"]
    assert [m.id for m in front_members(fold(older))] == [m.id for m in front_members(fold(events))] != []


def test_latency_and_size_are_measured_where_they_are_objectives(tmp_path: Path) -> None:
    space = {"width": choice(2, 2000), "lr": 0.01}
    search = Search(space, trials=2, sampler="grid", further_objectives=["latency_ms", "model_mb"])
    recipe = Recipe(model=wide_model, loss=loss, task="classification")
    wide = replace(two_objectives(), search=search, recipe=recipe)
    state = run(tmp_path / "run", wide)
    narrow, broad = sorted(state.members.values(), key=lambda m: m.params["width"])
    sizes = [4e-6 * (2 * w + w + w * w + w + 2 * w + 2) for w in (2, 2000)]
    assert [m.metrics["model_mb"] for m in (narrow, broad)] == sizes
    assert 0 < narrow.metrics["latency_ms"] < broad.metrics["latency_ms"] < 1000
    assert make_result(RunDir(tmp_path / "run")).front
    (line,) = summarize_search(state, ledger(read_events(tmp_path / "run" / "events.jsonl")))
    assert " ms" in line[1] and " MB" in line[1]
    plain = run(tmp_path / "plain", replace(wide, search=Search(space, trials=1)))
    assert not {"latency_ms", "model_mb"} & set(plain.members["member-0"].metrics)


def test_a_metric_that_nobody_reports_ends_the_search_and_says_what_was_reported(tmp_path: Path) -> None:
    state = run(tmp_path / "run", replace(two_objectives(), search=Search({"lr": 0.1}, further_objectives=[RARE])))
    assert state.ended is not None and state.ended.type == "run_stopped"
    assert "member-0 did not report 'rare', which is one of" in state.ended.reason
    assert "(reported: accuracy, loss)" in state.ended.reason


def reporting(further: list[str], **options: Any) -> Ensemble:
    """Trials with a function of their own, of which the second one has no value of a metric."""
    space = {"lr": loguniform(1e-2, 1.0)}
    search = Search(space, trials=4, sampler="random", further_objectives=further, **options)
    return replace(two_objectives(), search=search, recipe=train_and_report)


def train_and_report(member: Any) -> None:
    import torch

    model = torch.nn.Linear(2, 2)
    model, _ = member.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in member.epochs():
        for batch in member.batches():
            member.backward(loss(model, batch))
            member.step()
        is_second = member.identity.number == 1
        undefined = {"nll": math.nan, "energy_j": 3.0}
        member.report(accuracy=0.5, **({"nll": 0.1, "energy_j": 3.0} if not is_second else undefined))


@pytest.mark.parametrize("further", [["nll"], ["nll", "cpu_s"]])
def test_a_trial_whose_metric_is_undefined_is_not_learnt_from_and_the_search_goes_on(
    further: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = run(tmp_path, reporting(further))
    assert state.ended is not None and state.ended.type == "run_finished"
    assert [each for each, _ in told(tmp_path)] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert "member-1 ended without a value of 'nll': the search does not learn from it" in caplog.text


def test_a_metric_of_the_name_of_a_cost_ranks_members_by_what_they_report(tmp_path: Path) -> None:
    made = replace(reporting([]), members=[{"lr": 0.1}], search=None, objective="energy_j")
    assert run(tmp_path, made).members["member-0"].metrics["energy_j"] == 3.0


def slow_at_first(params: dict[str, Any]) -> Any:
    """A network that needs a long time for the first batch of each size, as one that is compiled does."""
    import torch

    class Slow(torch.nn.Linear):
        seen: ClassVar[set[int]] = set()

        def forward(self, x: Any) -> Any:
            if len(x) not in self.seen:
                self.seen.add(len(x))
                time.sleep(1.2 * (len(x) == 1))
            return super().forward(x)

    return Slow(2, 2)


def reshape(batch: dict[str, Any]) -> dict[str, Any]:
    """To [1, 2 b], which no batch can be cut out of by rows."""
    return {**batch, "x": batch["x"].reshape(1, -1)}


def loss_of_rows(model: Any, batch: dict[str, Any]) -> Any:
    return loss(model, {**batch, "x": batch["x"].reshape(-1, 2)})


def run_for_latency(path: Path, model: Any, loss: Any = loss, **options: Any) -> RunState:
    """A search of one trial, whose latency is an objective."""
    search = Search({"lr": 0.1}, trials=1, further_objectives=["latency_ms"])
    recipe = Recipe(model=model, loss=loss, task="classification", **options)
    return run(path, replace(two_objectives(), search=search, recipe=recipe))


def test_a_latency_is_of_a_sample_that_is_collated_alone_and_not_that_of_the_first_call(tmp_path: Path) -> None:
    state = run_for_latency(tmp_path, slow_at_first, loss_of_rows, collate=reshape)
    assert 0 < state.members["member-0"].metrics["latency_ms"] < 500


def only_batches(params: dict[str, Any]) -> Any:
    """A network that fails for a single sample."""
    import torch

    class OnlyBatches(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            if len(x) == 1:
                raise ValueError("more than one")
            return super().forward(x)

    return OnlyBatches(2, 2)


def test_a_member_whose_latency_cannot_be_measured_has_trained_all_the_same(tmp_path: Path) -> None:
    state = run_for_latency(tmp_path, only_batches)
    assert state.members["member-0"].state == "finished" and state.ended is not None
    assert "did not report 'latency_ms'" in state.ended.reason and "its log says why" in state.ended.reason
    (log,) = (tmp_path / "members" / "member-0").glob("log*")
    assert "its latency is not measured: ValueError: more than one" in log.read_text()


@pytest.mark.parametrize("found", [True, {"accuracy": True}, {"accuracy": "low"}, None])
def test_constraints_that_return_no_numbers_by_name_are_refused(found: Any) -> None:
    search = Search({"lr": loguniform(1e-2, 1.0)}, trials=1, constraints=lambda metrics: found)
    with pytest.raises(SpecError, match=r"constraints of member-0 returned .*at most 0 holds"):
        compute_constraints(search, 0, {"accuracy": 0.5})
    with pytest.raises(SpecError, match="constraints must be a function"):
        Search({"lr": loguniform(1e-2, 1.0)}, trials=1, constraints=found or {})  # type: ignore[arg-type]
