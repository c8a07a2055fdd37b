"""A table from its raw rows to predictions, by the run, by the artifact, and row by row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import ensemble  # noqa: E402
from ensemble import Ensemble, Recipe  # noqa: E402
from ensemble.artifact import ArtifactError, read_record  # noqa: E402
from ensemble.artifact.preparation import make_preparation  # noqa: E402
from pipelines import Pipeline, sources, stages  # noqa: E402


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


def test_a_column_that_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("size,age\n2.5,\n")
    with pytest.raises(ArtifactError, match="zone is missing"):
        ensemble.predict(folder / "model", tmp_path / "new.csv", tmp_path / "out.parquet")
