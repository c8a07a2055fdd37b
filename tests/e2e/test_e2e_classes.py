"""A run on folders with other classes in each: what is measured, shown and predicted goes by their names."""

from __future__ import annotations

import logging
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from kit.event_dicts import collect_notices, read_events
from PIL import Image
from torch import nn

import ensemble
from ensemble import Ensemble, Recipe
from ensemble.artifact import ArtifactError, predict
from pipelines import Pipeline, sources, stages

COLORS = {"a": (250, 0, 0), "b": (0, 250, 0), "c": (0, 0, 250)}


def draw(folder: Path, letters: str, each: int) -> Path:
    rng = np.random.default_rng(len(letters))
    for letter in letters:
        (folder / letter).mkdir(parents=True)
        for number in range(each):
            pixels = np.array(COLORS[letter]) + rng.integers(-40, 40, (4, 4, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / letter / f"{number}.png")
    return folder


class Colours(nn.Linear):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image.mean(dim=(2, 3)))


def build(params: dict[str, Any]) -> nn.Module:
    return Colours(3, 3)


def prepare(folder: Path) -> Pipeline:
    scale = stages.scale("image", mean=(0.5,) * 3, std=(0.5,) * 3)
    return Pipeline(sources.image_folder(folder)).map(stages.decode_image("image")).map(scale)


def declare(train: Any, valid: Any, **options: Any) -> Ensemble:
    usual: dict[str, Any] = {"members": [{}, {}], "epochs": 8, "batch_size": 12, "combine": "average"}
    recipe = Recipe(model=build, loss="cross_entropy")
    optimizer = {"name": "adam", "lr": 0.1}
    return Ensemble(
        name="colours", recipe=recipe, train=train, valid=valid, optimizer=optimizer, **usual | options
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training data of three classes, validation data of the last two, others, a run of them and its artifact."""
    folder = tmp_path_factory.mktemp("colours")
    for name, letters in (("train", "abc"), ("valid", "bc"), ("new", "ca")):
        draw(folder / name, letters, 12 if name == "train" else 4)
    run = declare(prepare(folder / "train"), prepare(folder / "valid"))
    ensemble.submit(run, folder / "run", executor="inline").wait()
    ensemble.export(folder / "run", folder / "artifact")
    return folder


def test_members_are_measured_and_shown_by_the_classes_of_the_training_data(folder: Path) -> None:
    result = ensemble.attach(folder / "run").wait()
    assert [row.accuracy for row in result.members] == [1, 1]
    assert result.combined is not None and result.combined.accuracy == 1
    figures = result.per_class["ensemble"]
    assert figures.classes == ("a", "b", "c") == ensemble.load(folder / "run").classes
    matrix = str(figures).split("\n\n")[1].splitlines()
    assert [line.split() for line in matrix[1:]] == [line.split() for line in ("a 0 0 0", "b 0 4 0", "c 0 0 4")]
    assert matrix[0].split()[-3:] == ["a", "b", "c"]
    saved = ensemble.load_predictions(folder / "run", split="valid")
    assert saved.targets is not None and saved.targets.tolist() == [1] * 4 + [2] * 4


def test_predictions_name_the_classes_of_the_training_data(folder: Path, tmp_path: Path) -> None:
    assert {stat.S_IMODE(file.stat().st_mode) for file in (folder / "artifact").iterdir()} == {0o644}
    for model in (folder / "run", folder / "artifact"):
        predict(model, folder / "new", tmp_path / "p.parquet")
        table = pq.read_table(tmp_path / "p.parquet")
        assert table["class_name"].to_pylist() == [Path(file).parent.name for file in table["file"].to_pylist()]


def test_a_function_of_the_users_gets_labels_by_name_and_says_what_it_lacks(folder: Path, tmp_path: Path) -> None:
    def check(sample: dict[str, Any]) -> dict[str, Any]:
        assert sample["label"] == sample["image"].mean(axis=(1, 2)).argmax()
        return sample

    pipes = [prepare(folder / name).map(check) for name in ("train", "valid")]
    run = tmp_path / "run"
    ensemble.submit(declare(*pipes, epochs=1, members=[{}]), run, executor="inline").wait()
    assert predict(run, folder / "new", tmp_path / "p.parquet") == 8
    np.savez(tmp_path / "x.npz", image=np.zeros((2, 3, 4, 4), np.uint8))
    np.savez(tmp_path / "y.npz", picture=np.zeros((2, 3, 4, 4), np.uint8))
    with pytest.raises(ArtifactError, match="fields image, label; the data have image: label is missing, and a"):
        predict(run, tmp_path / "x.npz", tmp_path / "p.parquet")
    for model in (folder / "run", folder / "artifact"):
        assert predict(model, tmp_path / "x.npz", tmp_path / "p.parquet") == 2
        with pytest.raises(ArtifactError, match="needs the field image; the data have picture: image is missing"):
            predict(model, tmp_path / "y.npz", tmp_path / "p.parquet")


def test_members_are_evaluated_again_on_other_numbers_of_classes_and_shared_samples_are_said(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = shutil.copytree(folder / "run", tmp_path / "run")
    other = draw(folder / "other", "ac", 4)
    before = [event["type"] for event in read_events(run / "events.jsonl")].count("epoch")
    ensemble.submit(declare(prepare(folder / "train"), prepare(other)), run, executor="inline").wait()
    events = read_events(run / "events.jsonl")
    assert "valid" in [each for each in events if each["type"] == "run_started"][-1]["changed_splits"]
    assert [event["type"] for event in events].count("epoch") == before, "nothing is trained"
    same = declare(prepare(folder / "train"), prepare(folder / "train"), epochs=1, members=[{}])
    with caplog.at_level(logging.WARNING):
        other_run = ensemble.submit(same, tmp_path / "same", executor="inline")
    said = "valid shares 36 of its 36 samples with train: members are selected"
    assert [line for line in caplog.messages if line.startswith(said)]
    assert (
        said in other_run.wait().summary(everything=True, width=1000)
        and said in (tmp_path / "same" / "report.html").read_text()
    )
    assert any(said in notice.text for notice in collect_notices(read_events(tmp_path / "same" / "events.jsonl")))
