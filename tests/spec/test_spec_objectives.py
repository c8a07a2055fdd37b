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


SMALL = ("loss", "nll", "val_loss", "Valid/MSE", "rmse", "ece", "perplexity", "ctc-loss")
LARGE = ("accuracy", "auc", "f1", "r2", "test_acc", "Top-5 accuracy")


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "min") for name in SMALL), *((name, "max") for name in LARGE)]
)
def test_which_way_is_better_is_known_by_the_name(name: str, mode: str) -> None:
    assert infer_mode(name) == declared(objective=name).mode == mode


def test_of_what_is_negated_the_mode_must_be_given() -> None:
    from sklearn.metrics import get_scorer_names

    negated = [name for name in get_scorer_names() if name.startswith("neg_")]
    assert {"neg_mean_squared_error", "neg_log_loss", "neg_brier_score"} <= set(negated)
    subtracted = (
        "1 - accuracy",
        "1-AUC",
        "-loss",
        "1-val_accuracy",
        "val 1-accuracy",
        "val -accuracy",
        "one minus dice",
    )
    inside = ("val -accuracy", "val_neg_rmse", "error_neg_accuracy", "mean_neg_loss", "error (1-accuracy)")
    for name in (*negated, *subtracted, *inside, "1-shot accuracy"):
        assert infer_mode(name) is None, name
    assert infer_mode("negative_log_likelihood") == "min"
    names = ("Top-1 accuracy", "class_1_accuracy", "valid - mse", "two-step-loss")
    assert [infer_mode(name) for name in names] == ["max", "max", "min", "min"], "nothing is subtracted"
    with pytest.raises(SpecError, match=r"mode='max' or mode='min' .*Did you mean 'accuracy'\?$"):
        declared(objective="acuracy")
    with pytest.raises(SpecError, match="mode='max' or mode='min'"):
        declared(objective="neg_mean_squared_error")


def test_scores_of_scikit_learn_and_figures_of_this_package_have_their_directions() -> None:
    from sklearn.metrics import get_scorer_names

    from ensemble.reporting.model_figures import HEADLINES, describe_figure
    from ensemble.spec.split_metrics import KNOWN

    positive = [name for name in get_scorer_names() if not name.startswith("neg_")]
    assert "min" not in {infer_mode(name) for name in positive}, "all are maximized"
    for name in {*KNOWN, *(name for names in HEADLINES.values() for name in names)}:
        better = {"max": "higher", "min": "lower"}.get(infer_mode(name) or "")
        assert better in (None, describe_figure(name).better), name
    assert {infer_mode(name) for name in ("rmse", "mae", "crps", "pinball", "crossing", "nll", "brier")} == {"min"}


@pytest.mark.parametrize("name", ["distance", "lossy", "valid", "", "a/b"])
def test_of_any_other_name_the_mode_must_be_given(name: str) -> None:
    assert infer_mode(name) is None
    if name:
        with pytest.raises(SpecError, match=r"by mode='max' or mode='min'"):
            declared(objective=name)
        assert declared(objective=name, mode="min").mode == "min"


def test_the_mode_is_that_of_the_objective_it_was_given_for() -> None:
    def recipe(**options: Any) -> Recipe:
        return Recipe(model=len, loss=len, task="classification", metrics=len, **options)

    assert declared(recipe=recipe(objective="distance", mode="min")).mode == "min"
    assert declared(recipe=recipe(objective="distance", mode="min"), objective="auc").mode == "max"
    assert declared(recipe=recipe(mode="min"), objective="distance").mode == "min"
    by_loss = replace(declared(), objective="loss")
    assert (by_loss.mode, replace(by_loss, objective="accuracy").mode) == ("min", "max")


def test_the_member_of_the_least_loss_is_the_best(tmp_path: Path) -> None:
    made = declared([{"loss": 3.0}, {"loss": 1.0}, {"loss": 2.0}], objective="loss")
    result = ensemble.submit(made, tmp_path, "inline").wait()
    assert result.best is not None and result.best["member"] == "member-1"


def test_a_search_prunes_the_large_losses_and_not_the_small_ones(tmp_path: Path) -> None:
    search = Search(
        {"loss": uniform(0, 1)}, trials=8, sampler="random", pruner={"name": "asha", "reduction_factor": 2}
    )
    made = Ensemble(name="s", recipe=train, train=samples(), search=search, objective="loss", epochs=4)
    result = ensemble.submit(made, tmp_path, "inline").wait()
    values = {row["member"]: row["metric"] for row in result.members}
    pruned = [values[row["member"]] for row in result.members if row["state"] == "pruned"]
    assert result.best is not None and result.best["metric"] == min(values.values())
    assert pruned and min(pruned) > min(values.values())


def test_a_misspelt_objective_of_a_list_ends_each_member_at_its_first_report(tmp_path: Path) -> None:
    made = declared([{"accuracy": 0.5}, {"accuracy": 0.9}], objective="acuracy", mode="max", epochs=3)
    result = ensemble.submit(made, tmp_path, "inline").wait()
    assert [(row["state"], row["attempts"]) for row in result.members] == [("failed", 1)] * 2
    error = result.members[0]["error"]
    assert "'acuracy', which it did not report; did you mean 'accuracy'? (reported: accuracy)" in error
    assert result.best is None


def test_where_member_after_member_reports_something_else_the_others_are_not_trained(tmp_path: Path) -> None:
    made = declared([{"loss": 1.0}] * (FIRST_TRIALS + 5), objective="auc")
    result = ensemble.submit(made, tmp_path, "inline").wait()
    assert "none of the first 10 members reported 'auc'" in (result.stopped or "")
    assert sum(row["attempts"] for row in result.members) == FIRST_TRIALS


def test_a_member_that_lacks_it_is_alone_in_failing_and_measuring_it_once_is_enough(tmp_path: Path) -> None:
    members = [{"auc": 0.5}, {"loss": 1.0}, {"loss": 1.0, "auc": 0.5, "once": True}]
    result = ensemble.submit(declared(members, objective="auc", epochs=3), tmp_path, "inline").wait()
    assert [row["state"] for row in result.members] == ["finished", "failed", "finished"]


def test_what_nobody_asked_for_need_not_be_reported(tmp_path: Path) -> None:
    result = ensemble.submit(declared([{"loss": 1.0}]), tmp_path, "inline").wait()
    assert ([row["state"] for row in result.members], result.best) == (["finished"], None)
    assert fold(read_events(tmp_path / "events.jsonl")).objective == "accuracy"


def test_the_time_until_something_is_reached_implies_no_mode() -> None:
    names = ("time_to_accuracy", "steps to error", "valid_accuracy", "seq_to_seq_loss", "text_to_image_accuracy")
    assert [infer_mode(name) for name in names] == [None, None, "max", "min", "max"]
