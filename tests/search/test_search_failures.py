"""Proposals that no member can be, and trials that all fail: one trial fails, or the search ends and says why."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from small_run import declare, loss, run

from ensemble.controller.changes import check_same
from ensemble.schedule.trials import FIRST_TRIALS
from ensemble.spec import Ensemble, Recipe, Search, SpecError, choice, uniform


def model(params: dict[str, Any]) -> Any:
    import torch

    if params.get("broken"):
        raise RuntimeError("no such layer")
    return torch.nn.Linear(2, 2)


def declared(space: dict[str, Any], trials: int, **options: Any) -> Ensemble:
    small = declare(Search(space, trials=trials, sampler="random", pruner="none"), **options)
    recipe = Recipe(model=model, loss=loss, task="classification")
    return dataclasses.replace(small, name="failures", recipe=recipe)


WORDS = {"name": "sgd", "momentum": 0.9}
IMPOSSIBLE = {"lr": 0.1, "nesterov": choice(False, True), "momentum": choice(0.9, 0.0)}


def test_an_impossible_proposal_fails_its_trial_and_not_the_run(tmp_path: Path) -> None:
    ensemble = declared(IMPOSSIBLE, 9, optimizer=WORDS)
    state = run(tmp_path, ensemble)
    impossible = {m.id: m for m in state.members.values() if m.params["nesterov"] and not m.params["momentum"]}
    assert impossible and len(state.members) == 9
    for member in state.members.values():
        assert member.state == ("failed" if member.id in impossible else "finished")
    one = next(iter(impossible.values()))
    assert "nesterov=True needs a momentum above 0" in str(one.error)
    assert one.attempts == 0
    check_same(state, ensemble, tmp_path)
    again = run(tmp_path, ensemble)
    attempts, before = ([m.attempts for m in each.members.values()] for each in (again, state))
    assert attempts == before, "what is impossible is not tried again"


@pytest.mark.parametrize(
    ("space", "why"), [(IMPOSSIBLE, "nesterov"), ({"lr": uniform(0.1, 0.2), "broken": True}, "no such layer")]
)
def test_a_search_of_which_everything_fails_is_given_up(
    space: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensemble = declared(space, 2 * FIRST_TRIALS, optimizer=WORDS)
    if why == "nesterov":
        whole = Ensemble.identify

        def identify(self: Ensemble, number: int, params: Any = None) -> Any:
            if params:
                raise SpecError("nesterov")
            return whole(self, number, params)

        monkeypatch.setattr(Ensemble, "identify", identify)
    state = run(tmp_path, ensemble)
    assert [m.state for m in state.members.values()] == ["failed"] * FIRST_TRIALS
    assert state.ended is not None and state.ended.type == "run_stopped"
    reason = f"the first {FIRST_TRIALS} trials of the search all failed, the last one: .*{why}"
    assert re.match(reason, state.ended.reason)
