"""Every task: exported bitwise, and predicted with the columns of the task."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from artifact_runs import declare, train
from torch import Tensor, nn
from torch.nn import functional as F

import ensemble
from ensemble import Ensemble, Recipe, Task, quantiles
from ensemble.artifact import predict, read_record
from ensemble.artifact.preparation import make_preparation
from ensemble.artifact.program import load_program
from pipelines import Pipeline, sources, stages

STEPS, FEATURES = 6, 4
LEVELS = (0.1, 0.5, 0.9)


class Net(nn.Module):
    def __init__(self, outputs: int, each_step: bool) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(FEATURES, 5, batch_first=True), nn.Linear(5, outputs)
        self.each_step = each_step

    def forward(self, x: Tensor) -> Tensor:
        steps = self.body(x)[0]
        return self.head(steps if self.each_step else steps[:, -1])


class Gaussian(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        mean, raw = super().forward(x).unbind(-1)
        return mean, F.softplus(raw) + 1e-3


class Pixels(nn.Module):
    """The scores of each of [steps, features] pixels: a map [b, classes, steps, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x[:, None])


class OneLogit(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 0]


def per_pixel(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs, target, reduction="none").mean((1, 2))


def one_logit(outputs: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, target.float(), reduction="none")


def per_step(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten(), reduction="none").view(target.shape).mean(1)


def pinball(outputs: Tensor, target: Tensor) -> Tensor:
    apart = target[:, None] - outputs
    levels = torch.tensor(LEVELS)
    return torch.maximum(levels * apart, (levels - 1) * apart).sum(1)


def square(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.reshape(target.shape) - target).square()


def gaussian_nll(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.gaussian_nll_loss(outputs[0], target, outputs[1], reduction="none")


def binary(outputs: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, target.float(), reduction="none").mean(1)


def mean_of_members(values: Tensor) -> Tensor:
    return values.mean(dim=0)


CASES: dict[str, tuple[Any, Callable[[], nn.Module], Callable[..., Tensor], dict[str, Any], list[str]]] = {
    "classification": (None, lambda: Net(3, False), None, {}, ["class", "probabilities"]),  # type: ignore[dict-item]
    "per step": (Task("classification"), lambda: Net(3, True), per_step, {}, ["class", "probabilities"]),
    "per pixel": (Task("classification"), Pixels, per_pixel, {}, ["class", "probabilities"]),
    "one logit": (Task("classification"), lambda: OneLogit(1, False), one_logit, {}, ["class", "probabilities"]),
    "stack": (None, lambda: Net(3, False), None, {"combine": "stack"}, ["class", "probabilities"]),  # type: ignore[dict-item]
    "multilabel": (Task("multilabel"), lambda: Net(3, False), binary, {}, ["labels", "probabilities"]),
    "regression": (Task("regression"), lambda: Net(1, False), square, {}, ["prediction"]),
    "gaussian": (Task("gaussian"), lambda: Gaussian(2, False), gaussian_nll, {}, ["mean", "variance"]),
    "quantiles": (quantiles(*LEVELS), lambda: Net(3, False), pinball, {}, ["quantiles"]),
    "free": (Task("free"), lambda: Net(2, True), None, {"combine": mean_of_members}, ["values"]),  # type: ignore[dict-item]
}


def make_target(case: str, rng: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
    if case in ("regression", "gaussian", "quantiles"):
        return rng.standard_normal(count).astype(np.float32)
    more = {"per step": (STEPS,), "per pixel": (STEPS, FEATURES), "multilabel": (3,)}.get(case, ())
    return rng.integers(0, 2 if case in ("one logit", "multilabel") else 3, (count, *more))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "gaussian" else pytest.mark.more) for case in CASES]
)
def test_a_task_is_exported_bitwise_and_predicted(case: str, tmp_path: Path) -> None:
    task, build, criterion, options, columns = CASES[case]

    def loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs = net(batch["x"])
        if case == "free":
            return outputs.square().mean((1, 2))
        if criterion is None:
            return F.cross_entropy(outputs, batch["y"], reduction="none")
        return criterion(outputs, batch["y"])

    rng = np.random.default_rng(0)
    pipes = {}
    for split in ("train", "valid", "test"):
        records = {"x": rng.standard_normal((40, STEPS, FEATURES)), "y": make_target(case, rng, 40)}
        pipes[split] = Pipeline(sources.arrays(**records)).map(stages.cast("x", "float32"))
    recipe = Recipe(model=lambda params: build(), loss=loss, target="y", task=task)
    declared = declare(recipe=recipe, members=[{"lr": 0.05}] * 2, epochs=1, **pipes, **options)
    run = train(tmp_path / "run", declared)
    made = ensemble.export(run, tmp_path / "artifact")
    card = (made / "README.md").read_text()
    for words in ("None: the task has no figures", "None: outputs of the task free have no"):
        assert (words in card) == (case == "free")
    record = read_record(made)
    assert record["task"]["kind"] == (task.kind if task is not None else "classification")
    assert record["fields"]["x"] == {"shape": ["batch", STEPS, FEATURES], "dtype": "float64"}  # it casts by itself
    batch = next(iter(pipes["test"].loader(40)))
    raw = {"x": torch.from_numpy(np.stack([pipes["test"].source[int(i)]["x"] for i in batch["index"]]))}
    program, model = load_program(made / "model.pt2"), ensemble.load(run)
    values = model({"x": batch["x"]})
    for count in (40, 3, 1, 0):
        found, wanted = program({"x": raw["x"][:count]}), model({"x": batch["x"][:count]})
        assert found.shape == wanted.shape and found.numpy().tobytes() == wanted.numpy().tobytes()
    lines = (made / "README.md").read_text().split("```python\n")[1].split("```")[0]
    said = dict[str, Any]()
    exec(lines.replace("model.pt2", str(made / "model.pt2")), said)
    assert said["values"].shape == (8, *values.shape[1:])
    uncertain = []
    if case != "free":
        unsure = ensemble.load(run, uncertainty=True)({"x": batch["x"]})
        other = load_program(made / "uncertainty.pt2")(raw)
        assert unsure.keys() == other.keys()
        assert all(unsure[name].numpy().tobytes() == other[name].numpy().tobytes() for name in unsure)
        uncertain = [name for name in unsure if name != "values"]
        assert list(record["uncertainty"]) == list(unsure)
    np.savez(tmp_path / "x.npz", x=raw["x"].numpy())
    assert predict(made, tmp_path / "x.npz", tmp_path / "p", uncertainty=case != "free") == 40
    table = pq.read_table(tmp_path / "p")
    assert table.column_names[: 1 + len(columns) + len(uncertain)] == ["index", *columns, *uncertain]
    written = np.array(table.column(columns[-1]).to_pylist(), np.float32)
    wanted = values[..., 1] if case == "gaussian" else values
    assert np.allclose(written, wanted.numpy(), rtol=1e-5, atol=1e-6)
    more = {"regression": ["low", "high"], "gaussian": ["low", "high"], "quantiles": ["low", "high"]}
    assert table.column_names[1 + len(columns) + len(uncertain) :] == (
        ["set_thr", "set_aps"] if case in ("classification", "one logit", "stack") else more.get(case, [])
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, rng = tmp_path_factory.mktemp("table"), np.random.default_rng(0)
    rows = ["age,zone,size,kind"]
    for _ in range(300):
        age, zone, size = rng.normal(40, 9), rng.integers(1, 4), rng.normal()
        kind = "big" if size + 0.1 * (age - 40) > 0 else "small"
        rows.append(f"{'' if rng.random() < 0.2 else round(age, 2)},{zone},{size:.3f},{kind}")
    (path / "raw.csv").write_text("\n".join(rows) + "\n")
    train, valid = sources.csv(str(path / "raw.csv"), missing="nan").split(0.8, seed=0)
    table = stages.fit(train, target="kind", numbers=["age", "size"], categories=["zone"])
    recipe = Recipe(
        model=lambda params: nn.Linear(table.size, 2), loss="cross_entropy", inputs=("x",), target="kind"
    )
    splits = {"train": Pipeline(train).map(table), "valid": Pipeline(valid).map(table)}
    spec = Ensemble(name="t", recipe=recipe, members=[{"lr": 0.5}], epochs=4, batch_size=32, **splits)
    result = ensemble.submit(spec, path / "run", "inline").wait()
    assert result.best["metrics"]["accuracy"] > 0.75
    ensemble.export(path / "run", path / "model")
    return path


@pytest.mark.parametrize("model", [pytest.param("run", marks=pytest.mark.more), "model"])
def test_raw_rows_are_predicted_without_a_label(folder: Path, model: str, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("note,size,zone,age\na,2.5,1,\nb,-2.5,,30\nc,2.5,9,55.5\n")
    assert ensemble.predict(folder / model, tmp_path / "new.csv", tmp_path / "out.parquet") == 3
    assert pq.read_table(tmp_path / "out.parquet")["class_name"].to_pylist() == ["big", "small", "big"]


def test_nulls_of_parquet_are_missing_values_and_unseen_categories_are_counted(
    folder: Path, tmp_path: Path
) -> None:
    rows = pa.table({"age": [None, 30.0, 55.5], "size": [2.5, -2.5, 2.5], "zone": [1, None, 9]})
    pq.write_table(rows, tmp_path / "new.parquet")
    with pytest.warns(UserWarning, match=r"zone 1 times \('9'\)"):
        assert ensemble.predict(folder / "model", tmp_path / "new.parquet", tmp_path / "out.parquet") == 3
    assert pq.read_table(tmp_path / "out.parquet")["class_name"].to_pylist() == ["big", "small", "big"]


def test_a_row_by_itself_gives_what_the_table_gives(folder: Path, tmp_path: Path) -> None:
    prepare = make_preparation(read_record(folder / "model"))
    assert set(prepare.reads) == {"age", "size", "zone"}
    program = torch.export.load(folder / "model" / "model.pt2").module()
    row = prepare(json.loads('{"size": 2.5, "zone": 1, "age": null}'))
    own = program({"x": torch.from_numpy(row["x"])[None]})
    (tmp_path / "new.csv").write_text("size,zone,age\n2.5,1,\n2.5,1,40\n")
    ensemble.predict(folder / "model", tmp_path / "new.csv", tmp_path / "out.parquet")
    found = pq.read_table(tmp_path / "out.parquet")["probabilities"].to_pylist()[0]
    np.testing.assert_allclose(own[0].numpy(), found, rtol=1e-6)
