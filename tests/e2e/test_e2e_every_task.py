"""Every task from training to serving: members share, are ranked, combined, calibrated, exported, asked.

Each test is a step, and is done for each task; what has no meaning for a task must say why.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from event_dicts import fold, read_events
from sklearn import metrics
from torch import Tensor, nn
from torch.nn import functional as F

import ensemble
from ensemble import Ensemble, Recipe, Result, Search, Task, loguniform, quantiles
from ensemble.artifact import predict, read_record
from ensemble.artifact.program import load_program
from ensemble.combine.metrics import CombineError
from ensemble.reporting.ranking import rank_members
from ensemble.spec.task import IGNORED
from ensemble.store import RunDir, RunState, load_predictions
from pipelines import Pipeline, sources

ROOT = Path(__file__).parents[2]
STEPS, SIDE, CLASSES, LEVELS = 5, 4, 3, (0.1, 0.5, 0.9)
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


def logits(params: Any) -> nn.Module:
    return nn.Sequential(network(1), nn.Flatten(0))


def classes_of(x: Array) -> Array:
    return (x[:, 0] > 0.3).astype(np.int64) + (x[:, 1] > 0)


def mean_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """The mean over the positions of a sample that take part; classes come second."""
    known = (target != IGNORED).flatten(1).sum(1)
    return F.cross_entropy(outputs, target, reduction="none").flatten(1).sum(1) / known


def pinball(outputs: Tensor, target: Tensor) -> Tensor:
    apart = target[:, None] - outputs
    levels = torch.tensor(LEVELS)
    return torch.maximum(levels * apart, (levels - 1) * apart).mean(1)


def take_mean(values: Tensor) -> Tensor:
    return values.mean(dim=0)


def largest(values: Array, target: Array) -> float:
    """A user's metric of a free task."""
    return float(values.max())


def from_torch(loss: Callable[..., Tensor]) -> Callable[[Array, Array], float]:
    return lambda values, target: float(loss(torch.from_numpy(values), torch.from_numpy(target)).mean())


def mean_of_positions(values: Array, target: Array) -> float:
    """The cross entropy of probabilities, classes last; the mean over positions, then over samples."""
    chosen = np.take_along_axis(values, np.maximum(target, 0)[..., None], -1)[..., 0]
    return float(-np.log(chosen).reshape(len(target), -1).mean(1).mean())


def accuracy(values: Array, target: Array) -> float:
    return float((values.argmax(-1) == target)[target != IGNORED].mean())


@dataclass(frozen=True)
class Case:
    """A task, and what each step is expected to find.

    Attributes:
        target: of x [n, 4].
        measure: the objective from predictions and targets, written independently.
        figure: one of the combined model, its `heading` in the report, and how it is `found` from predictions.
        calibration: the method, or why there is none.
        parts: of the uncertainty; or why there are none.
        columns: of the predictions.
    """

    model: Callable[[Any], nn.Module]
    loss: Callable[..., Tensor]
    target: Callable[[Array, np.random.Generator], Array]
    objective: str
    direction: str
    measure: Callable[[Array, Array], float]
    figure: str
    heading: str
    found: Callable[[Array, Array], float]
    calibration: str
    columns: list[str]
    kind: str
    task: Task | str | None = None
    parts: set[str] = field(default_factory=lambda: {"total", "aleatoric", "epistemic", "disagreement"})
    options: dict[str, Any] = field(default_factory=dict)


def bce(outputs: Tensor, target: Tensor) -> Tensor:
    losses = F.binary_cross_entropy_with_logits(outputs, target.float(), reduction="none")
    return losses if losses.dim() == 1 else losses.mean(1)


def steps_of(x: Array, rng: np.random.Generator) -> Array:
    steps = (x[:, :1] > np.linspace(-1, 1, STEPS)).astype(np.int64) + (x[:, 1:2] > 0)
    steps[np.arange(STEPS) > 1 + (np.arange(len(x)) % (STEPS - 1))[:, None]] = IGNORED
    return steps


def pixels_of(x: Array, rng: np.random.Generator) -> Array:
    rows, columns = np.mgrid[-1 : 1 : SIDE * 1j, -1 : 1 : SIDE * 1j]
    return ((x[:, :1, None] > rows) & (x[:, 1:2, None] > columns)).astype(np.int64)


def number_of(x: Array, rng: np.random.Generator) -> Array:
    noise = 0.2 * rng.normal(size=len(x))
    return (x[:, 0] + x[:, 1] * x[:, 2] + noise).astype(np.float32)


def within(values: Array, target: Array) -> float:
    return float(((target >= values[:, 0]) & (target <= values[:, -1])).mean())


CASES = {
    "classification": Case(
        lambda params: network(CLASSES), lambda o, t: F.cross_entropy(o, t, reduction="none"),
        lambda x, rng: classes_of(x), "accuracy", "max", accuracy,
        "accuracy", "accuracy ↑", accuracy, "temperature", ["class", "probabilities"], "classification",
    ),
    "single logit": Case(
        logits, bce, lambda x, rng: (x[:, 0] > 0).astype(np.int64),
        "roc_auc", "max", lambda p, t: float(metrics.roc_auc_score(t, p[:, 1])),
        "accuracy", "accuracy ↑", accuracy, "temperature", ["class", "probabilities"], "classification",
    ),
    "multi-label": Case(
        lambda params: network(3), bce, lambda x, rng: (x[:, :3] > 0).astype(np.int64),
        "f1_macro", "max", lambda p, t: float(metrics.f1_score(t, p >= 0.5, average="macro", zero_division=0)),
        "f1_macro", "F1, macro ↑",
        lambda p, t: float(metrics.f1_score(t, p >= 0.5, average="macro", zero_division=0)),
        "temperature", ["labels", "probabilities"], "multilabel", "multilabel",
    ),
    "per step": Case(
        lambda params: network(CLASSES, STEPS), mean_loss, steps_of, "accuracy", "max", accuracy,
        "accuracy", "accuracy ↑", accuracy, "temperature", ["class", "probabilities"], "classification",
        "classification",
    ),
    "per pixel": Case(
        lambda params: network(2, SIDE, SIDE), mean_loss, pixels_of, "loss", "min", mean_of_positions,
        "accuracy", "accuracy ↑", accuracy, "temperature", ["class", "probabilities"], "classification",
        "classification",
    ),
    "regression": Case(
        logits, lambda o, t: (o - t).square(), number_of, "r2", "max",
        lambda p, t: float(metrics.r2_score(t, p)),
        "rmse", "RMSE ↓", lambda p, t: float(np.sqrt(((p - t) ** 2).mean())),
        "points have no spread", ["prediction"], "regression", parts={"epistemic"},
    ),
    "mean and variance": Case(
        lambda params: Gaussian(), lambda o, t: F.gaussian_nll_loss(o[0], t, o[1], reduction="none"), number_of,
        "loss", "min",
        from_torch(lambda p, t: F.gaussian_nll_loss(p[:, 0], t, p[:, 1], reduction="none")),
        "rmse", "RMSE ↓", lambda p, t: float(np.sqrt(((p[:, 0] - t) ** 2).mean())),
        "variance_scale", ["mean", "variance"], "gaussian", "gaussian",
        parts={"total", "aleatoric", "epistemic"},
    ),
    "quantiles": Case(
        lambda params: network(len(LEVELS)), pinball, number_of, "loss", "min", from_torch(pinball),
        "coverage", "coverage of 80 % intervals → 0.8", within,
        "quantiles", ["quantiles"], "quantiles", quantiles(*LEVELS), parts={"aleatoric", "epistemic"},
    ),
    "free": Case(
        lambda params: network(2, 2), lambda o, t: (o - t[:, None, None]).square().mean((1, 2)), number_of,
        "loss", "min", lambda p, t: float(((p - t[:, None, None]) ** 2).mean()),
        "largest", "largest", lambda p, t: largest(p, t),
        "nothing says what outputs of the task free mean", ["values"], "free", "free",
        parts=set(), options={"combine": take_mean, "split_metrics": [largest]},
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
        return fold(read_events(RunDir(self.run).events))

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


def declare(case: Case, **options: Any) -> tuple[Ensemble, dict[str, dict[str, Array]]]:
    """Members of a task, and their samples by split."""
    data, pipes = {}, {}
    for seed, (split, n) in enumerate(SIZES.items()):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(n, 4)).astype(np.float32)
        data[split] = {"x": x, "y": case.target(x, rng)}
        pipes[split] = Pipeline(sources.arrays(**data[split]), seed=0)
    more = dict(case.options)
    known = {"split_metrics": more.pop("split_metrics")} if "split_metrics" in more else {}
    recipe = Recipe(
        model=case.model,
        loss=lambda net, batch: case.loss(net(batch["x"]), batch["y"]),
        target="y",
        task=case.task,
        objective=case.objective,
        **known,
    )
    usual: dict[str, Any] = {"optimizer": "adam", "epochs": 5, "batch_size": 16, "gate_timeout_s": 300.0}
    if "search" not in options:
        usual["members"] = [{"lr": 0.03}, {"lr": 0.02}, {"lr": 1e-7}]
    return Ensemble(name="every", recipe=recipe, **{**usual, **pipes, **more, **options}), data


#: One task of each form of outputs; points and quantiles are loaded in tests/combine.
FIRST = ("multi-label", "per step", "mean and variance", "free")
BY_TIER = [name if name in FIRST else pytest.param(name, marks=pytest.mark.more) for name in CASES]


@pytest.fixture(scope="module", params=BY_TIER)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    case = CASES[request.param]
    declared, data = declare(case)
    run = tmp_path_factory.mktemp("run") / "run"
    return Trained(case, run, ensemble.submit(declared, run, "inline").wait(), data)


@pytest.fixture(scope="module")
def artifact(trained: Trained) -> Path:
    return ensemble.export(trained.run, trained.run.parent / "artifact", uncertainty=bool(trained.case.parts))


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
    assert trained.combined.conformal


def test_the_report_has_its_figures(trained: Trained) -> None:
    page = RunDir(trained.run).report.read_text()
    plain = page[page.index('<div id="plain">') :].split("<script")[0]
    assert f"Combined {trained.case.heading}" in plain
    assert f"{trained.combined.metrics['ensemble'][trained.case.figure]:.4f}" in plain
    assert f"Best {trained.case.objective}, on validation" in plain
    assert "member-0" in plain and "member-2" in plain


SHARING = ["per step", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "per step")]


@pytest.mark.more  # bits of members that share: test_e2e_laws.py
@pytest.mark.parametrize("trained", SHARING, indirect=True)
def test_members_that_share_predict_what_members_alone_do(trained: Trained, tmp_path: Path) -> None:
    declared, _ = declare(trained.case)
    shared = ensemble.submit(declared, tmp_path / "run", "local").wait()
    assert [row["metric"] for row in shared.members] == [row["metric"] for row in trained.result.members]
    assert shared.ledger is not None and shared.ledger["reuse"]["factor"] == pytest.approx(3.0)
    for split in ("valid", "test"):
        for row in shared.members:
            one, other = (
                load_predictions(RunDir(path).predictions(row["member"]), split)
                for path in (trained.run, tmp_path / "run")
            )
            assert np.array_equal(one.values, other.values) and np.array_equal(one.target, other.target)
            assert one.task == other.task


@pytest.mark.more
def test_a_search_is_ranked_by_a_metric_of_the_whole_split(tmp_path: Path) -> None:
    search = Search({"lr": loguniform(1e-3, 1.0)}, trials=4, pruner="median")
    declared, _ = declare(CASES["single logit"], search=search)
    result = ensemble.submit(declared, tmp_path / "run", "inline").wait()
    ranked = [row["metric"] for row in result.members if row["metric"] is not None]
    assert result.best is not None and result.best["metric"] == max(ranked)
    saved = load_predictions(RunDir(tmp_path / "run").predictions(result.best["member"]), "valid")
    assert result.best["metric"] == pytest.approx(metrics.roc_auc_score(saved.target, saved.values[:, 1]))


@pytest.mark.more  # of classes and variances: tests/artifact
def test_the_artifact_has_its_bits(trained: Trained, artifact: Path, values: Array) -> None:
    x = {"x": torch.from_numpy(trained.data["test"]["x"])}
    assert load_program(artifact / "model.pt2")(x).numpy().tobytes() == values.tobytes()
    assert (artifact / "uncertainty.pt2").exists() == bool(trained.case.parts)
    assert read_record(artifact)["task"]["kind"] == trained.case.kind


@pytest.mark.more  # of classes and variances: tests/artifact
def test_predictions_in_parquet_are_those_of_the_loaded_model(
    trained: Trained, artifact: Path, values: Array, tmp_path: Path
) -> None:
    np.savez(tmp_path / "x.npz", x=trained.data["test"]["x"])
    for model, given in ((artifact, {"data": tmp_path / "x.npz"}), (trained.run, {"split": "test"})):
        out = tmp_path / "predictions.parquet"
        assert predict(model, out=out, batch_size=16, **given) == SIZES["test"]
        table = pq.read_table(out)
        assert table.column_names == ["index", *trained.case.columns]
        names = trained.case.columns if trained.case.kind == "gaussian" else trained.case.columns[-1:]
        columns = [np.array(table.column(name).to_pylist(), np.float32) for name in names]
        found = np.stack(columns, axis=-1) if len(columns) > 1 else columns[0]
        assert np.allclose(found, values, rtol=1e-5, atol=1e-6)


@pytest.mark.more  # over HTTP: tests/artifact/test_artifact_serve.py
def test_the_artifact_answers_single_requests_as_the_server_does(
    trained: Trained, artifact: Path, values: Array
) -> None:
    """As examples/serve.py reads and batches them; test_artifact_serve.py shows it over HTTP."""
    pytest.importorskip("ray.serve", reason="the extra serve is not installed")
    found = importlib.util.spec_from_file_location("serve_example", ROOT / "examples" / "serve.py")
    assert found is not None and found.loader is not None
    example = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)
    served = SimpleNamespace(record=read_record(artifact), program=load_program(artifact / "model.pt2"))
    requests = [json.dumps({"x": row.tolist()}).encode() for row in trained.data["test"]["x"][:7]]
    samples = [example.Model.func_or_class.read(served, body) for body in requests]
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in served.record["fields"]}
    answers = np.array(served.program(batch).tolist(), np.float32)
    assert np.allclose(answers, values[:7], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="x"):
        example.Model.func_or_class.read(served, b'{"x": [1.0]}')
