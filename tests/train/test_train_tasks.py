"""Members of every task, by one worker and by two; targets that take no part; first batches; scales of targets."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import task_cases as cases
import torch
from kit import train_child
from kit.checkpoints import newest_checkpoint
from kit.loop_cases import Events, failed, own_loop
from kit.ranks import run_ranks
from torch import nn

import ensemble
from ensemble import Ensemble, Recipe, SpecError, quantiles
from ensemble.combine.split_metrics import compute
from ensemble.combine.tasks import find_math
from ensemble.comm import SingleRank
from ensemble.spec.losses import NamedLoss
from ensemble.spec.task import IGNORED, Task
from ensemble.store import RunDir, load_checkpoint, load_predictions, save_checkpoint
from ensemble.train.call import Observation
from ensemble.train.data import as_stored_target
from ensemble.train.evaluation import _SplitRows, measure_batch
from ensemble.train.gather import Means
from ensemble.train.outputs import explain_shape_mismatch
from pipelines import Pipeline, sources


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    said = {name: cases.train(name, folder) for name in cases.CASES}
    (folder / "0.json").write_text(json.dumps(said))
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run_ranks(2, cases.train_first, folder)
    return folder


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run_ranks(2, cases.train_second, folder)
    return folder


TIERED = [pytest.param(name, marks=pytest.mark.more if name in cases.SECOND else ()) for name in cases.CASES]


def end(outcome: str, events: Events, log: str = "") -> dict[str, Any]:
    assert outcome == "finished", events[-1]
    return next(event for event in events if event["type"] == "finished")


def said(folder: Path, name: str, type: str, rank: int = 0) -> Events:
    outcome, events = json.loads((folder / f"{rank}.json").read_text())[name]
    assert outcome == "finished", [event for event in events if event["type"] == "failed"]
    return [event for event in events if event["type"] == type]


def metrics(folder: Path, name: str) -> dict[str, float]:
    return dict(said(folder, name, "finished")[0]["metrics"])


def predictions(folder: Path, name: str, split: str = "valid") -> Any:
    return load_predictions(RunDir(folder / name).predictions("member-0", 0), split)


def observed(folder: Path, name: str) -> Observation | None:
    path = newest_checkpoint(RunDir(folder / name), "member-0", 0)
    assert path is not None
    return Observation.from_checkpoint(load_checkpoint(path))


@pytest.mark.parametrize("name", cases.CASES)
def test_a_task_is_reported_and_predicted(one: Path, name: str) -> None:
    case, saved, known = cases.CASES[name], predictions(one, name), metrics(one, name)
    assert saved.task.kind == case.kind and saved.values.shape == (13, *case.shape)
    assert saved.values.dtype == np.float32
    assert set(known) == {"loss", *case.metrics.split()}
    assert np.array_equal(saved.target, case.target(np.random.default_rng(1).normal(size=(13, 6))))
    if case.kind == "classification":
        assert saved.values.sum(axis=-1) == pytest.approx(1, abs=1e-6)
    names: Any = {"one logit": ["roc_auc"], "free": [cases.spread]}.get(name) or case.recipe.split_metrics
    expected = {getattr(metric, "__name__", metric) for metric in names}
    computed = compute(list(names), saved.values, saved.target, saved.task)
    assert computed == pytest.approx({key: value for key, value in known.items() if key in expected}, rel=1e-6)
    losses = [event["metrics"]["loss"] for event in said(one, name, "epoch")]
    assert losses[-1] < losses[0], "it learns"
    if name in ("single", "steps", "gaussian", "one logit", "computed arguments"):
        seen = observed(one, name)
        assert seen is not None and seen.target is not None
        assert seen.target == ("float64" if name == "gaussian" else "int64", (7,) if name == "steps" else ())


@pytest.mark.parametrize("name", TIERED)
def test_two_workers_are_one(one: Path, name: str, request: pytest.FixtureRequest) -> None:
    two = request.getfixturevalue("second" if name in cases.SECOND else "two")
    assert metrics(two, name) == pytest.approx(metrics(one, name), rel=1e-5)
    for split in ("valid", "test"):
        alone, shared = predictions(one, name, split), predictions(two, name, split)
        np.testing.assert_allclose(shared.values, alone.values, rtol=1e-5, atol=1e-6)
        assert np.array_equal(shared.target, alone.target) and np.array_equal(shared.index, alone.index)
        assert shared.task == alone.task
    assert observed(two, name) == observed(one, name)
    epochs = [said(two, name, "epoch", rank) for rank in (0, 1)]
    assert epochs[1] == [] and len(epochs[0]) == 3


@pytest.mark.parametrize("name", TIERED)
def test_a_resume_gives_the_bits_of_an_undisturbed_training(one: Path, tmp_path: Path, name: str) -> None:
    assert cases.train(name, tmp_path, inbox=train_child.Script(7, "stop"))[0] == "stopped"
    last, before = end(*cases.train(name, tmp_path)), said(one, name, "finished")[0]
    assert (last["weights_sha256"], last["metrics"]) == (before["weights_sha256"], before["metrics"])
    assert observed(tmp_path, name) == observed(one, name)
    for split in ("valid", "test"):
        assert np.array_equal(predictions(tmp_path, name, split).values, predictions(one, name, split).values)


def rows_of(member: Any, split: str) -> list[torch.Tensor]:
    with member.evaluating() as model:
        rows = [(model(x=batch["x"]).squeeze(1), batch["index"].clone()) for batch in member.batches(split)]
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def test_a_train_function_says_the_task_of_its_predictions(tmp_path: Path) -> None:
    def predict(member: Any) -> None:
        for split in member.splits:
            member.predictions(split, *rows_of(member, split), task="regression")

    own = own_loop(at_the_end=predict, make=cases.head(1), losses=lambda member, m, batch: cases.squares(m, batch))
    end(*cases.train("regression", tmp_path, recipe=own))
    for split, rows in (("valid", 13), ("test", 4)):
        saved = predictions(tmp_path, "regression", split)
        assert (saved.task, saved.values.shape, saved.target.dtype) == (Task("regression"), (rows,), np.float64)


@pytest.mark.parametrize("name", ["steps", "predict"])
def test_a_rank_without_samples_knows_what_the_others_saw(two: Path, tmp_path: Path, name: str) -> None:
    """Batches of one sample: the first of two ranks, which writes the checkpoint, has none of any."""
    alone = end(*cases.train(name, tmp_path, **cases.TINY))["metrics"]
    tiny = two / "tiny"
    assert observed(tiny, name) == observed(tmp_path, name)
    values = [predictions(folder, name).values for folder in (tiny, tmp_path)]
    np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-6)
    assert metrics(tiny, name) == pytest.approx(alone, rel=1e-5)


def test_a_failing_metric_fails_all_ranks(two: Path) -> None:
    ended = [json.loads((two / "failing" / f"{rank}.json").read_text())["single"] for rank in (0, 1)]
    assert [outcome for outcome, _ in ended] == ["failed", "failed"]
    assert "no such thing" in failed(*ended[0])["error"]


@pytest.mark.parametrize(
    "options", [{"averaging": "swa"}, {"keep": "best"}, {"mixup": 0.4}, {"validate_every": 2}]
)
def test_metrics_of_the_split_go_with_every_kind_of_loop(tmp_path: Path, options: dict[str, Any]) -> None:
    def model(params: dict[str, Any]) -> nn.Module:
        made = cases.Head(3)
        made.layers.insert(1, nn.BatchNorm1d(16, dtype=torch.float64))  # averaged weights want new statistics
        return made

    recipe = replace(cases.CASES["single"].recipe, model=model)
    finished = end(*cases.train("single", tmp_path, recipe=recipe, **options))
    saved = predictions(tmp_path, "single")
    expected = compute(["f1_macro"], saved.values, saved.target, saved.task)
    assert finished["metrics"]["f1_macro"] == pytest.approx(expected["f1_macro"])


def test_a_metric_of_the_split_selects_within_epochs(tmp_path: Path) -> None:
    outcome, events = cases.train("one logit", tmp_path, validate_every=2, keep="best")
    epochs = [event for event in events if event["type"] == "epoch"]
    assert outcome == "finished", events[-1]
    assert [sorted(found) for _, found in epochs[0]["validations"]] == [["accuracy", "loss", "roc_auc"]] * 2


@pytest.mark.parametrize("name", ["steps", "multilabel"])
def test_a_finished_member_of_an_earlier_version_predicts(one: Path, tmp_path: Path, name: str) -> None:
    cases.train(name, tmp_path)
    path = newest_checkpoint(RunDir(tmp_path / name), "member-0", 0)
    state = {key: part for key, part in load_checkpoint(path).items() if key not in ("call", "outputs")}
    save_checkpoint(path, state)
    RunDir(tmp_path / name).predictions("member-0", 0).unlink()
    outcome, events = cases.train(name, tmp_path)
    assert outcome == "finished" and not [event for event in events if event["type"] == "epoch"]
    for split in ("valid", "test"):
        again, before = predictions(tmp_path, name, split), predictions(one, name, split)
        assert np.array_equal(again.values, before.values) and again.task == before.task


def test_a_free_task_needs_no_target(tmp_path: Path) -> None:
    pipe = Pipeline(sources.arrays(x=np.random.default_rng(0).normal(size=(12, cases.WIDE))))

    def reach(values: np.ndarray, target: None) -> float:
        assert target is None
        return float(np.abs(values).max())

    recipe = replace(cases.CASES["free"].recipe, split_metrics=[reach])
    finished = end(*cases.train("free", tmp_path, recipe=recipe, train=pipe, valid=pipe, test=None))
    saved = predictions(tmp_path, "free")
    assert saved.target is None and finished["metrics"]["reach"] == pytest.approx(np.abs(saved.values).max())


NAN = float("nan")
RNG = np.random.default_rng(0)
PROBABILITIES = RNG.dirichlet(np.ones(3), 6).astype(np.float32)
NUMBERS = RNG.normal(size=6).astype(np.float32)
GAUSSIAN, LEVELLED = (np.stack([NUMBERS, more], axis=1) for more in (np.ones_like(NUMBERS), NUMBERS + 1))
SOFT = np.array([[0, 1, NAN], [1, 1, 0], [NAN] * 3, [0, 0, 1], [1, IGNORED, 0], [0, 1, 1]])
MANY = np.eye(200, dtype=np.float32)[[156, 3, 156, 4, 5, 6]]
CLASSIFICATION, LABELS, REGRESSION = Task("classification"), Task("multilabel"), Task("regression")
#: kind, values, target, which take part
TARGETS: dict[str, tuple[Task, np.ndarray, np.ndarray, list[Any]]] = {
    "classes": (CLASSIFICATION, PROBABILITIES, np.array([0, 1, IGNORED, 2, IGNORED, 1]), [0, 1, 3, 5]),
    "as floats": (CLASSIFICATION, PROBABILITIES, np.array([0, 1, NAN, 2, IGNORED, 1.0]), [0, 1, 3, 5]),
    "many classes": (CLASSIFICATION, MANY, np.array([156, 3, 156, 5, 5, 6], np.uint8), [0, 1, 2, 3, 4, 5]),
    "labels": (LABELS, PROBABILITIES, np.nan_to_num(SOFT, nan=IGNORED).astype(int), []),
    "labels as floats": (LABELS, PROBABILITIES, SOFT, []),
    "counts": (REGRESSION, NUMBERS, np.array([1, 2, IGNORED, 3, 0, 2]), [0, 1, 3, 4, 5]),
    "numbers": (REGRESSION, NUMBERS, np.array([1, NAN, IGNORED, 3, 0, 2.0]), [0, 2, 3, 4, 5]),
    "gaussian": (Task("gaussian"), GAUSSIAN, np.array([1, 2, NAN, 3, 0, 2.0]), [0, 1, 3, 4, 5]),
    "quantiles": (quantiles(0.1, 0.5), LEVELLED, np.array([1, 2, IGNORED, 3, 0, 2]), [0, 1, 3, 4, 5]),
}


def store(task: Task, target: np.ndarray) -> torch.Tensor:
    stored = as_stored_target(task, torch.from_numpy(target))
    assert stored is not None
    return stored


@pytest.mark.parametrize("name", TARGETS)
def test_figures_in_training_are_those_of_the_combination(name: str) -> None:
    task, values, target, known = TARGETS[name]
    stored = store(task, target)
    assert explain_shape_mismatch(task, torch.from_numpy(values), stored) is None
    means = Means()
    means.add(measure_batch(task, torch.from_numpy(values), stored), len(values))
    measured = means.over_all(SingleRank())
    combined = find_math(task).measure(values.astype(np.float64), stored.numpy())
    shared = measured.keys() & combined.keys()
    assert shared or task.kind == "quantiles"
    assert {key: measured[key] for key in shared} == pytest.approx({key: combined[key] for key in shared})
    if task.kind == "classification":
        assert measured["accuracy"] == pytest.approx(np.mean(values[known].argmax(axis=1) == target[known]))
    elif known:
        point = task.take_point(values)[known]
        assert measured["mae"] == pytest.approx(np.abs(point - target[known]).mean(), rel=1e-6)


@pytest.mark.parametrize("name", ["classes", "labels", "labels as floats", "counts", "numbers"])
def test_a_loss_learns_from_the_targets_that_figures_count(name: str) -> None:
    task, _, target, _ = TARGETS[name]
    losses = {CLASSIFICATION: "cross_entropy", LABELS: "binary_cross_entropy", REGRESSION: "mse"}
    outputs = torch.zeros((6, 3) if task != REGRESSION else (6,), requires_grad=True)
    NamedLoss(losses[task], "y").compute(outputs, torch.from_numpy(target)).sum().backward()
    stored = store(task, target)
    assert outputs.grad is not None
    known = ~stored.isnan() if stored.is_floating_point() else stored != IGNORED
    has_gradient = outputs.grad != 0 if task != CLASSIFICATION else (outputs.grad != 0).any(dim=1)
    zero_error = (stored == 0) & (task == REGRESSION)  # the output is 0, too
    assert torch.equal(has_gradient, known & ~zero_error)
    soft = np.array([[0.9, 0.1], [0.0, 1.0]])  # rounded, 0.9 would be 0
    assert torch.equal(store(LABELS, soft.astype(np.float32)), torch.from_numpy(soft.astype(np.float32)).double())
    why = explain_shape_mismatch(LABELS, torch.rand(2, 2), store(LABELS, soft))
    assert why == "multilabel: the target has fractions, where it should name classes or labels"


def known_squares(model: nn.Module, batch: Any) -> torch.Tensor:
    known = ~batch["label"].isnan()
    error = model(batch["x"]).squeeze(1) - torch.nan_to_num(batch["label"])
    return torch.where(known, error, 0.0).square()


LATE = {
    "nothing at first": np.array([NAN] * 5 + [0.5, 1.5, NAN, 2.5, 3.5] * 2),
    "zeros at first": np.array([0.0] * 10 + [0.5, 1.5, 0.0, 2.5, 3.5]),
}


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("stop", [None, 1, 2])
def test_what_the_first_batch_does_not_show_a_later_one_does(tmp_path: Path, name: str, stop: int | None) -> None:
    recipe = Recipe(model=cases.head(1), loss=known_squares, task="regression", objective="rmse")
    options: dict[str, Any] = {"epochs": 2, "keep": "best", "validate_every": 1}
    if stop is not None:
        inbox = cases.train_child.Script(stop, "stop")
        assert cases.train_on(recipe, tmp_path, LATE[name], inbox=inbox, **options)[0] == "stopped"
    last = end(*cases.train_on(recipe, tmp_path, LATE[name], **options))
    assert set(last["metrics"]) == {"loss", "mae", "rmse"}
    saved = load_predictions(RunDir(tmp_path / "single").predictions("member-0", 0), "valid")
    assert saved.task == REGRESSION and len(saved.values) == 15
    np.testing.assert_array_equal(saved.target, LATE[name])


def test_a_figure_is_never_of_a_part_of_the_samples(tmp_path: Path) -> None:
    """A model that squeezes its outputs: a last batch of one sample has none that fit."""

    class Squeezed(cases.Head):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x).squeeze()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["x"]).reshape(-1, 3), batch["label"], reduction="none")

    recipe = Recipe(model=lambda params: Squeezed(3), loss=loss, task="classification")
    outcome, events, log = cases.train_on(recipe, tmp_path, np.arange(15) % 3, np.arange(11) % 3)
    assert set(end(outcome, events)["metrics"]) == {"loss"}
    assert "no figures of the predictions on 'valid': classification: values of shape" in log


def test_predictions_of_an_evaluation_are_not_kept_through_the_next_epoch(tmp_path: Path) -> None:
    kept = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            kept.append(sum(len(rows._rows) for rows in gc.get_objects() if type(rows) is _SplitRows))
        return cases.cross_entropy(model, batch)

    recipe = Recipe(model=cases.head(3), loss=loss, split_metrics=["nll"])
    last = end(*cases.train_on(recipe, tmp_path, np.arange(15) % 3))
    assert "nll" in last["metrics"] and kept == [0] * len(kept)


def test_the_validation_loss_is_of_the_samples_that_take_part(tmp_path: Path) -> None:
    recipe = Recipe(model=cases.head(3), loss="cross_entropy", inputs="x", objective="loss")
    label = np.arange(15) % 3
    half = np.where(np.arange(15) < 8, label, IGNORED)
    loss = end(*cases.train_on(recipe, tmp_path / "half", label, half))["metrics"]["loss"]
    saved = load_predictions(RunDir(tmp_path / "half" / "single").predictions("member-0", 0), "valid")
    assert loss == pytest.approx(find_math(saved.task).measure(saved.values, saved.target)["nll"], rel=1e-5)
    outcome, events, _ = cases.train_on(recipe, tmp_path / "none", label, np.full(15, IGNORED), keep="best")
    error = failed(outcome, events)["error"]
    assert "ranked by 'loss', which it did not report" in error, "0 would be the best of all losses"


MEAN, STD = 5000.0, 200.0


class Heads(nn.Module):
    def __init__(self, outputs: int, is_gaussian: bool) -> None:
        super().__init__()
        self.net, self.is_gaussian = nn.Linear(3, outputs), is_gaussian

    def forward(self, x: Any) -> Any:
        outputs = self.net(x)
        return (outputs[:, 0], nn.functional.softplus(outputs[:, 1]) + 1e-3) if self.is_gaussian else outputs


TASKS: dict[str, Any] = {"mse": ("regression", 1), "huber": ("regression", 1), "gaussian_nll": ("gaussian", 2)}
TASKS |= {"pinball": (quantiles(0.1, 0.5, 0.9), 3)}


def declare(loss: str) -> Ensemble:
    task, outputs = TASKS[loss]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype(np.float32)
    price = (MEAN + STD * (x @ [0.8, -0.4, 0.2] + 0.3 * rng.normal(size=400))).astype(np.float32)
    train, valid = (Pipeline(split) for split in sources.arrays(x=x, price=price).split(0.75, seed=0))
    about: dict[str, Any] = {"loss": loss, "inputs": ("x",), "target": "price", "task": task}
    model = lambda params: Heads(outputs, loss == "gaussian_nll")  # noqa: E731
    recipe = Recipe(model=model, target_scale=(MEAN, STD), **about)
    options: dict[str, Any] = {"members": [{"lr": 0.05}] * 2, "optimizer": "adam", "epochs": 8, "batch_size": 32}
    return Ensemble(name="scaled", recipe=recipe, train=train, valid=valid, **options)


@pytest.mark.parametrize(
    "loss", ["gaussian_nll", "pinball", *(pytest.param(name, marks=pytest.mark.more) for name in ("mse", "huber"))]
)
def test_predictions_and_figures_are_in_the_targets_own_unit(tmp_path: Path, loss: str) -> None:
    result = ensemble.submit(declare(loss), tmp_path / "run", "inline").wait()
    best = result.best
    assert 0.2 * STD < best["metrics"]["rmse"] < 0.5 * STD
    saved = load_predictions(RunDir(tmp_path / "run").predictions(best["member"]), "valid")
    assert abs(saved.target.mean() - MEAN) < STD
    points = saved.values.reshape(len(saved.values), -1)[:, 1 if loss == "pinball" else 0]
    error = np.sqrt(np.mean((points - saved.target) ** 2))
    assert error == pytest.approx(best["metrics"]["rmse"], rel=1e-3)
    if loss == "gaussian_nll":
        assert 0.1 < np.sqrt(saved.values[:, 1]).mean() / error < 10
    loaded = ensemble.load(tmp_path / "run", members=[best["member"]], combine="average")
    values = loaded({"x": torch.randn(4, 3)})
    assert abs(values.reshape(4, -1)[:, 0].mean() - MEAN) < 4 * STD
    if loss != "pinball":  # which has no such figure of the ensemble
        assert result.combined["metrics"]["ensemble"]["rmse"] < 0.5 * STD


def test_a_student_learns_from_an_ensemble_with_a_scale(tmp_path: Path) -> None:
    declared = declare("mse")
    target = torch.tensor([MEAN + STD, MEAN, torch.nan])
    assert declared.recipe.loss.compute(torch.zeros(3, 1), target).tolist() == [1.0, 0.0, 0.0]
    ensemble.submit(declared, tmp_path / "run", "inline").wait()
    student = ensemble.distill(tmp_path / "run", tmp_path / "student", executor="inline").wait()
    assert student.best["metrics"]["rmse"] < 0.5 * STD


def test_what_is_no_scale_is_refused() -> None:
    for options, says in (
        ({"target_scale": (0.0, 0.0)}, "standard deviation must be above 0"),
        ({"target_scale": 3.0}, r"must be \(mean, standard deviation\)"),
        *(({"task": task, "loss": "cross_entropy"}, "is for numbers") for task in ("classification", None)),
    ):
        with pytest.raises(SpecError, match=says):
            Recipe(**{"model": len, "loss": "mse", "target_scale": (0.0, 1.0), **options})


class Raw(nn.Module):
    """A model whose outputs are a view of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Any) -> Any:
        return x + self.shift if self.training else x[:, :3]


def test_figures_of_small_batches_are_those_of_the_saved_predictions(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, label = rng.normal(size=(400, 3)).astype(np.float32), rng.integers(0, 3, 400)
    train, valid = (Pipeline(split) for split in sources.arrays(x=x, label=label).split(0.5, seed=0))
    listed: dict[str, Any] = {"members": [{"lr": 1e-6}], "epochs": 1, "batch_size": 8}
    recipe = Recipe(model=lambda params: Raw(), loss="cross_entropy")
    declared = Ensemble(name="raw", recipe=recipe, train=train, valid=valid, **listed)
    best = ensemble.submit(declared, tmp_path / "run", "inline").wait().best
    saved = load_predictions(RunDir(tmp_path / "run").predictions(best["member"]), "valid")
    likely = saved.values[np.arange(len(saved.target)), saved.target]
    assert best["metrics"]["loss"] == pytest.approx(-np.log(likely).mean(), rel=1e-6)
    assert best["metrics"]["accuracy"] == np.mean(saved.values.argmax(axis=1) == saved.target)


def test_outputs_that_do_not_fit_the_last_small_batch_are_named(tmp_path: Path) -> None:
    class Squeezed(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x).squeeze()

    x = np.zeros((49, 3), np.float32)
    train, valid = sources.arrays(x=x[:16], label=x[:16, 0]), sources.arrays(x=x[16:], label=x[16:, 0])
    recipe = Recipe(model=lambda params: Squeezed(3, 1), loss="mse")
    listed: dict[str, Any] = {"members": [{"lr": 1e-6}], "epochs": 1, "batch_size": 16}
    declared = Ensemble(name="s", recipe=recipe, train=Pipeline(train), valid=Pipeline(valid), **listed)
    member = ensemble.submit(declared, tmp_path / "run", "inline").wait().members[0]
    assert member["state"] == "failed" and "outputs of shape [] for a target of shape [1]" in member["error"]
