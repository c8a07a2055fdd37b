"""The lines of a model card that prepare one raw record: executed as a reader would, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from artifact_runs import FOLDERS, declare, train, write_photos
from torch import Tensor, nn
from torch.nn import functional as F

import ensemble
from ensemble import Recipe
from ensemble.artifact import ArtifactError, predict
from ensemble.combine import CombineError
from pipelines import Pipeline, PipelineError, sources, stages

pytestmark = pytest.mark.more


class Flat(nn.Module):
    """Takes images of one size alone."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.last = nn.Linear(3 * size[0] * size[1], 3)

    def forward(self, photo: Tensor) -> Tensor:
        return self.last(photo.flatten(1))


def train_on_photos(folder: Path, *more: Any, size: tuple[int, int] = (24, 32)) -> Path:
    def loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(net(batch["photo"]), batch["label"], reduction="none")

    source = sources.image_folder(write_photos(folder / "train"))
    pipe = Pipeline(source).map(stages.rename(image="photo")).map(stages.decode_image("photo"))
    for stage in (*more, stages.scale("photo", mean=(0.5, 0.4, 0.3))):
        pipe = pipe.map(stage)
    recipe = Recipe(model=lambda params: Flat(size), loss=loss)
    return train(folder / "run", declare(recipe=recipe, members=[{"lr": 0.01}], train=pipe, valid=pipe, test=None))


def run_example(artifact: Path, packages_are_hidden: bool = True) -> np.ndarray[Any, Any]:
    """The values of the card's example, with this package hidden from it."""
    card = (artifact / "README.md").read_text(encoding="utf-8")
    code = card.partition("Of one raw record")[2].partition("```python\n")[2].partition("```")[0]
    hidden = "import sys; sys.modules['ensemble'] = sys.modules['pipelines'] = None\n" * packages_are_hidden
    done = subprocess.run(
        [sys.executable, "-c", f"{hidden}{code}\nprint(values.tolist())"],
        cwd=artifact, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return np.array(eval(done.stdout))


def read_probabilities(model: Path, data: Path, out: Path) -> np.ndarray[Any, Any]:
    predict(model, data, out)
    return np.array(pq.read_table(out).column("probabilities").to_pylist())


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `run` on photos that its pipeline resizes, and its `artifact`."""
    folder = tmp_path_factory.mktemp("photos")
    train_on_photos(folder, stages.resize("photo", (12, 16)), size=(12, 16))
    ensemble.export(folder / "run", folder / "artifact")
    return folder


def compare_example(folder: Path, *, is_short: bool) -> None:
    """Raises where the card's example gives other values than the run and the artifact, for the same photo."""
    photo = Path(os.fsdecode(os.path.join(os.fsencode(folder / "train"), FOLDERS[1], b"c\xe9.jpg")))
    (folder / "artifact" / "photo.jpg").write_bytes(photo.read_bytes())
    found = run_example(folder / "artifact", packages_are_hidden=is_short)
    (folder / "one").mkdir()
    (folder / "one" / "photo.jpg").write_bytes(photo.read_bytes())
    for model in ("run", "artifact"):
        wanted = read_probabilities(folder / model, folder / "one", folder / f"{model}.parquet")
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_the_example_of_the_card_predicts_for_a_photo_what_the_run_and_the_artifact_do(photos: Path) -> None:
    compare_example(photos, is_short=True)


def test_an_example_that_takes_more_than_a_few_lines_calls_the_stages(tmp_path: Path) -> None:
    train_on_photos(tmp_path, stages.resize("photo", shorter=12), size=(12, 16))
    ensemble.export(tmp_path / "run", tmp_path / "artifact", uncertainty=False)
    compare_example(tmp_path, is_short=False)


@pytest.mark.parametrize("model", ["run", "artifact"])
def test_photos_of_any_size_are_resized_as_in_training(photos: Path, model: str, tmp_path: Path) -> None:
    write_photos(tmp_path / "new", (48, 64))
    write_photos(tmp_path / "others", (30, 30), extension=".png")
    for name in os.listdir(tmp_path / "others" / "ant"):
        os.rename(tmp_path / "others" / "ant" / name, tmp_path / "new" / "ant" / name)
    out = tmp_path / "out.parquet"
    assert predict(photos / model, tmp_path / "new", out) == 16


def test_photos_of_another_size_than_in_training_are_refused_with_the_file_both_sizes_and_the_remedy(
    tmp_path: Path,
) -> None:
    run = train_on_photos(tmp_path)
    made = ensemble.export(run, tmp_path / "artifact", uncertainty=False)
    large = write_photos(tmp_path / "large", (48, 64))
    remedy = r"resize the images to 24 x 32, or train with \.map\(stages\.resize\('photo', \(24, 32\)\)\)"
    for model in (run, made):
        with pytest.raises(ArtifactError, match=r"large/ant/a\.jpg: .*3, 48, 64.*" + remedy) as caught:
            predict(model, large, tmp_path / "out.parquet")
        assert "[3, 24, 32]" in str(caught.value)
        (large / "ant" / "a.jpg").write_bytes((tmp_path / "train" / "ant" / "a.jpg").read_bytes())
        with pytest.raises(PipelineError, match=r"large/ant/b\.jpg.*3, 48, 64.*3, 24, 32.*resize\('photo'"):
            predict(model, large, tmp_path / "out.parquet")
        (large / "ant" / "a.jpg").write_bytes((large / "ant" / "b.jpg").read_bytes())
    with pytest.raises(
        CombineError, match=r"'photo' was \[3, 24, 32\] in training and is \[3, 2, 2\] here: " + remedy
    ):
        ensemble.load(run)({"photo": torch.zeros(1, 3, 2, 2)})


def test_the_example_of_the_card_predicts_for_a_row_of_a_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = ["age,zone,size,job,kind"]
    for _ in range(120):
        age, size = rng.normal(40, 9), rng.normal()
        shown = "" if rng.random() < 0.2 else round(age, 2)
        rows.append(f"{shown},{rng.integers(1, 4)},{size:.3f},{rng.choice(['', 'café', 'x'])},{int(size > 0)}")
    (tmp_path / "raw.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    train_rows, valid = sources.csv(str(tmp_path / "raw.csv"), missing="nan").split(0.8, seed=0)
    table = stages.fit(train_rows, target="kind", numbers=["age", "size"], categories=["zone", "job"])
    recipe = Recipe(
        model=lambda params: nn.Linear(table.size, 2), loss="cross_entropy", inputs=("x",), target="kind"
    )
    splits = {"train": Pipeline(train_rows).map(table), "valid": Pipeline(valid).map(table), "test": None}
    run = train(tmp_path / "run", declare(recipe=recipe, members=[{"lr": 0.5}], **splits))
    made = ensemble.export(run, tmp_path / "artifact", uncertainty=False)
    card = (made / "README.md").read_text(encoding="utf-8")
    row = eval(card.partition("\nsample = ")[2].partition("\n")[0])
    assert set(row) == {"age", "size", "zone", "job"} and row["job"] == "café"
    for values in (row, {"age": None, "size": -1.5, "zone": "2", "job": None}):
        text = card.replace(f"\nsample = {row}\n", f"\nsample = {values}\n")
        assert str(values) in text
        (made / "README.md").write_text(text, encoding="utf-8")
        cells = ",".join("" if value is None else str(value) for value in values.values())
        (tmp_path / "new.csv").write_text(f"{','.join(values)}\n{cells}\n0,0,1,x\n", encoding="utf-8")
        wanted = read_probabilities(made, tmp_path / "new.csv", tmp_path / "out.parquet")
        np.testing.assert_allclose(run_example(made)[0], wanted[0], rtol=1e-5)
