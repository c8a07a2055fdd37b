"""What a user of Optuna brings along: samplers, pruners, distributions, functions, studies, constraints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from kit.event_dicts import read_events
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import GridSampler, RandomSampler
from small_run import EPOCHS, SPACE, Run, accuracy, declare
from studies import read_study
from test_search_kills import conditional

import ensemble
from ensemble.search.space import make_space
from ensemble.spec import Search, SpecError, choice, integer, loguniform, uniform
from ensemble.spec.search_space import sample_space


def test_a_function_decides_which_hyperparameters_a_trial_has() -> None:
    run = Run(Search(conditional, trials=12, seed=1, pruner="none")).to_the_end()
    for number, (params, _, _) in enumerate(run.outcome):
        assert ("p" in params) == (params["act"] == "gelu") and params["width"] == sum(params["layers"])
        assert run.searcher.study.trials[number].params["depth"] == len(params["layers"])


def test_a_function_that_fails_for_a_trial_fails_that_trial_alone(tmp_path: Path) -> None:
    def space(trial: Any) -> dict[str, Any]:
        if trial.number == 1:
            raise RuntimeError("no")
        return {"lr": trial.suggest_float("lr", 0.01, 0.1), "width": 4}

    declared = declare(Search(space, trials=3, pruner="none"), epochs=1)
    result = ensemble.submit(declared, run_dir=tmp_path / "run", executor="inline").wait()
    assert [row["state"] for row in result.members] == ["finished", "failed", "finished"]
    again = ensemble.resume(tmp_path / "run", executor="inline").wait()
    assert [row["state"] for row in again.members] == ["finished", "failed", "finished"]


def test_a_distribution_of_optuna_is_the_same_dimension() -> None:
    theirs = {"a": FloatDistribution(0.0, 1.0, step=0.25), "b": FloatDistribution(1e-4, 1.0, log=True)}
    theirs |= {"c": IntDistribution(1, 64, log=True), "d": IntDistribution(2, 10, step=4)}
    theirs |= {"e": CategoricalDistribution(["x", None, 3])}
    ours = {"a": uniform(0.0, 1.0, step=0.25), "b": loguniform(1e-4, 1.0), "c": integer(1, 64, log=True)}
    ours |= {"d": integer(2, 10, step=4), "e": choice("x", None, 3)}
    assert Search(theirs).space == ours == Search(ours).space
    assert make_space(ours).distributions == theirs
    for point in sample_space(ours, 0):
        assert point["a"] in (0.0, 0.25, 0.5, 0.75, 1.0) and 1 <= point["c"] <= 64 and point["d"] in (2, 6, 10)


def test_what_lies_outside_of_a_space_is_explained() -> None:
    space = make_space({"a": uniform(0.0, 1.0, step=0.25), "d": integer(2, 10, step=4)})
    assert space.explain_outside({"a": 0.75, "d": 6}) is None
    assert space.explain_outside({"a": 0.8}) == "a=0.8 is outside uniform(0.0, 1.0, step=0.25)"
    assert space.explain_outside({"d": 5}) == "d=5 is outside integer(2, 10, step=4)"
    space = make_space(lambda trial: {"lr": trial.suggest_float("lr", 0.0, 1.0) / 10})
    assert space.explain_outside({"lr": 0.5}) == "the space turns lr=0.5 into lr=0.05"

    def branches(trial: Any) -> None:
        if trial.suggest_categorical("a", ["x", "y"]) == "x":
            trial.suggest_float("p", 0, 1)

    branching = make_space(branches)
    assert branching.explain_outside({"p": 0.5}) is None, "in one of its branches"
    assert branching.explain_outside({"q": 0.5}) == "the space does not suggest 'q'"
    assert choice(RandomSampler, accuracy, 3) == choice("RandomSampler", "accuracy", 3), (
        "a class stands for its name"
    )


@pytest.mark.parametrize("space", [SPACE, conditional], ids=["dict", "function"])
def test_enqueued_trials_come_first_and_what_they_lack_is_proposed(space: Any) -> None:
    first = [{"lr": 0.01, "act": "gelu"}, {"act": "relu"}]
    search = Search(space, trials=5, enqueue=first, pruner="none", seed=2)
    params = [each for each, _, _ in Run(search).to_the_end().outcome]
    assert (params[0]["lr"], params[0]["act"], params[1]["act"]) == (0.01, "gelu", "relu") and len(params) == 5


def test_what_is_enqueued_lies_in_the_space() -> None:
    for space, wrong, why in (
        (SPACE, {"lr": 2.0}, r"enqueue\[0\]: lr=2.0 is outside loguniform"),
        (SPACE, {"rate": 2.0}, "has no 'rate'"),
        (conditional, {"lr": 2.0}, "lr=2.0 is outside"),
        (conditional, {"act": "relu", "p": 0.1}, "does not suggest 'p'"),
        (conditional, {"act": "tanh"}, "'tanh' not in"),
    ):
        with pytest.raises(SpecError, match=why):
            Run(Search(space, enqueue=[wrong]))


def test_a_sampler_of_a_finite_space_ends_the_search(tmp_path: Path) -> None:
    lrs = [0.01, 0.1, 0.2]
    search = Search({"lr": choice(*lrs), "width": 4}, trials=9, sampler=GridSampler({"lr": lrs}), pruner="none")
    result = ensemble.submit(declare(search, epochs=1), run_dir=tmp_path / "run", executor="inline").wait()
    assert sorted(row["params"]["lr"] for row in result.members) == lrs
    assert len(ensemble.resume(tmp_path / "run", executor="inline").wait().members) == 3, "and a resume knows"


def test_constraints_are_in_the_study_and_the_sampler_keeps_to_them(tmp_path: Path) -> None:
    def narrow(metrics: Any) -> dict[str, float]:
        return {"width": metrics["width"] - 16}

    journal = tmp_path / "optuna.journal"
    search = Search(SPACE, trials=30, constraints=narrow, pruner="none", seed=1)
    run = Run(search, journal).to_the_end()
    widths = [params["width"] for params, _, _ in run.outcome]
    assert [trial.constraints for trial in read_study(journal, "s").trials] == [{"width": w - 16} for w in widths]
    unbound = Run(Search(SPACE, trials=30, pruner="none", seed=1)).to_the_end()
    free = [params["width"] for params, _, _ in unbound.outcome]
    assert sum(width <= 16 for width in widths[10:]) > sum(width <= 16 for width in free[10:])
    assert run.killed(run.sizes[60], tmp_path / "killed").to_the_end().outcome == run.outcome


def test_a_pruner_of_optuna_prunes() -> None:
    search = Search(SPACE, trials=20, pruner=optuna.pruners.ThresholdPruner(lower=0.6, n_warmup_steps=2), seed=1)
    run = Run(search).to_the_end()
    for params, state, epoch in run.outcome:
        low = [e for e in range(1, EPOCHS - 1) if accuracy(params, e) < 0.6]
        assert (state, epoch) == (("pruned", low[0] + 1) if low else ("finished", EPOCHS)), params
    assert {state for _, state, _ in run.outcome} == {"pruned", "finished"}


class Refusing:
    """What a user brings and what fails: each of a sampler, a pruner and a terminator."""

    def prune(self, study: Any, trial: Any) -> bool:
        raise KeyError("rung")

    def should_terminate(self, study: Any) -> bool:
        raise ValueError("no scores")


def refuse(metrics: Any) -> dict[str, float]:
    return {"latency": metrics["latency"]}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"sampler": GridSampler({"width": [4]})}, "Search.sampler: GridSampler raised ValueError"),
        ({"pruner": Refusing()}, "Search.pruner: Refusing raised KeyError: 'rung'"),
        ({"terminator": Refusing()}, "Search.terminator: Refusing raised ValueError: no scores"),
        ({"constraints": refuse}, "Search.constraints of member-0: refuse raised KeyError: 'latency'"),
    ],
)
def test_what_fails_of_the_users_ends_the_run_and_is_named(tmp_path: Path, options: Any, why: str) -> None:
    search = Search(**{"space": {"lr": loguniform(0.01, 0.1)}, "trials": 3, "pruner": "none", **options})
    run = ensemble.submit(declare(search, epochs=2), run_dir=tmp_path / "run", executor="inline")
    run.wait()
    last = read_events(tmp_path / "run" / "events.jsonl")[-1]
    assert last["type"] == "run_stopped" and last["failed"] and why in last["reason"]


def test_a_function_that_asks_for_more_than_it_did_is_not_gone_on_with(tmp_path: Path) -> None:
    def asks(names: tuple[str, ...]) -> Any:
        return lambda trial: {"act": "relu", "width": 8, **{n: trial.suggest_float(n, 0.01, 1.0) for n in names}}

    run = Run(Search(asks(("lr",)), trials=3, pruner="none"), tmp_path / "journal").to_the_end()
    with pytest.raises(SpecError, match="it asks for drop, too"):
        Run(Search(asks(("lr", "drop")), trials=6, pruner="none"), run.journal, run.events)
