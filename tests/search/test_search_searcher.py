import itertools
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.event_dicts import fold
from optuna.trial import TrialState
from small_run import EPOCHS, SPACE, Run, open_searcher
from studies import read_study

from ensemble.search.searcher import Searcher
from ensemble.spec import Search, SpecError, choice, integer, loguniform, uniform
from ensemble.store import StoreError


def test_no_trial_is_pruned_after_its_last_epoch_and_none_without_a_pruner() -> None:
    for pruner in ("hyperband", "asha"):
        run = Run(Search(SPACE, trials=24, sampler="tpe", pruner=pruner, seed=3)).to_the_end()
        assert all(epochs < EPOCHS for _, state, epochs in run.outcome if state == "pruned")
    searcher = open_searcher(Search(SPACE, pruner="none"), direction="max", epochs=5)
    searcher.ask(0)
    assert not any(searcher.report(0, epoch, 0.0) for epoch in range(5))


def test_a_condemned_trial_stays_condemned_and_repeated_reports_get_the_same_answer() -> None:
    searcher = open_searcher(Search(SPACE, pruner="asha", sampler="random"), direction="min", epochs=9)
    for number in range(8):
        searcher.ask(number)
        decisions = [searcher.report(number, 0, float(number)), searcher.report(number, 0, float(number))]
        assert decisions == [number > 0] * 2  # to be min: only the first is the best so far
        assert searcher.report(number, 1, -1.0) == (number > 0)


def test_a_trial_ends_once_and_asking_again_gives_the_same() -> None:
    searcher = open_searcher(Search(SPACE))
    assert searcher.ask(0) == searcher.ask(0)
    with pytest.raises(ValueError, match="trial 2 was requested, but the next trial is 1"):
        searcher.ask(2)
    for number in range(4):
        searcher.ask(number)
        searcher.report(number, 0, 0.25)
    ends = [("finished", None), ("finished", 0.5), ("failed", None), ("pruned", None)]
    for number, (state, value) in enumerate(ends):
        searcher.tell(number, state, value)
        searcher.tell(number, "failed")
    told = [(trial.state.name, trial.value) for trial in searcher.study.trials]
    assert told == [("COMPLETE", 0.25), ("COMPLETE", 0.5), ("FAIL", None), ("PRUNED", 0.25)]


@pytest.mark.parametrize(("reason", "states"), [("disk", ["FAIL", "COMPLETE"]), ("nan", ["FAIL"])])
def test_a_failed_trial_runs_again_after_a_resume_if_that_may_help(
    reason: str, states: list[str], tmp_path: Path
) -> None:
    """Optuna changes no finished trial: it is another one, of the same member."""
    name, journal = {"member": "member-0", "attempt": 0}, tmp_path / "journal"
    first = open_searcher(Search(SPACE, pruner="none"), journal)
    params = first.ask(0)
    first.report(0, 0, 0.5)
    first.tell(0, "failed")
    first.flush()
    events: list[dict[str, Any]] = [
        {"type": "run_started", "name": "s", "run_id": "r", "objective": "accuracy"},
        {"type": "member", "number": 0, "params": params, **name},
        {"type": "epoch", "epoch": 0, "metrics": {"accuracy": 0.5}, **name},
        {"type": "failed", "reason": reason, "retry": False, **name},
    ]
    again = Searcher(Search(SPACE, pruner="none"), direction="max", epochs=3, storage=journal)
    again.open(fold([{"v": 2, "t": 1.0, **event} for event in events]))
    assert again.study.trials[0].state.name == ("RUNNING" if reason == "disk" else "FAIL")
    again.report(0, 1, 0.75)
    again.tell(0, "finished", 0.75)
    again.flush()
    assert again.next_number == 1
    trials = read_study(journal, "s").trials
    assert [trial.state.name for trial in trials] == states
    assert {trial.user_attrs["member"] for trial in trials} == {"member-0"}
    assert [trial.params for trial in trials] == [trials[0].params] * len(states)


def test_a_grid_is_each_point_once() -> None:
    drop, depth = uniform(0.0, 0.5, step=0.25), integer(2, 10, step=4)
    space = {"lr": choice(0.1, 0.2), "depth": depth, "drop": drop, "name": "fixed"}
    searcher = open_searcher(Search(space, sampler="grid", trials=50), direction="max", epochs=2)
    assert searcher.trials == 18
    points = {(p["lr"], p["depth"], p["drop"], p["name"]) for p in map(searcher.ask, range(18))}
    assert points == set(itertools.product((0.1, 0.2), (2, 6, 10), (0.0, 0.25, 0.5), ["fixed"]))
    with pytest.raises(SpecError, match="'lr' is loguniform"):
        open_searcher(Search({"lr": loguniform(0.1, 1)}, sampler="grid"), direction="max", epochs=2)


def test_choices_may_be_lists_and_tuples_and_come_back_as_they_are() -> None:
    space = {"layers": choice([16, 16], (32,), None), "flag": choice(True, 1.5)}
    searcher = open_searcher(Search(space, sampler="random"), direction="max", epochs=2)
    seen = [searcher.ask(number) for number in range(12)]
    assert {repr(p["layers"]) for p in seen} == {"[16, 16]", "(32,)", "None"}
    assert all(p["layers"] in ([16, 16], (32,), None) and p["flag"] in (True, 1.5) for p in seen)


def test_a_sampler_whose_package_is_absent_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for sampler, named in (("cmaes", "needs cmaes: `pip install cmaes`"), ("gp", "needs scipy and torch")):
        with pytest.raises(SpecError, match=named):
            Searcher(Search(SPACE, sampler=sampler), direction="max", epochs=2)


def test_a_space_that_changed_under_a_run_is_said_and_a_wider_one_is_searched(tmp_path: Path) -> None:
    run = Run(Search(SPACE, trials=12, pruner="none"), tmp_path / "journal").to_the_end()
    with pytest.raises(SpecError, match="does not hold the hyperparameters of member-0"):
        Run(Search({**SPACE, "width": integer(1000, 2000)}), run.journal, run.events)
    wider = Search({**SPACE, "width": integer(4, 4000)}, trials=30, pruner="none")
    assert max(params["width"] for params, _, _ in Run(wider, run.journal, run.events).to_the_end().outcome) > 64


def test_a_study_that_is_not_that_of_the_run_is_refused(tmp_path: Path) -> None:
    run = Run(Search(SPACE, trials=2), tmp_path / "journal").to_the_end()
    with pytest.raises(StoreError, match=r"the Optuna storage .*other has no trial 0 of the study 's', which"):
        Run(run.search, tmp_path / "other", run.events)
    with pytest.raises(SpecError, match="the Optuna study 's' optimizes accuracy, and the search loss"):
        Run(run.search, run.journal, [{**run.events[0], "objective": "loss"}, *run.events[1:]])


def test_a_failed_try_with_a_retry_keeps_its_trial_running(tmp_path: Path) -> None:
    run = Run(Search(SPACE, trials=2), tmp_path / "journal")
    run.step()
    lost = {"error": "lost", "reason": "lost", "retry": True}
    run.log(type="failed", member="member-0", attempt=0, **lost)
    resumed = Run(run.search, run.journal, run.events)
    assert [trial.state for trial in resumed.searcher.study.trials] == [TrialState.RUNNING]


@given(st.lists(st.tuples(st.integers(0, 11), st.floats(0, 1)), max_size=80))
def test_hyperband_decides_as_optuna_s_own(reports: list[tuple[int, float]]) -> None:
    search = Search(SPACE, trials=12, pruner="hyperband", sampler="random")
    searcher = open_searcher(search, direction="max", epochs=9)
    pruner = optuna.pruners.HyperbandPruner(1, 9)
    plain, twins = optuna.create_study(study_name="search", direction="maximize", pruner=pruner), []
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
