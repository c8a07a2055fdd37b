"""By what members are ranked, and which way: known, said, or refused; never guessed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.event_dicts import fold, read_events

import ensemble
from ensemble import Ensemble, Recipe, Search, SpecError, uniform
from ensemble.schedule.trials import FIRST_TRIALS
from ensemble.spec.objectives import infer_mode
from pipelines import Pipeline, sources


def samples() -> Pipeline:
    rng = np.random.default_rng(0)
    return Pipeline(sources.arrays(x=rng.random((8, 2), dtype=np.float32), label=np.arange(8) % 2))


def train(member: Any) -> None:
    model = torch.nn.Linear(2, 2)
    model, _ = member.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in member.epochs():
        for batch in member.batches():
            member.backward(model(batch["x"]).sum(dim=1))
            member.step()
        once = ["auc"] if epoch and "once" in member.params else []
        member.report(**{name: value for name, value in member.params.items() if name not in [*once, "once"]})


def declared(members: list[dict[str, Any]] | None = None, **options: Any) -> Ensemble:
    usual: dict[str, Any] = {"name": "ranked", "recipe": train, "train": samples(), "members": members or [{}]}
    return Ensemble(**{**usual, **options})


DIRECTIONS: dict[str | None, tuple[str, ...]] = {
    "min": ("loss", "nll", "val_loss", "Valid/MSE", "rmse", "ece", "crps")
}
DIRECTIONS["min"] += (
    "perplexity",
    "ctc-loss",
    "negative_log_likelihood",
    "valid - mse",
    "two-step-loss",
    "pinball",
)
DIRECTIONS["min"] += ("mae", "crossing", "brier", "seq_to_seq_loss")
DIRECTIONS["max"] = (
    "accuracy",
    "auc",
    "f1",
    "r2",
    "test_acc",
    "Top-5 accuracy",
    "Top-1 accuracy",
    "valid_accuracy",
)
DIRECTIONS["max"] += ("class_1_accuracy", "text_to_image_accuracy")
DIRECTIONS[None] = ("distance", "lossy", "valid", "a/b", "time_to_accuracy", "steps to error", "1-shot accuracy")
#: What is negated or subtracted, at the beginning or inside.
DIRECTIONS[None] += ("1 - accuracy", "1-AUC", "-loss", "1-val_accuracy", "val 1-accuracy", "val -accuracy")
DIRECTIONS[None] += ("one minus dice", "val_neg_rmse", "error_neg_accuracy", "mean_neg_loss", "error (1-accuracy)")


def test_which_way_is_better_is_known_by_the_name_or_must_be_given() -> None:
    for mode, names in DIRECTIONS.items():
        for name in names:
            assert infer_mode(name) == mode, name
            if mode is None:
                with pytest.raises(SpecError, match=r"by mode='max' or mode='min'"):
                    declared(objective=name)
            assert declared(objective=name, mode=mode or "min").mode == (mode or "min")
            assert mode is None or declared(objective=name).mode == mode
    assert infer_mode("") is None
    with pytest.raises(SpecError, match=r"mode='max' or mode='min' .*Did you mean 'accuracy'\?$"):
        declared(objective="acuracy")


def test_scores_of_scikit_learn_and_figures_of_this_package_have_their_directions() -> None:
    from sklearn.metrics import get_scorer_names

    from ensemble.reporting.model_figures import HEADLINES, describe_figure
    from ensemble.spec.split_metrics import KNOWN

    negated = {name for name in get_scorer_names() if name.startswith("neg_")}
    assert {"neg_mean_squared_error", "neg_log_loss", "neg_brier_score"} <= negated
    assert {infer_mode(name) for name in negated} == {None}
    assert "min" not in {infer_mode(name) for name in set(get_scorer_names()) - negated}, "all are maximized"
    for name in {*KNOWN, *(name for names in HEADLINES.values() for name in names)}:
        better = {"max": "higher", "min": "lower"}.get(infer_mode(name) or "")
        assert better in (None, describe_figure(name).better), name


def test_the_mode_is_that_of_the_objective_it_was_given_for() -> None:
    def recipe(**options: Any) -> Recipe:
        return Recipe(model=len, loss=len, task="classification", metrics=len, **options)

    assert declared(recipe=recipe(objective="distance", mode="min")).mode == "min"
    assert declared(recipe=recipe(objective="distance", mode="min"), objective="auc").mode == "max"
    assert declared(recipe=recipe(mode="min"), objective="distance").mode == "min"
    by_loss = replace(declared(), objective="loss")
    assert (by_loss.mode, replace(by_loss, objective="accuracy").mode) == ("min", "max")


def submit(made: Ensemble, path: Path) -> Any:
    return ensemble.submit(made, path, "inline").wait()


def test_the_member_of_the_least_loss_is_the_best_where_it_is_asked_for(tmp_path: Path) -> None:
    made = declared([{"loss": 3.0}, {"loss": 1.0}, {"loss": 2.0}], objective="loss")
    assert submit(made, tmp_path / "loss").best["member"] == "member-1"
    result = submit(declared([{"loss": 1.0}]), tmp_path / "none")
    assert ([row["state"] for row in result.members], result.best) == (["finished"], None)
    assert fold(read_events(tmp_path / "none" / "events.jsonl")).objective == "accuracy"


def test_a_search_prunes_the_large_losses_and_not_the_small_ones(tmp_path: Path) -> None:
    pruner = {"name": "asha", "reduction_factor": 2}
    search = Search({"loss": uniform(0, 1)}, trials=8, sampler="random", pruner=pruner)
    made = Ensemble(name="s", recipe=train, train=samples(), search=search, objective="loss", epochs=4)
    result = submit(made, tmp_path)
    values = {row["member"]: row["metric"] for row in result.members}
    pruned = [values[row["member"]] for row in result.members if row["state"] == "pruned"]
    assert result.best["metric"] == min(values.values())
    assert pruned and min(pruned) > min(values.values())


def test_a_misspelt_objective_of_a_list_ends_each_member_at_its_first_report(tmp_path: Path) -> None:
    result = submit(declared([{"accuracy": 0.5}] * 2, objective="acuracy", mode="max", epochs=3), tmp_path)
    assert [(row["state"], row["attempts"]) for row in result.members] == [("failed", 1)] * 2
    error = result.members[0]["error"]
    assert "'acuracy', which it did not report; did you mean 'accuracy'? (reported: accuracy)" in error
    assert result.best is None


def test_where_member_after_member_reports_something_else_the_others_are_not_trained(tmp_path: Path) -> None:
    result = submit(declared([{"loss": 1.0}] * (FIRST_TRIALS + 5), objective="auc"), tmp_path)
    assert "none of the first 10 members reported 'auc'" in (result.stopped or "")
    assert sum(row["attempts"] for row in result.members) == FIRST_TRIALS


def test_a_member_that_lacks_it_is_alone_in_failing_and_measuring_it_once_is_enough(tmp_path: Path) -> None:
    members = [{"auc": 0.5}, {"loss": 1.0}, {"loss": 1.0, "auc": 0.5, "once": True}]
    result = submit(declared(members, objective="auc", epochs=3), tmp_path)
    assert [row["state"] for row in result.members] == ["finished", "failed", "finished"]
