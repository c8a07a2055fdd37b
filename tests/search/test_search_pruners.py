"""Pruners and their options: what the words mean, and what is refused."""

import warnings
from typing import Any

import optuna
import pytest
from small_run import open_searcher

from ensemble.search.factory import make_pruner
from ensemble.search.searcher import Searcher
from ensemble.spec import Search, SpecError, loguniform

SPACE = {"lr": loguniform(1e-4, 1.0)}


def searcher(pruner: Any, epochs: int = 9, direction: str = "max") -> Searcher:
    search = Search(SPACE, pruner=pruner, sampler="random")
    return open_searcher(search, direction=direction, epochs=epochs)


def stopped_after(search: Searcher, number: int, values: list[float]) -> int | None:
    """Epochs after which a trial with these values is to be pruned."""
    search.ask(number)
    decisions = [search.report(number, epoch, value) for epoch, value in enumerate(values)]
    return decisions.index(True) + 1 if True in decisions else None


@pytest.mark.parametrize(
    ("epochs", "min_delta", "values", "after"),
    [
        *((3, 0.0, [0.1, 0.5, 0.4, 0.4, 0.4, 0.9], 5), (3, 0.0, [0.1, 0.5, 0.4, 0.4, 0.6, 0.9], None)),
        *((1, 0.0, [0.1, 0.5, 0.4, 0.6], 3), (2, 0.0, [0.5] * 6, None)),
        *((2, 0.05, [0.1, 0.5, *[0.46] * 4], None), (2, 0.05, [0.1, 0.5, *[0.4] * 4], 4)),
    ],
)
def test_patience_ends_a_trial_that_does_not_come_up_to_its_best_again(
    epochs: int, min_delta: float, values: list[float], after: int | None
) -> None:
    pruner = {"name": "patience", "epochs": epochs, "min_delta": min_delta}
    assert stopped_after(searcher(pruner), 0, values) == after
    falling = [1 - value for value in values]
    assert stopped_after(searcher(pruner, direction="min"), 0, falling) == after


def test_patience_around_another_pruner_holds_it_back() -> None:
    around = searcher({"name": "patience", "epochs": 2, "around": "median"})
    alone = searcher("median")
    for search in (around, alone):
        for number in range(5):
            stopped_after(search, number, [0.5] * 9)
            search.tell(number, "finished")
    rising, falling = [0.1 * n for n in range(5)], [0.4, 0.3, 0.2, 0.2, 0.2]
    assert (stopped_after(alone, 5, rising), stopped_after(alone, 6, falling)) == (1, 1)
    assert (stopped_after(around, 5, rising), stopped_after(around, 6, falling)) == (None, 3)


def test_the_options_of_the_median_hold_it_back() -> None:
    pruner = {"name": "median", "startup_trials": 2, "warmup_epochs": 2, "interval_epochs": 2}
    search = searcher(pruner)
    assert stopped_after(search, 0, [0.5] * 9) is stopped_after(search, 1, [0.1] * 9) is None
    for number in (0, 1):
        search.tell(number, "finished")
    assert stopped_after(search, 2, [0.0] * 9) == 3, "after two epochs of warm-up"
    assert stopped_after(search, 3, [0.9, 0.9, 0.9, 0.9] + [0.0] * 5) is None, "the best of its epochs counts"


@pytest.mark.parametrize(
    ("pruner", "rungs"),
    [
        *(({"name": "asha", "reduction_factor": 2, "min_resource": 2}, [2, 4, 8]), ({"name": "asha"}, [1, 4])),
        *(({"name": "hyperband", "reduction_factor": 2, "min_resource": 4}, [4, 8]), ("hyperband", [1, 3, 9])),
    ],
)
def test_halving_decides_where_its_options_say(pruner: Any, rungs: list[int]) -> None:
    search = searcher(pruner)
    ends = {stopped_after(search, number, [1.0 - number / 100] * 9) for number in range(60)}
    assert ends - {None} <= set(rungs) and min(end for end in ends if end) == rungs[0]


def test_every_word_makes_a_pruner_without_a_warning_and_a_rung_beyond_the_last_epoch_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for word in ("hyperband", "asha", "median", "patience", "none"):
            assert isinstance(make_pruner(Search(SPACE, pruner=word), 5), optuna.pruners.BasePruner)
    search = Search(SPACE, pruner={"name": "asha", "min_resource": 5})
    search.check_epochs(5)
    with pytest.raises(SpecError, match="'min_resource'] is 5 epochs, but a trial has 4"):
        search.check_epochs(4)


def test_a_function_of_the_users_ends_trials_beside_the_pruner() -> None:
    def is_low(trial: Any) -> bool:
        return trial.last_step >= 2 and trial.intermediate_values[trial.last_step] < 0.3

    search = open_searcher(Search(SPACE, pruner="median", stop=is_low), epochs=9)
    for number in range(5):
        assert stopped_after(search, number, [0.5] * 9) is None
        search.tell(number, "finished")
    assert stopped_after(search, 5, [0.9, 0.9, 0.2, 0.9]) == 3
    assert stopped_after(search, 6, [0.4] * 9) == 1, "the median"
    failing = open_searcher(Search(SPACE, stop=lambda trial: trial.params["x"]), epochs=9)
    failing.ask(0)
    with pytest.raises(SpecError, match=r"Search\.stop after 1 epochs of member-0: <lambda> raised KeyError"):
        failing.report(0, 0, 0.5)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::optuna.exceptions.ExperimentalWarning")
def test_a_terminator_ends_the_search_where_no_trial_improves_it() -> None:
    from optuna.terminator import EMMREvaluator, StaticErrorEvaluator, Terminator

    class Enough:
        def should_terminate(self, study: optuna.Study) -> bool:
            return len(study.trials) >= 4 and study.best_trial.number < len(study.trials) - 3

    search = open_searcher(Search(SPACE, terminator=Enough(), pruner="none"), epochs=9)
    for number, value in enumerate([0.5, 0.9, 0.4, 0.3, 0.2]):
        assert not search.has_ended
        search.ask(number)
        search.tell(number, "finished", value)
    assert search.has_ended
    theirs = Terminator(EMMREvaluator(seed=0), StaticErrorEvaluator(0.01), min_n_trials=8)
    usual = open_searcher(Search(SPACE, terminator=theirs, pruner="none"), epochs=9)
    for number in range(12):
        usual.ask(number)
        usual.tell(number, "finished", 0.5)
    assert usual.has_ended
