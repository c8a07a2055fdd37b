"""A task of each form of outputs from training to loading: members are ranked, combined, calibrated, asked.

Each test is a step; what has no meaning for a task must say why. All tasks: tests/combine, tests/artifact.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.finished_runs import read_state
from kit.kept_predictions import save_predictions
from sklearn import metrics
from torch import Tensor, nn
from torch.nn import functional as F

import ensemble
from ensemble import Ensemble, Recipe, Result, Task
from ensemble.combine.metrics import CombineError
from ensemble.controller.finalize import Finalizer
from ensemble.reporting.ranking import rank_members
from ensemble.spec.task import CLASSIFICATION, IGNORED
from ensemble.store import RunDir, RunState, load_predictions
from pipelines import Pipeline, sources

STEPS, CLASSES, COVERAGE = 5, 3, 0.7
SIZES = {"train": 96, "valid": 60, "test": 50}
Array = np.ndarray[Any, Any]


class Gaussian(nn.Module):
    """Mean and variance."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.body(x).unbind(1)
        return mean, F.softplus(spread) + 1e-3


def network(*shape: int) -> nn.Module:
    size = int(np.prod(shape))
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, size), nn.Unflatten(1, shape or (1,)))


def mean_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """The mean over the positions of a sample that take part; classes come second."""
    known = (target != IGNORED).flatten(1).sum(1)
    return F.cross_entropy(outputs, target, reduction="none").flatten(1).sum(1) / known


def take_mean(values: Tensor) -> Tensor:
    return values.mean(dim=0)


def largest(values: Array, target: Array) -> float:
    """A user's metric of a free task."""
    return float(values.max())


def from_torch(loss: Callable[..., Tensor]) -> Callable[[Array, Array], float]:
    return lambda values, target: float(loss(torch.from_numpy(values), torch.from_numpy(target)).mean())


def accuracy(values: Array, target: Array) -> float:
    return float((values.argmax(-1) == target)[target != IGNORED].mean())


@dataclass(frozen=True)
class Case:
    """A task, and what each step is expected to find.

    Attributes:
        target: of x [n, 4].
        measure: the objective from predictions and targets, written independently.
        figure: one of the combined model, and how it is `found` from predictions.
        calibration: the method, or why there is none.
        parts: of the uncertainty; or why there are none.
    """

    model: Callable[[Any], nn.Module]
    loss: Callable[..., Tensor]
    target: Callable[[Array, np.random.Generator], Array]
    objective: str
    direction: str
    measure: Callable[[Array, Array], float]
    figure: str
    found: Callable[[Array, Array], float]
    calibration: str
    kind: str
    task: Task | str | None = None
    parts: set[str] = field(default_factory=lambda: {"total", "aleatoric", "epistemic", "disagreement"})
    options: dict[str, Any] = field(default_factory=dict)
    split_metrics: tuple[Any, ...] = ()


def bce(outputs: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, target.float(), reduction="none").mean(1)


def steps_of(x: Array, rng: np.random.Generator) -> Array:
    steps = (x[:, :1] > np.linspace(-1, 1, STEPS)).astype(np.int64) + (x[:, 1:2] > 0)
    steps[np.arange(STEPS) > 1 + (np.arange(len(x)) % (STEPS - 1))[:, None]] = IGNORED
    return steps


def number_of(x: Array, rng: np.random.Generator) -> Array:
    noise = 0.2 * rng.normal(size=len(x))
    return (x[:, 0] + x[:, 1] * x[:, 2] + noise).astype(np.float32)


#: Points and quantiles are loaded in tests/combine.
CASES = {
    "multi-label": Case(
        lambda params: network(3), bce, lambda x, rng: (x[:, :3] > 0).astype(np.int64),
        "f1_macro", "max", lambda p, t: float(metrics.f1_score(t, p >= 0.5, average="macro", zero_division=0)),
        "f1_macro",
        lambda p, t: float(metrics.f1_score(t, p >= 0.5, average="macro", zero_division=0)),
        "temperature", "multilabel", "multilabel",
    ),
    "per step": Case(
        lambda params: network(CLASSES, STEPS), mean_loss, steps_of, "accuracy", "max", accuracy,
        "accuracy", accuracy, "temperature", "classification",
        "classification",
    ),
    "mean and variance": Case(
        lambda params: Gaussian(), lambda o, t: F.gaussian_nll_loss(o[0], t, o[1], reduction="none"), number_of,
        "loss", "min",
        from_torch(lambda p, t: F.gaussian_nll_loss(p[:, 0], t, p[:, 1], reduction="none")),
        "rmse", lambda p, t: float(np.sqrt(((p[:, 0] - t) ** 2).mean())),
        "variance_scale", "gaussian", "gaussian",
        parts={"total", "aleatoric", "epistemic"},
    ),
    "free": Case(
        lambda params: network(2, 2), lambda o, t: (o - t[:, None, None]).square().mean((1, 2)), number_of,
        "loss", "min", lambda p, t: float(((p - t[:, None, None]) ** 2).mean()),
        "largest", lambda p, t: largest(p, t),
        "nothing says what outputs of the task free mean", "free", "free",
        parts=set(), options={"combine": take_mean}, split_metrics=(largest,),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A run that has ended, and its samples by split."""

    case: Case
    run: Path
    result: Result
    data: dict[str, dict[str, Array]]

    @property
    def state(self) -> RunState:
        return read_state(self.run)

    @property
    def combined(self) -> dict[str, Any]:
        assert self.result.combined is not None
        return self.result.combined


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The bits of a program are those of `load` with the same number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def declare(case: Case) -> tuple[Ensemble, dict[str, dict[str, Array]]]:
    """Members of a task, and their samples by split."""
    data, pipes = {}, {}
    for seed, (split, n) in enumerate(SIZES.items()):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(n, 4)).astype(np.float32)
        data[split] = {"x": x, "y": case.target(x, rng)}
        pipes[split] = Pipeline(sources.arrays(**data[split]), seed=0)
    recipe = Recipe(
        model=case.model,
        loss=lambda net, batch: case.loss(net(batch["x"]), batch["y"]),
        target="y",
        task=case.task or case.kind,
        objective=case.objective,
        split_metrics=case.split_metrics,
    )
    members = [{"lr": 0.03}, {"lr": 0.02}, {"lr": 1e-7}]
    usual: dict[str, Any] = {"optimizer": "adam", "epochs": 5, "batch_size": 16, "coverage": COVERAGE}
    return Ensemble(name="every", recipe=recipe, members=members, **usual, **pipes, **case.options), data


@pytest.fixture(scope="module", params=CASES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    case = CASES[request.param]
    declared, data = declare(case)
    run = tmp_path_factory.mktemp("run") / "run"
    return Trained(case, run, ensemble.submit(declared, run, "inline").wait(), data)


@pytest.fixture(scope="module")
def values(trained: Trained) -> Array:
    """What the loaded model predicts for the test split."""
    return np.asarray(ensemble.load(trained.run)({"x": torch.from_numpy(trained.data["test"]["x"])}).numpy())


def test_members_are_ranked_by_their_objective_in_its_direction(trained: Trained) -> None:
    """The one that hardly learns is the last; each value is that of the predictions that were saved."""
    case, state = trained.case, trained.state
    assert [row["state"] for row in trained.result.members] == ["finished"] * 3
    assert (state.objective, state.direction) == (case.objective, case.direction)
    for row in trained.result.members:
        saved = load_predictions(RunDir(trained.run).predictions(row["member"]), "valid")
        assert saved.task is not None and saved.task.kind == case.kind
        order = np.argsort(saved.index)
        expected = case.measure(saved.values[order], trained.data["valid"]["y"])
        assert row["metric"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    ranked = [member.id for member in rank_members(state)]
    assert ranked[-1] == "member-2"
    assert trained.result.best is not None and trained.result.best["member"] == ranked[0]


def test_members_are_combined(trained: Trained, values: Array) -> None:
    combined, target = trained.combined, trained.data["test"]["y"]
    assert combined["task"]["kind"] == trained.case.kind and combined["reason"] is None
    assert combined["method"] == ("function" if trained.case.kind == "free" else "greedy")
    figure = combined["metrics"]["ensemble"][trained.case.figure]
    assert figure == pytest.approx(trained.case.found(values, target), rel=1e-4, abs=1e-5)
    for of in ("best", "mean"):
        assert set(combined["metrics"][of]) == set(combined["metrics"]["ensemble"])


def test_the_combined_model_is_calibrated_or_it_is_said_why_not(trained: Trained) -> None:
    found = trained.combined.calibration
    if found["method"] is None:
        assert trained.case.calibration in found["reason"] and found["value"] in (None, 1.0)
    else:
        assert found["method"] == trained.case.calibration and found["reason"] is None
        assert found["value"] > 0 and found["value"] != 1.0


def test_it_says_how_sure_it_is_or_why_it_cannot(trained: Trained) -> None:
    x = {"x": torch.from_numpy(trained.data["test"]["x"])}
    if not trained.case.parts:
        assert trained.combined.uncertainty is None and trained.combined.conformal is None
        with pytest.raises(CombineError, match="free"):
            ensemble.load(trained.run, uncertainty=True)
        return
    found = ensemble.load(trained.run, uncertainty=True)(x)
    assert {name for name in found if name != "values"} == trained.case.parts == set(trained.combined.uncertainty)
    for name, mean in trained.combined.uncertainty.items():
        assert found[name].shape == (SIZES["test"],)
        if not (trained.data["test"]["y"] == IGNORED).any():  # the event knows what takes no part, the model not
            assert float(found[name].mean()) == pytest.approx(mean, rel=1e-3, abs=1e-5)
    assert {part["level"] for part in trained.combined.conformal.values()} == {COVERAGE}
    for part in trained.combined.conformal.values():
        assert COVERAGE - 0.2 < part["coverage"] <= 1, "of 60 and 50 samples: three deviations"


@pytest.mark.parametrize("trained", ["multi-label"], indirect=True)
def test_a_combination_that_fails_says_so_and_replaces_that_of_an_earlier_session(
    trained: Trained, tmp_path: Path
) -> None:
    run, state = RunDir(shutil.copytree(trained.run, tmp_path / "run")), trained.state
    saved = load_predictions(run.predictions("member-1"), "valid")
    path, shifted = run.predictions("member-1"), saved.index + 1
    digest = save_predictions(path, "valid", saved.values, shifted, saved.target, saved.task or CLASSIFICATION)
    state.members["member-1"].predictions = dict.fromkeys(("valid", "test"), digest)
    for earlier in (state.combined, None):
        state.combined = earlier
        finalizer = Finalizer(run, declare(trained.case)[0])
        combined = finalizer.combine_members(state)
        assert "predicted different valid samples" in finalizer.notes[0]
        assert combined is not None and combined["failed"]
        assert (combined["members"], combined["metrics"]) == ([], None)
