"""Names of folders, files and runs that are no UTF-8, through a whole run and all that it writes."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from artifact_runs import declare, train, write_photos
from torch import Tensor, nn
from torch.nn import functional as F

import ensemble
from ensemble import Recipe
from ensemble.artifact import ArtifactError, predict, read_record
from ensemble.cli.parser import main
from ensemble.combine import CombineError
from pipelines import Pipeline, PipelineError, sources, stages

pytestmark = pytest.mark.more

CLASSES = ["ant", r"caf\udce9", "z<b>|x"]


def loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(net(batch["image"]), batch["label"], reduction="none")


def recipe() -> Recipe:
    return Recipe(model=lambda params: nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 32, 3)), loss=loss)


@pytest.mark.parametrize("executor", ["inline", "local"])
def test_a_run_on_folders_of_latin_1_in_a_folder_of_latin_1(executor: str, tmp_path: Path, capsys: Any) -> None:
    root = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"d\xe9")))
    pipes = {
        split: Pipeline(sources.image_folder(write_photos(root / split, seed=seed)))
        .map(stages.decode_image("image"))
        .map(stages.scale("image"))
        for seed, split in enumerate(("train", "valid", "test"))
    }
    run = Path(os.fsdecode(os.path.join(os.fsencode(root), b"r\xfcn")))
    made = declare(recipe=recipe(), members=[{"lr": 0.01}, {"lr": 0.02}], batch_size=4, **pipes)
    result = ensemble.submit(made, run, executor).wait()
    assert [member["state"] for member in result.members] == ["finished"] * 2
    assert ensemble.load(run).classes == tuple(CLASSES)

    assert main(["status", str(run)]) == main(["report", str(run)]) == main(["verify", str(run)]) == 0
    for file in run.rglob("*"):  # all that is text is UTF-8
        if file.suffix in (".json", ".jsonl", ".html", ".csv", ".txt"):
            file.read_bytes().decode()
    assert json.loads((run / "results.json").read_text())["per_class"]["classes"] == CLASSES
    assert r"caf\\udce9" in (run / "report.html").read_text()

    artifact = ensemble.export(run, root / "artifact")
    assert read_record(artifact)["classes"] == CLASSES
    assert r"ant, caf\udce9, z<b>\|x." in (artifact / "README.md").read_text()
    for number, model in enumerate((run, artifact)):
        table, lines = root / f"{number}.csv", root / f"{number}.jsonl"
        for out in (table, lines, root / f"{number}.parquet"):
            assert predict(model, root / "test", out, uncertainty=True) == 12
        rows = list(csv.DictReader(io.StringIO(table.read_text(encoding="utf-8"))))
        objects = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
        found = pq.read_table(io.BytesIO((root / f"{number}.parquet").read_bytes()))
        assert json.loads(found.schema.metadata[b"classes"]) == CLASSES
        named = found.column("class_name").to_pylist()
        assert named == [row["class_name"] for row in rows] == [one["class_name"] for one in objects]
        assert set(named) == set(CLASSES) and r"/caf\udce9/c\udce9.jpg" in " ".join(row["file"] for row in rows)
        for row, one in zip(rows, objects, strict=True):
            assert list(one["probabilities"]) == CLASSES
            assert [float(row[f"probabilities.{name}"]) for name in CLASSES] == pytest.approx(
                list(one["probabilities"].values())
            )
            assert one["set_thr_names"] == [CLASSES[place] for place in one["set_thr"]]
    assert main(["predict", str(run), str(root / "absent"), "--out", str(root / "x.csv")]) == 2
    assert r"d\udce9" in capsys.readouterr().err


class Flat(nn.Module):
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


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `run` on photos that its pipeline resizes, and its `artifact`."""
    folder = tmp_path_factory.mktemp("photos")
    train_on_photos(folder, stages.resize("photo", (12, 16)), size=(12, 16))
    ensemble.export(folder / "run", folder / "artifact")
    return folder


@pytest.mark.parametrize("model", ["run", "artifact"])
def test_photos_of_any_size_are_resized_as_in_training(photos: Path, model: str, tmp_path: Path) -> None:
    write_photos(tmp_path / "new", (48, 64))
    write_photos(tmp_path / "others", (30, 30), extension=".png")
    for name in os.listdir(tmp_path / "others" / "ant"):
        os.rename(tmp_path / "others" / "ant" / name, tmp_path / "new" / "ant" / name)
    out = tmp_path / "out.parquet"
    assert predict(photos / model, tmp_path / "new", out) == 16


def test_photos_of_another_size_are_refused_with_the_file_both_sizes_and_the_remedy(tmp_path: Path) -> None:
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
