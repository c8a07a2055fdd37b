"""Photos of other sizes than in training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from artifact_runs import declare, train, write_photos
from torch import Tensor, nn
from torch.nn import functional as F

import ensemble
from ensemble import Recipe
from ensemble.artifact import ArtifactError, predict
from ensemble.combine import CombineError
from pipelines import Pipeline, PipelineError, sources, stages

pytestmark = pytest.mark.more


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
