"""A task of each form of outputs from training to loading: members are ranked, combined, calibrated, asked.

What has no meaning for a task must say why. All tasks: tests/combine, tests/artifact.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kit.finished_runs import read_state
from kit.kept_predictions import save_predictions
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torch.nn import functional as F

import ensemble
from ensemble import Ensemble, Recipe
from ensemble.controller.finalize import Finalizer
from ensemble.reporting.ranking import rank_members
from ensemble.spec.task import CLASSIFICATION, IGNORED
from ensemble.store import RunDir, load_predictions
from pipelines import Pipeline, sources

STEPS, CLASSES, COVERAGE = 5, 3, 0.7
SIZES = {"train": 96, "valid": 60, "test": 50}
Array = np.ndarray[Any, Any]


def network(*shape: int) -> nn.Module:
    size = int(np.prod(shape))
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, size), nn.Unflatten(1, shape))


class Gaussian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.body(x).unbind(1)
        return mean, F.softplus(spread) + 1e-3


def mean_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """The mean over the positions of a sample that take part; classes come second."""
    known = (target != IGNORED).flatten(1).sum(1)
    return F.cross_entropy(outputs, target, reduction="none").flatten(1).sum(1) / known


def accuracy(values: Array, target: Array) -> float:
    return float((values.argmax(-1) == target)[target != IGNORED].mean())


def f1_macro(values: Array, target: Array) -> float:
    return float(f1_score(target, values >= 0.5, average="macro", zero_division=0))


def gaussian_nll(values: Array, target: Array) -> float:
    mean, variance = torch.from_numpy(values).unbind(1)
    return float(F.gaussian_nll_loss(mean, torch.from_numpy(target), variance))


def steps_of(x: Array, rng: np.random.Generator) -> Array:
    steps = (x[:, :1] > np.linspace(-1, 1, STEPS)).astype(np.int64) + (x[:, 1:2] > 0)
    steps[np.arange(STEPS) > 1 + (np.arange(len(x)) % (STEPS - 1))[:, None]] = IGNORED
    return steps


def number_of(x: Array, rng: np.random.Generator) -> Array:
    return (x[:, 0] + x[:, 1] * x[:, 2] + 0.2 * rng.normal(size=len(x))).astype(np.float32)


class Case(NamedTuple):
    """A task, and what each step is expected to find: figures of predictions and targets, written independently.

    `calibration` is the method; `parts` are those of the uncertainty.
    """

    kind: str
    model: Callable[[Any], nn.Module]
    loss: Callable[..., Tensor]
    target: Callable[[Array, np.random.Generator], Array]
    objective: tuple[str, str, Callable[[Array, Array], float]]
    figure: tuple[str, Callable[[Array, Array], float]]
    calibration: str
    parts: str = "total aleatoric epistemic disagreement"


#: Points, quantiles and free outputs: tests/combine.
CASES = {
    "multi-label": Case(
        "multilabel", lambda params: network(3),
        lambda o, t: F.binary_cross_entropy_with_logits(o, t.float(), reduction="none").mean(1),
        lambda x, rng: (x[:, :3] > 0).astype(np.int64),
        ("f1_macro", "max", f1_macro), ("f1_macro", f1_macro), "temperature",
    ),
    "per step": Case(
        "classification", lambda params: network(CLASSES, STEPS), mean_loss, steps_of,
        ("accuracy", "max", accuracy), ("accuracy", accuracy), "temperature",
    ),
    "mean and variance": Case(
        "gaussian", lambda params: Gaussian(),
        lambda o, t: F.gaussian_nll_loss(o[0], t, o[1], reduction="none"), number_of,
        ("loss", "min", gaussian_nll), ("rmse", lambda p, t: float(np.sqrt(((p[:, 0] - t) ** 2).mean()))),
        "variance_scale", parts="total aleatoric epistemic",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The bits of a program are those of `load` with the same number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def declare(case: Case) -> tuple[Ensemble, dict[str, dict[str, Array]]]:
    data = {}
    for seed, (split, n) in enumerate(SIZES.items()):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(n, 4)).astype(np.float32)
        data[split] = {"x": x, "y": case.target(x, rng)}
    recipe = Recipe(
        model=case.model, loss=lambda net, batch: case.loss(net(batch["x"]), batch["y"]), target="y",
        task=case.kind, objective=case.objective[0],
    )  # fmt: skip
    usual: Any = {split: Pipeline(sources.arrays(**arrays), seed=0) for split, arrays in data.items()}
    usual |= {"optimizer": "adam", "epochs": 5, "batch_size": 16, "coverage": COVERAGE}
    members = [{"lr": 0.03}, {"lr": 0.02}, {"lr": 1e-7}]
    return Ensemble(name="every", recipe=recipe, members=members, **usual), data


@pytest.mark.parametrize("name", CASES)
def test_members_are_ranked_combined_and_calibrated_and_say_how_sure_they_are(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    declared, data = declare(case)
    result = ensemble.submit(declared, tmp_path, "inline").wait()
    state, combined, x = read_state(tmp_path), result.combined, {"x": torch.from_numpy(data["test"]["x"])}

    objective, direction, measure = case.objective
    assert [row["state"] for row in result.members] == ["finished"] * 3
    assert (state.objective, state.direction) == (objective, direction)
    for row in result.members:
        saved = load_predictions(RunDir(tmp_path).predictions(row["member"]), "valid")
        assert saved.task is not None and saved.task.kind == case.kind
        expected = measure(saved.values[np.argsort(saved.index)], data["valid"]["y"])
        assert row["metric"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    ranked = [member.id for member in rank_members(state)]
    assert ranked[-1] == "member-2", "it hardly learns"
    assert result.best is not None and result.best["member"] == ranked[0]

    assert combined["task"]["kind"] == case.kind and combined["reason"] is None
    assert combined["method"] == "greedy"
    figure, compute = case.figure
    expected = compute(np.asarray(ensemble.load(tmp_path)(x).numpy()), data["test"]["y"])
    assert combined["metrics"]["ensemble"][figure] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for of in ("best", "mean"):
        assert set(combined["metrics"][of]) == set(combined["metrics"]["ensemble"])

    calibration = combined.calibration
    assert (calibration["method"], calibration["reason"]) == (case.calibration, None)
    assert calibration["value"] > 0 and calibration["value"] != 1.0
    sure = ensemble.load(tmp_path, uncertainty=True)(x)
    assert {part for part in sure if part != "values"} == set(case.parts.split()) == set(combined.uncertainty)
    for part, mean in combined.uncertainty.items():
        assert sure[part].shape == (SIZES["test"],)
        if not (data["test"]["y"] == IGNORED).any():  # the event knows what takes no part, the model not
            assert float(sure[part].mean()) == pytest.approx(mean, rel=1e-3, abs=1e-5)
    assert {part["level"] for part in combined.conformal.values()} == {COVERAGE}
    for part in combined.conformal.values():
        assert COVERAGE - 0.2 < part["coverage"] <= 1, "of 60 and 50 samples: three deviations"
    if name == "multi-label":
        check_failing_combination(RunDir(shutil.copytree(tmp_path, tmp_path / "copy")), declared)


def check_failing_combination(run: RunDir, declared: Ensemble) -> None:
    """It says so and replaces that of an earlier session."""
    state, path = read_state(run.path), run.predictions("member-1")
    saved = load_predictions(path, "valid")
    digest = save_predictions(
        path, "valid", saved.values, saved.index + 1, saved.target, saved.task or CLASSIFICATION
    )
    state.members["member-1"].predictions = dict.fromkeys(("valid", "test"), digest)
    for earlier in (state.combined, None):
        state.combined = earlier
        finalizer = Finalizer(run, declared)
        combined = finalizer.combine_members(state)
        assert "predicted different valid samples" in finalizer.notes[0]
        assert combined is not None and combined["failed"]
        assert (combined["members"], combined["metrics"]) == ([], None)
