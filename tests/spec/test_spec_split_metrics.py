"""Metrics of a whole split: which names have a meaning for which task, which way they go, and their values."""

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
from ensemble.combine.split_metrics import compute
from ensemble.combine.tasks import find_math
from ensemble.schedule.trials import FIRST_TRIALS
from ensemble.spec.objectives import infer_mode
from ensemble.spec.split_metrics import KNOWN, OTHER_NAMES
from ensemble.spec.task import CLASSIFICATION, IGNORED, Task, quantiles
from pipelines import Pipeline, sources

RNG = np.random.default_rng(7)
TWO = np.stack([1 - (p := RNG.random(200)), p], axis=1)
TWO_TARGET = (RNG.random(200) < p).astype(np.int64)
THREE = RNG.dirichlet((1.0, 1.0, 1.0), 300)
THREE_TARGET = RNG.integers(0, 3, 300)
LABELS, LABELS_TARGET = RNG.random((100, 4)), RNG.integers(0, 2, (100, 4))
NUMBERS = RNG.normal(size=150)
NUMBERS_TARGET = NUMBERS + 0.3 * RNG.normal(size=150)


@pytest.fixture(scope="module")
def metrics() -> Any:
    """scikit-learn's, dear to import."""
    from sklearn import metrics

    return metrics


def recipe(**options: object) -> Recipe:
    given: Any = {"task": "classification", **options}
    return Recipe(model=lambda params: None, loss=lambda model, batch: None, **given)


def test_classes_and_labels_are_those_of_scikit_learn(metrics: Any) -> None:
    second, chosen, label = TWO.argmax(axis=1), THREE.argmax(axis=1), LABELS >= 0.5
    area = metrics.roc_auc_score(THREE_TARGET, THREE, multi_class="ovr")
    f1 = metrics.f1_score(THREE_TARGET, chosen, average="macro")
    expected: list[tuple[Any, ...]] = [
        ("roc_auc", TWO, TWO_TARGET, metrics.roc_auc_score(TWO_TARGET, TWO[:, 1])),
        ("average_precision", TWO, TWO_TARGET, metrics.average_precision_score(TWO_TARGET, TWO[:, 1])),
        ("f1", TWO, TWO_TARGET, metrics.f1_score(TWO_TARGET, second)),
        ("precision", TWO, TWO_TARGET, metrics.precision_score(TWO_TARGET, second)),
        ("recall", TWO, TWO_TARGET, metrics.recall_score(TWO_TARGET, second)),
        ("matthews", TWO, TWO_TARGET, metrics.matthews_corrcoef(TWO_TARGET, second)),
        ("cohen_kappa", TWO, TWO_TARGET, metrics.cohen_kappa_score(TWO_TARGET, second)),
        *((name, THREE, THREE_TARGET, area) for name in ("roc_auc", "roc_auc_macro")),
        *((name, THREE, THREE_TARGET, f1) for name in ("f1", "f1_macro")),
        ("f1_micro", THREE, THREE_TARGET, metrics.f1_score(THREE_TARGET, chosen, average="micro")),
        ("balanced_accuracy", THREE, THREE_TARGET, metrics.balanced_accuracy_score(THREE_TARGET, chosen)),
        ("top5_accuracy", THREE, THREE_TARGET, 1.0),
        ("roc_auc_macro", LABELS, LABELS_TARGET, metrics.roc_auc_score(LABELS_TARGET, LABELS)),
        ("average_precision", LABELS, LABELS_TARGET, metrics.average_precision_score(LABELS_TARGET, LABELS)),
        ("f1_macro", LABELS, LABELS_TARGET, metrics.f1_score(LABELS_TARGET, label, average="macro")),
        ("f1_micro", LABELS, LABELS_TARGET, metrics.f1_score(LABELS_TARGET, label, average="micro")),
    ]
    for name, values, target, figure in expected:
        task = Task("multilabel") if values is LABELS else CLASSIFICATION
        assert compute([name], values, target, task) == {name: pytest.approx(figure, rel=1e-12)}


def test_numbers_are_those_of_scikit_learn_of_a_mean_and_of_a_middle_quantile_too(metrics: Any) -> None:
    names, points = of_kind("regression"), Task("regression")
    found = compute(names, NUMBERS, NUMBERS_TARGET, points)
    assert set(found) == set(names)
    assert found["r2"] == metrics.r2_score(NUMBERS_TARGET, NUMBERS)
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((NUMBERS - NUMBERS_TARGET) ** 2)))
    assert found["pearson"] == pytest.approx(np.corrcoef(NUMBERS, NUMBERS_TARGET)[0, 1])
    gaussian = np.stack([NUMBERS, np.ones_like(NUMBERS)], axis=-1)
    three = np.stack([NUMBERS - 1, NUMBERS, NUMBERS + 1], axis=-1)
    for values, task in ((gaussian, Task("gaussian")), (three, quantiles(0.1, 0.5, 0.9))):
        assert compute(["mae"], values, NUMBERS_TARGET, task) == {"mae": found["mae"]}


def of_kind(kind: str) -> list[str]:
    return [name for name, known in KNOWN.items() if kind in known.kinds]


def test_positions_that_take_no_part_change_nothing() -> None:
    for task, values, target, absent in (
        (CLASSIFICATION, TWO.reshape(20, 10, 2), TWO_TARGET.reshape(20, 10), IGNORED),
        (Task("regression"), NUMBERS.reshape(15, 10), NUMBERS_TARGET.reshape(15, 10), np.nan),
    ):
        padded = target.copy()
        padded[:, 7:] = absent
        for name in of_kind(task.kind):
            assert compute([name], values, padded, task) == compute([name], values[:, :7], target[:, :7], task)


def test_what_the_samples_leave_undefined_is_absent() -> None:
    ones, same, numbers = np.ones_like(TWO_TARGET), np.zeros_like(NUMBERS), Task("regression")
    assert compute(["roc_auc", "recall"], TWO, ones, CLASSIFICATION).keys() == {"recall"}
    assert compute(["pearson", "mae"], same, NUMBERS_TARGET, numbers).keys() == {"mae"}
    assert compute(["rmse"], NUMBERS, np.full_like(NUMBERS, np.nan), numbers) == {}
    values, target = np.array([1.0, 2.0]), np.array([1.0, 1.0])  # which do not vary
    assert compute(["r2", "explained_variance", "mae"], values, target, numbers).keys() == {"mae"}
    assert "r2" not in find_math(numbers).measure(values, target)


def test_of_five_equal_probabilities_the_same_are_taken_in_training_and_in_combination() -> None:
    values, target = np.full((4, 10), 0.1), np.array([0, 1, 2, 9])
    figures = compute(["top5_accuracy"], values, target, CLASSIFICATION)
    assert figures["top5_accuracy"] == find_math(CLASSIFICATION).measure(values, target)["top5_accuracy"] == 0.25


def test_labels_that_take_no_part_may_be_integers_or_floats() -> None:
    target, task = LABELS_TARGET.copy(), Task("multilabel")
    target[60:, 1] = IGNORED
    for name in of_kind("multilabel"):
        figures = compute([name], LABELS, target, task)
        assert compute([name], LABELS, np.where(target == IGNORED, np.nan, target), task) == figures
        assert compute([name], LABELS, target.astype(np.float32), task) == figures
        assert figures != compute([name], LABELS, LABELS_TARGET, task)


def test_predictions_that_are_not_finite_leave_a_metric_undefined() -> None:
    for name, known in KNOWN.items():
        kind = known.kinds[0]
        values, target = (TWO.copy(), TWO_TARGET) if kind == "classification" else (NUMBERS.copy(), NUMBERS_TARGET)
        if kind == "gaussian":
            values = np.stack([values, np.ones_like(values)], axis=-1)
        values[3] = np.nan
        assert compute([name], values, target, Task(kind)) == {}
        if "multilabel" in known.kinds:
            assert compute([name], np.full_like(LABELS, np.inf), LABELS_TARGET, Task("multilabel")) == {}


def test_a_function_gets_the_values_as_they_are_and_reports_under_its_name() -> None:
    def widest(values: np.ndarray, target: np.ndarray) -> float:
        assert values.shape == (20, 10, 2) and target.shape == (20, 10)
        return float(np.ptp(values))

    def undefined(values: np.ndarray, target: np.ndarray) -> float:
        return float("nan")

    found = compute([widest, undefined], TWO.reshape(20, 10, 2), TWO_TARGET.reshape(20, 10), CLASSIFICATION)
    assert found == {"widest": float(np.ptp(TWO))}


def declared(of: Recipe, **options: object) -> Ensemble:
    pipe = Pipeline(sources.arrays(x=np.zeros((4, 2), np.float32), label=np.arange(4) % 2))
    return Ensemble(name="n", recipe=of, members=[{"lr": 0.1}], train=pipe, valid=pipe, **options)  # type: ignore[arg-type]


def test_a_metric_of_the_split_may_be_the_objective_and_the_task_says_it_where_none_is() -> None:
    def warning_time(values: np.ndarray, target: np.ndarray) -> float:
        return 0.0

    assert {name: infer_mode(name) for name in KNOWN} == {name: known.mode for name, known in KNOWN.items()}
    assert declared(recipe(task="regression", objective="rmse")).mode == "min"
    assert declared(recipe(task="multilabel", objective="subset_accuracy")).objective == "subset_accuracy"
    assert declared(recipe(), objective="roc_auc").mode == "max"
    of = recipe(split_metrics=[warning_time], objective="warning_time", mode="max")
    assert declared(of).objective == "warning_time"
    for task, objective in (("regression", "loss"), ("multilabel", "loss"), ("classification", "accuracy")):
        made = declared(recipe(task=task))
        assert (made.objective, made.mode) == (objective, "max" if objective == "accuracy" else "min")


def test_proper_scores_are_the_figures_of_a_combined_model() -> None:
    for task, values, target in (
        (CLASSIFICATION, THREE, THREE_TARGET),
        (CLASSIFICATION, THREE.reshape(60, 5, 3), THREE_TARGET.reshape(60, 5)),
        (Task("multilabel"), LABELS, LABELS_TARGET),
        (Task("gaussian"), np.stack([NUMBERS, 0.1 + RNG.random(150)], axis=-1), NUMBERS_TARGET),
    ):
        names = [name for name in ("nll", "brier", "crps") if task.kind in KNOWN[name].kinds]
        figures, scores = find_math(task).measure(values, target), compute(names, values, target, task)
        assert scores == pytest.approx({name: figures[name] for name in names}, rel=1e-12) and len(scores) == 2


def test_the_name_that_others_use_is_answered_with_ours() -> None:
    data = Pipeline(sources.arrays(x=NUMBERS))
    for name, ours in OTHER_NAMES.items():
        assert ours in KNOWN
        with pytest.raises(SpecError, match=f"'{name}'; it is called '{ours}' here"):
            compute([name], THREE, THREE_TARGET, CLASSIFICATION)
        with pytest.raises(SpecError, match=f"did you mean '{ours}'"):
            Ensemble(name="a", recipe=recipe(objective=name, mode="max"), members=[{}], train=data, valid=data)


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


def declared_objectives(members: list[dict[str, Any]] | None = None, **options: Any) -> Ensemble:
    usual: dict[str, Any] = {"name": "ranked", "recipe": train, "train": samples(), "members": members or [{}]}
    return Ensemble(**{**usual, **options})


MIN = "loss nll val_loss Valid/MSE rmse ece crps perplexity ctc-loss negative_log_likelihood two-step-loss"
MAX = "accuracy auc f1 r2 test_acc valid_accuracy class_1_accuracy text_to_image_accuracy"
DIRECTIONS: dict[str | None, list[str]] = {
    "min": [*MIN.split(), "pinball", "mae", "crossing", "brier", "seq_to_seq_loss", "valid - mse"]
}
DIRECTIONS["max"] = [*MAX.split(), "Top-5 accuracy", "Top-1 accuracy"]
DIRECTIONS[None] = ["distance", "lossy", "valid", "a/b", "time_to_accuracy", "steps to error", "1-shot accuracy"]
# What is negated or subtracted, at the beginning or inside.
DIRECTIONS[None] += ["1 - accuracy", "1-AUC", "-loss", "1-val_accuracy", "val 1-accuracy", "val -accuracy"]
DIRECTIONS[None] += ["one minus dice", "val_neg_rmse", "error_neg_accuracy", "mean_neg_loss", "error (1-accuracy)"]


def test_which_way_is_better_is_known_by_the_name_or_must_be_given() -> None:
    for mode, names in DIRECTIONS.items():
        for name in names:
            assert infer_mode(name) == mode, name
            if mode is None:
                with pytest.raises(SpecError, match=r"by mode='max' or mode='min'"):
                    declared_objectives(objective=name)
            assert declared_objectives(objective=name, mode=mode or "min").mode == (mode or "min")
            assert mode is None or declared_objectives(objective=name).mode == mode
    assert infer_mode("") is None
    with pytest.raises(SpecError, match=r"mode='max' or mode='min' .*Did you mean 'accuracy'\?$"):
        declared_objectives(objective="acuracy")


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

    assert declared_objectives(recipe=recipe(objective="distance", mode="min")).mode == "min"
    assert declared_objectives(recipe=recipe(objective="distance", mode="min"), objective="auc").mode == "max"
    assert declared_objectives(recipe=recipe(mode="min"), objective="distance").mode == "min"
    by_loss = replace(declared_objectives(), objective="loss")
    assert (by_loss.mode, replace(by_loss, objective="accuracy").mode) == ("min", "max")


def submit(made: Ensemble, path: Path) -> Any:
    return ensemble.submit(made, path, "inline").wait()


def test_the_member_of_the_least_loss_is_the_best_where_it_is_asked_for(tmp_path: Path) -> None:
    made = declared_objectives([{"loss": 3.0}, {"loss": 1.0}, {"loss": 2.0}], objective="loss")
    assert submit(made, tmp_path / "loss").best["member"] == "member-1"
    result = submit(declared_objectives([{"loss": 1.0}]), tmp_path / "none")
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
    result = submit(
        declared_objectives([{"accuracy": 0.5}] * 2, objective="acuracy", mode="max", epochs=3), tmp_path
    )
    assert [(row["state"], row["attempts"]) for row in result.members] == [("failed", 1)] * 2
    error = result.members[0]["error"]
    assert "'acuracy', which it did not report; did you mean 'accuracy'? (reported: accuracy)" in error
    assert result.best is None


def test_where_member_after_member_reports_something_else_the_others_are_not_trained(tmp_path: Path) -> None:
    result = submit(declared_objectives([{"loss": 1.0}] * (FIRST_TRIALS + 5), objective="auc"), tmp_path)
    assert "none of the first 10 members reported 'auc'" in (result.stopped or "")
    assert sum(row["attempts"] for row in result.members) == FIRST_TRIALS


def test_a_member_that_lacks_it_is_alone_in_failing_and_measuring_it_once_is_enough(tmp_path: Path) -> None:
    members = [{"auc": 0.5}, {"loss": 1.0}, {"loss": 1.0, "auc": 0.5, "once": True}]
    result = submit(declared_objectives(members, objective="auc", epochs=3), tmp_path)
    assert [row["state"] for row in result.members] == ["finished", "failed", "finished"]


def test_of_which_class_a_metric_is_is_said() -> None:
    label = np.array(["fraud", "usual"] * 8)
    train, valid = sources.arrays(x=np.zeros((16, 2), np.float32), label=label).split(0.5, stratify="label")

    def list_notices(**options: Any) -> list[str]:
        recipe = Recipe(model=lambda params: torch.nn.Linear(2, 2), loss="cross_entropy", inputs=("x",), **options)
        pipelines = {"train": Pipeline(train, seed=0), "valid": Pipeline(valid)}
        declared = Ensemble(
            name="fraud", recipe=recipe, members=[{"lr": 0.1}], optimizer="adam", batch_size=4, **pipelines
        )
        return declared.list_notices()

    assert any("'usual'" in notice and "f1" in notice for notice in list_notices(split_metrics=["f1"]))
    assert not list_notices(split_metrics=["f1_macro"])
