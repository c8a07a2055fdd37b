from pathlib import Path
from typing import Any

import optuna
import pytest
from event_dicts import fold, write_study
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState
from property_examples import examples
from small_run import EPOCHS, SPACE, Run, accuracy
from studies import read_study

from ensemble.search.searcher import Searcher
from ensemble.spec import Search, SpecError, choice, integer, loguniform, uniform
from ensemble.store import RunState

WHOLE: dict[str, Run] = {}


def whole(sampler: str, pruner: str, trials: int = 24) -> Run:
    key = f"{sampler}-{pruner}"
    if key not in WHOLE:
        WHOLE[key] = Run(Search(SPACE, trials=trials, sampler=sampler, pruner=pruner, seed=3)).to_the_end()
    return WHOLE[key]


@pytest.mark.parametrize(("sampler", "pruner"), [("tpe", "hyperband"), ("tpe", "asha"), ("random", "median")])
@examples(4)
@given(share=st.floats(0.05, 1.0))
def test_a_search_interrupted_anywhere_goes_on_as_if_it_had_not_been(
    sampler: str, pruner: str, share: float
) -> None:
    expected = whole(sampler, pruner)
    events = expected.events[: max(1, int(share * len(expected.events)))]
    if (
        events[-1]["type"] == "epoch"
    ):  # the pruner's decision on it was not carried out: it comes again with the epoch
        events = events[:-1]
    resumed = Run(expected.search, events=events).to_the_end()
    assert resumed.outcome == expected.outcome


def test_proposals_lie_in_the_space_and_keep_its_fixed_values() -> None:
    for params, _, _ in whole("tpe", "hyperband").outcome:
        assert list(params) == list(SPACE) and params["epochs"] == 9
        assert 1e-4 <= params["lr"] <= 1.0 and params["act"] in ("relu", "gelu") and 0 <= params["p"] <= 1
        assert isinstance(params["width"], int) and 4 <= params["width"] <= 64


def test_the_seed_decides_and_another_seed_decides_otherwise() -> None:
    def first(seed: int) -> dict[str, Any]:
        return Searcher(Search(SPACE, seed=seed), direction="max", epochs=3).ask(0)

    assert first(1) == first(1) != first(2)


def test_hyperband_saves_epochs_and_keeps_good_trials() -> None:
    run = whole("tpe", "hyperband")
    states = [state for _, state, _ in run.outcome]
    assert len(states) == 24 and "pruned" in states and "finished" in states
    assert sum(epochs for *_, epochs in run.outcome) < 0.8 * 24 * EPOCHS
    best = max(run.state.members.values(), key=lambda m: accuracy(m.params, EPOCHS))
    assert best.state == "finished"


def test_no_trial_is_pruned_after_its_last_epoch_and_none_without_a_pruner() -> None:
    for run in (whole("tpe", "hyperband"), whole("tpe", "asha")):
        assert all(epochs < EPOCHS for _, state, epochs in run.outcome if state == "pruned")
    searcher = Searcher(Search(SPACE, pruner="none"), direction="max", epochs=5)
    searcher.ask(0)
    assert not any(searcher.report(0, epoch, 0.0) for epoch in range(5))


def test_a_condemned_trial_stays_condemned_and_repeated_reports_get_the_same_answer() -> None:
    searcher = Searcher(Search(SPACE, pruner="asha", sampler="random"), direction="min", epochs=9)
    for number in range(8):
        searcher.ask(number)
        decisions = [searcher.report(number, 0, float(number)), searcher.report(number, 0, float(number))]
        assert decisions == [number > 0] * 2  # to be min: only the first is the best so far
        assert searcher.report(number, 1, -1.0) == (number > 0)


def test_asking_again_gives_the_same_and_out_of_order_is_refused() -> None:
    searcher = Searcher(Search(SPACE), direction="max", epochs=3)
    assert searcher.ask(0) == searcher.ask(0)
    with pytest.raises(ValueError, match="trial 2 was requested, but the next trial is 1"):
        searcher.ask(2)


@pytest.mark.parametrize(("reason", "states"), [("disk", ["RUNNING", "COMPLETE"]), ("nan", ["FAIL", "FAIL"])])
def test_a_trial_that_failed_runs_again_after_a_resume_where_that_may_help(reason: str, states: list[str]) -> None:
    name = {"member": "member-0", "attempt": 0}
    params = Searcher(Search(SPACE), direction="max", epochs=3).ask(0)
    events: list[dict[str, Any]] = [
        {"type": "run_started", "name": "x", "run_id": "r", "objective": "accuracy"},
        {"type": "member", "number": 0, "params": params, **name},
        {"type": "epoch", "epoch": 0, "metrics": {"accuracy": 0.5}, **name},
        {"type": "failed", "reason": reason, "retry": False, **name},
    ]
    searcher = Searcher(Search(SPACE), direction="max", epochs=3)
    searcher.restore(fold([{"v": 2, "t": 1.0, **event} for event in events]))
    seen = [searcher.study.trials[0].state.name]
    searcher.tell(0, "finished", 0.75)
    assert [*seen, searcher.study.trials[0].state.name] == states


def test_a_trial_ends_once() -> None:
    searcher = Searcher(Search(SPACE), direction="max", epochs=3)
    for number in range(4):
        searcher.ask(number)
        searcher.report(number, 0, 0.25)
    for number, (state, value) in enumerate(
        [("finished", None), ("finished", 0.5), ("failed", None), ("pruned", None)]
    ):
        searcher.tell(number, state, value)
        searcher.tell(number, "failed")
    told = [(trial.state, trial.value) for trial in searcher.study.trials]
    complete, fail, pruned = TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED
    assert told == [(complete, 0.25), (complete, 0.5), (fail, None), (pruned, 0.25)]


def test_a_grid_is_each_point_once() -> None:
    space = {"lr": choice(0.1, 0.2), "depth": integer(1, 3), "name": "fixed"}
    searcher = Searcher(Search(space, sampler="grid", trials=50), direction="max", epochs=2)
    assert searcher.trials == 6
    points = [searcher.ask(number) for number in range(6)]
    assert {(p["lr"], p["depth"]) for p in points} == {(lr, d) for lr in (0.1, 0.2) for d in (1, 2, 3)}
    assert all(p["name"] == "fixed" for p in points)
    with pytest.raises(SpecError, match="'lr' is loguniform"):
        Searcher(Search({"lr": loguniform(0.1, 1)}, sampler="grid"), direction="max", epochs=2)


def test_choices_may_be_lists_and_tuples_and_come_back_as_they_are() -> None:
    space = {"layers": choice([16, 16], (32,), None), "flag": choice(True, 1.5)}
    searcher = Searcher(Search(space, sampler="random"), direction="max", epochs=2)
    seen = [searcher.ask(number) for number in range(12)]
    assert {repr(p["layers"]) for p in seen} == {"[16, 16]", "(32,)", "None"}
    assert all(p["layers"] in ([16, 16], (32,), None) and p["flag"] in (True, 1.5) for p in seen)


def test_a_sampler_whose_package_is_absent_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for sampler, named in (("cmaes", "needs cmaes: `pip install cmaes`"), ("gp", "needs scipy and torch")):
        with pytest.raises(SpecError, match=named):
            Searcher(Search(SPACE, sampler=sampler), direction="max", epochs=2)


def test_gaussian_processes_propose_the_same_after_a_resume() -> None:
    space = {"lr": loguniform(1e-4, 1.0), "act": choice("a", "relu"), "width": integer(4, 64)}
    search = Search(space, trials=12, sampler="gp", pruner="none")
    run = Run(search).to_the_end()
    asked = [i for i, event in enumerate(run.events) if event["type"] == "member"]
    assert Run(search, events=run.events[: asked[-1]]).searcher.ask(11) == run.state.members["member-11"].params


def test_cmaes_proposes_the_same_after_a_resume() -> None:
    pytest.importorskip("cmaes")
    space = {"lr": loguniform(1e-4, 1.0), "p": uniform(0, 1)} | {"act": "a", "width": 8}
    search = Search(space, sampler="cmaes", pruner="none")  # those that are pruned belong to no generation
    run = Run(search).to_the_end()
    generations = {trial.system_attrs.get("cma:generation") for trial in run.searcher.study.trials}
    assert generations > {0, 1, 2}
    asked = [i for i, event in enumerate(run.events) if event["type"] == "member"]
    for cut in (3, asked[2], asked[8] + 1, asked[13], asked[-1]):
        assert Run(search, events=run.events[:cut]).to_the_end().outcome == run.outcome


def test_a_space_that_changed_under_a_run_is_said() -> None:
    events = whole("tpe", "asha").events
    with pytest.raises(SpecError, match="does not hold the hyperparameters of member-0"):
        Run(Search({**SPACE, "width": integer(1000, 2000)}), events=events)


def test_a_failed_try_with_a_retry_keeps_its_trial_running() -> None:
    run = Run(Search(SPACE, trials=2))
    run.step()
    lost = {"error": "lost", "reason": "lost", "retry": True}
    run.log(type="failed", member="member-0", attempt=0, **lost)
    resumed = Run(run.search, events=run.events)
    assert [trial.state for trial in resumed.searcher.study.trials] == [TrialState.RUNNING]


def test_the_mirror_shows_the_search_and_agrees_with_the_log(tmp_path: Path) -> None:
    path = tmp_path / "optuna.journal"
    search = Search(SPACE, trials=4, pruner="asha")
    run = Run(search, storage=path)
    for _ in range(12):
        run.step()
    run = Run(search, storage=path, events=run.events).to_the_end()
    study = read_study(path, "s")
    mine = run.searcher.study.trials
    assert [(t.state, t.values, t.params, t.intermediate_values) for t in study.trials] == (
        [(t.state, t.values, t.params, t.intermediate_values) for t in mine]
    )
    assert study.trials[0].user_attrs == {"member": "member-0", "epochs": 9}
    assert isinstance(study.trials[0].distributions["act"], optuna.distributions.CategoricalDistribution)
    size = path.stat().st_size
    assert [t.values for t in write_study(run.events, path).trials] == [t.values for t in mine]
    assert path.stat().st_size == size


def test_a_storage_that_fails_costs_the_search_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "place"
    place.mkdir()
    searcher = Searcher(Search(SPACE), direction="max", epochs=3, storage=place / "journal")
    searcher.restore(RunState(name="search", run_id="r"))
    searcher.ask(0)
    searcher.catch_up()
    place.rename(tmp_path / "away")
    searcher.report(0, 0, 0.5)
    searcher.catch_up()
    searcher.tell(0, "finished", 0.5)
    assert "the Optuna storage is behind" in caplog.text
    (tmp_path / "away").rename(place)
    searcher.ask(1)
    searcher.catch_up()
    assert [trial.value for trial in read_study(place / "journal", "search").trials] == [0.5, None]


@given(st.lists(st.tuples(st.integers(0, 11), st.floats(0, 1)), max_size=80))
def test_hyperband_decides_as_optuna_s_own(reports: list[tuple[int, float]]) -> None:
    searcher = Searcher(Search(SPACE, trials=12, pruner="hyperband", sampler="random"), direction="max", epochs=9)
    plain = optuna.create_study(
        study_name="search", direction="maximize", pruner=optuna.pruners.HyperbandPruner(1, 9)
    )
    twins = []
    for number in range(12):
        searcher.ask(number)
        twins.append(plain.ask())
    done, pruned = [0] * 12, set()
    for number, value in reports:
        if done[number] == 8 or number in pruned:  # the last epoch is never pruned
            continue
        done[number] += 1
        twins[number].report(value, done[number])
        expected = twins[number].should_prune()
        assert searcher.report(number, done[number] - 1, value) == expected
        if expected:
            pruned.add(number)


def test_gp_leaves_to_tpe_what_it_would_take_long_for_and_a_resume_proposes_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ensemble.search.factory.GP_TRIALS", 11)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("gp was asked")

    search = Search(SPACE, trials=20, sampler="gp", pruner="none", seed=3)
    first = Run(search)
    while len(first.state.members) < 11:
        first.step(parallel=1)
    assert not caplog.messages
    begun = list(first.events)
    monkeypatch.setattr("optuna.samplers.GPSampler", never)
    with pytest.raises(AssertionError, match="gp was asked"):
        Searcher(search, direction="max", epochs=EPOCHS).ask(0)
    proposed = []
    for run in (
        first,
        Run(search, events=begun),
        Run(Search(SPACE, trials=20, sampler="tpe", pruner="none", seed=3), events=begun),
    ):
        while run.step(parallel=1):
            pass
        proposed.append([member.params for member in run.state.members.values()])
    assert proposed[0] == proposed[1] == proposed[2] and len(proposed[0]) == 20
    assert [said for said in caplog.messages if "tpe proposes" in said] == [
        "gp takes seconds for a proposal after 11 trials: tpe proposes from here on"
    ] * 2
