"""Augmentation as a hyperparameter: members whose pipelines differ at the end share what comes before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.finished_runs import finished_hashes, of_kind

import ensemble
from ensemble import Ensemble, Recipe, Resources
from pipelines import Pipeline, sources, stages

SAMPLES, EPOCHS = 64, 3


def model(params: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))


def loss(net: Any, batch: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(net(batch["image"]), batch["label"], reduction="none")


def photos() -> Any:
    import simplejpeg

    rng = np.random.default_rng(0)
    images = [bytes(simplejpeg.encode_jpeg(rng.integers(0, 255, (24, 20, 3), np.uint8))) for _ in range(SAMPLES)]
    return sources.arrays(image=images, label=rng.integers(0, 10, SAMPLES))


def declared(**options: Any) -> Ensemble:
    base = Pipeline(photos(), seed=1).map(stages.decode_jpeg("image")).map(stages.resize("image", size=16))
    valid, train = (
        base.map(stages.scale("image")).take(20),
        base.map(stages.random_crop("image", size=16, padding=2)),
    )

    def augmented(params: dict[str, Any]) -> Pipeline:
        flipped = train.map(stages.random_flip("image")) if params["flip"] else train
        return flipped.map(stages.scale("image", mean=params["mean"]))

    usual: dict[str, Any] = {"train": augmented, "valid": valid, "epochs": EPOCHS, "batch_size": 32}
    usual |= {"resources": Resources(cpus_per_worker=0.1), "gate_timeout_s": 300.0}
    members = [{"lr": 0.1, "flip": flip, "mean": mean} for flip, mean in ((True, 0.5), (False, 0.4))]
    return Ensemble(
        name="augmented", recipe=Recipe(model=model, loss=loss), members=members, **{**usual, **options}
    )


@pytest.mark.more  # without processes of members: tests/pipelines/test_shared_stages.py, test_cache.py
def test_two_augmentations_share_decoding_and_end_as_they_would_alone(tmp_path: Path) -> None:
    ensemble.submit(declared(sharing="independent"), tmp_path / "alone", "inline").wait()
    ensemble.submit(declared(cache="memory", cache_bytes=10**7), tmp_path / "shared", "local").wait()
    shared = finished_hashes(tmp_path / "shared")
    assert shared == finished_hashes(tmp_path / "alone") and len(set(shared.values())) == 2
    assert all(event["private_batches"] == 0 for event in of_kind(tmp_path / "shared", "epoch"))
    said = of_kind(tmp_path / "shared", "feeder")[-1]
    assert said["prepared"] == EPOCHS * SAMPLES, "once for both"
    assert said["cache"]["hits"] == (EPOCHS - 1) * SAMPLES
