"""Members that are added to a run that goes on: to a list as to a search, remembered by the log."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.event_dicts import fold
from optuna.trial import TrialState

from ensemble.controller.changes import check_same
from ensemble.controller.starts import make_trials
from ensemble.schedule.trials import Trials
from ensemble.search.trials import SearchTrials
from ensemble.spec import Ensemble, Member, Recipe, Search, SpecError, choice, integer, loguniform
from ensemble.store import RunDir, RunState, StoreError
from pipelines import Pipeline, sources

SPACE = {"lr": loguniform(1e-3, 1.0), "act": choice("relu", [1, 2]), "width": integer(4, 64), "depth": 2}


def declared(**options: Any) -> Ensemble:
    options = {"search": Search(SPACE, trials=4, sampler="random"), "batch_size": 4, **options}
    train = Pipeline(sources.arrays(x=np.zeros((8, 2), np.float32)))
    recipe = Recipe(model=len, loss=len, task="classification")
    return Ensemble(name="added", recipe=recipe, train=train, epochs=3, **options)


LISTED: dict[str, Any] = {"search": None, "members": [{"n": n} for n in range(2)]}


class Run:
    """The trials of a run and the log that they are rebuilt from."""

    def __init__(self, path: Path, ensemble: Ensemble, before: "Run | None" = None, sharing: bool = True) -> None:
        self.events: list[dict[str, Any]] = list(before.events) if before else []
        self.ensemble = ensemble
        self.trials: Trials = make_trials(ensemble, RunDir.create(path, ensemble), self.state, sharing=sharing)

    @property
    def state(self) -> RunState:
        return fold(self.events)

    def log(self, type: str, **fields: Any) -> None:
        self.events.append({"v": 2, "t": float(len(self.events)), "type": type, **fields})

    def all(self) -> "Run":
        while self.trials.left():
            self.log("member", **self.trials.next().as_dict())
        return self

    def add(self, given: Any) -> Any:
        identity = self.trials.add(given)
        self.log("member", **identity.as_dict())
        return identity


def test_a_list_grows_by_a_member_that_a_resume_keeps(tmp_path: Path) -> None:
    run = Run(tmp_path, declared(**LISTED)).all()
    identity = run.add(Member({"n": 7}, batch_size=8))
    assert (identity.member, identity.params, identity.batch_size) == ("member-2", {"n": 7}, 8)
    assert identity.added and identity.first_epoch is None and run.trials.left() == 0
    assert Run(tmp_path, run.ensemble, run, sharing=False).add({}).first_epoch == 0
    check_same(run.state, run.ensemble, tmp_path)
    assert Run(tmp_path, run.ensemble, run).add({"n": 8}).member == "member-3"
    longer = declared(search=None, members=[{"n": n} for n in (0, 1, 9)])
    with pytest.raises(StoreError, match="member-2 has params="):
        check_same(run.state, longer, tmp_path)


@pytest.mark.parametrize("sampler", ["tpe", "grid"])
def test_a_search_takes_in_a_trial_and_completes_it(sampler: str, tmp_path: Path) -> None:
    space = SPACE | {"lr": choice(0.1, 0.2)} if sampler == "grid" else SPACE
    run = Run(tmp_path, declared(search=Search(space, trials=5, sampler=sampler)))
    run.log("member", **run.trials.next().as_dict())
    identity = run.add({"lr": 0.1, "act": [1, 2]})
    assert identity.outside is None and identity.added and identity.first_epoch is None
    assert identity.params["lr"] == 0.1 and identity.params["act"] == [1, 2] and identity.params["depth"] == 2
    assert 4 <= identity.params["width"] <= 64 and run.trials.left() == 4
    again = Run(tmp_path, run.ensemble, run)
    run.all(), again.all()
    params = [member.params for member in run.state.members.values()]
    assert params == [member.params for member in again.state.members.values()] and len(params) == 6
    if sampler == "grid":
        own = [repr(p) for number, p in enumerate(params) if number != 1]
        assert len(set(own)) == 5, "no point of the grid is lost to it"


OUTSIDE: tuple[tuple[Any, str], ...] = (
    ({"lr": 5.0}, r"lr=5.0 is outside loguniform\(0.001, 1.0\)"),
    ({"act": "gelu"}, r"act='gelu' is none of 'relu', \[1, 2\]"),
    ({"width": 8.5}, r"width=8.5 is outside integer\(4, 64\)"),
    ({"depth": 3}, "depth=3 is not the 2 of the space"),
    ({"dropout": 0.1}, "the space has no 'dropout'"),
    (Member({"lr": 0.1}, batch_size=8, epochs=5, seed=1), "its epochs, batch_size differs from"),
)


def test_what_a_search_could_not_propose_teaches_it_nothing(tmp_path: Path, recwarn: Any) -> None:
    run = Run(tmp_path, declared())
    run.log("member", **run.trials.next().as_dict())
    said: dict[int, str | None] = {}
    for number, (given, why) in enumerate(OUTSIDE, 1):
        identity = run.add(given)
        said[number] = identity.outside
        assert identity.outside is not None and re.match(why, identity.outside)
        params = given.params if isinstance(given, Member) else given
        assert identity.params == params, "it is trained as it was given"
        assert run.trials.prune_decision(number, 0, {}) == "continue", "nobody asks for its objective"
        run.trials.ended(number, "finished", {"accuracy": 1.0})
    resumed = Run(tmp_path, run.ensemble, run)
    for one in (run, resumed):
        assert isinstance(one.trials, SearchTrials)
        for number, outside in said.items():
            trial = one.trials._searcher.study.trials[number]
            assert trial.state == TrialState.FAIL and trial.user_attrs["outside"] == outside
        assert one.trials.left() == 3
    assert run.trials.next() == resumed.trials.next()
    check_same(run.state, run.ensemble, tmp_path)
    assert not recwarn.list


def test_text_for_a_dimension_of_numbers_is_refused(tmp_path: Path) -> None:
    search = Search({"lr": loguniform(1e-3, 1.0), "act": choice("relu", 2)}, trials=2)
    trials = Run(tmp_path, declared(search=search)).trials
    with pytest.raises(SpecError, match=r"hyperparameter 'lr' must be a number, as in the search's .* got 'fast'"):
        trials.add({"lr": "fast"})
    assert trials.add({"lr": 7, "act": "gelu"}).member == "member-0", "outside of the space, but possible"


def test_a_completion_that_is_impossible_is_refused_and_no_number_is_used_twice(tmp_path: Path) -> None:
    space = {"lr": 0.1, "nesterov": choice(False, True), "momentum": choice(0.9, 0.0)}
    words = {"name": "sgd", "momentum": 0.9}
    made = declared(search=Search(space, trials=2, sampler="random"), optimizer=words)
    run = Run(tmp_path, made)
    with pytest.raises(SpecError, match="nesterov=True needs a momentum above 0"):
        run.trials.add({"nesterov": True, "momentum": 0.0})
    numbers = []
    for _ in range(8):
        try:
            numbers.append(run.add({"nesterov": True}).number)
        except SpecError:
            numbers.append(-1)
    assert -1 in numbers[:-1] and all(number in (place, -1) for place, number in enumerate(numbers))
    resumed = Run(tmp_path, made, run)
    assert (run.trials.left(), resumed.trials.left()) == (2, 2)
    assert resumed.trials.add({"nesterov": False}).number > max(numbers)


def test_an_addition_that_failed_takes_no_point_of_a_grid_from_the_search_that_is_resumed(tmp_path: Path) -> None:
    space = {"lr": choice(0.1, 0.2), "width": integer(4, 5)}
    run = Run(tmp_path, declared(search=Search(space, trials=4, sampler="grid")))
    run.log("member", **run.trials.next().as_dict())
    run.trials.add({"lr": 0.1})  # its number is used up, and the log never has it: its weights could not be kept
    run.log("member", **run.trials.next().as_dict())
    resumed = Run(tmp_path, run.ensemble, run).all()
    numbers = [member.number for member in resumed.state.members.values()]
    points = {repr(member.params) for member in resumed.state.members.values()}
    assert numbers == [0, 2, 3, 4] and len(points) == 4, "each point of the grid once"
