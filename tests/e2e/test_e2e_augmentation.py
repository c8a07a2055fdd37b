"""Augmentation as a hyperparameter: members whose pipelines differ at the end share what comes before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.finished_runs import finished_hashes, of_kind

import ensemble
from ensemble import Ensemble, Recipe, Resources, Search, choice
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


def decoded(seed: int = 1) -> Pipeline:
    pipeline = Pipeline(photos(), seed=seed).map(stages.decode_jpeg("image"))
    return pipeline.map(stages.resize("image", size=16)).map(stages.random_crop("image", size=16, padding=2))


BASE = decoded()


def augmented(params: dict[str, Any]) -> Pipeline:
    pipeline = BASE if params["flip"] is not None else decoded(seed=2)
    if params["flip"]:
        pipeline = pipeline.map(stages.random_flip("image"))
    return pipeline.map(stages.scale("image", mean=params.get("mean", 0.5)))


def declared(**options: Any) -> Ensemble:
    usual: dict[str, Any] = {
        "name": "augmented",
        "recipe": Recipe(model=model, loss=loss),
        "train": augmented,
        "valid": Pipeline(photos()).map(stages.decode_jpeg("image")).map(stages.resize("image", size=16))
        .map(stages.scale("image")).take(20),
        "epochs": EPOCHS,
        "batch_size": 32,
        "resources": Resources(cpus_per_worker=0.1),
        "gate_timeout_s": 300.0,
    }  # fmt: skip
    if "search" not in options:
        usual["members"] = [{"lr": 0.1, "flip": True}, {"lr": 0.1, "flip": False, "mean": 0.4}]
    return Ensemble(**{**usual, **options})


def trained(run_dir: Path, made: Ensemble, executor: str = "local") -> dict[str, str | None]:
    ensemble.submit(made, run_dir, executor=executor).wait()
    return finished_hashes(run_dir)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The weights of members that share nothing."""
    return trained(tmp_path_factory.mktemp("alone") / "run", declared(sharing="independent"), "inline")


@pytest.mark.more  # without processes of members: tests/pipelines/test_shared_stages.py, test_cache.py
@pytest.mark.parametrize("cache", [pytest.param(None, marks=pytest.mark.slow), "memory"])
def test_two_augmentations_share_decoding_and_end_as_they_would_alone(
    tmp_path: Path, alone: dict[str, str | None], cache: Any
) -> None:
    shared = trained(tmp_path / "shared", declared(cache=cache, cache_bytes=10**7 if cache else None))
    assert shared == alone and len(set(shared.values())) == 2
    assert all(e["private_batches"] == 0 for e in of_kind(tmp_path / "shared", "epoch"))
    said = of_kind(tmp_path / "shared", "feeder")[-1]
    assert said["prepared"] == EPOCHS * SAMPLES, "once for both"
    assert (said["cache"] or {}).get("hits") == ((EPOCHS - 1) * SAMPLES if cache else None)


@pytest.mark.more
def test_trials_share_too_and_where_nothing_is_common_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    space = {"lr": 0.1, "flip": choice(True, False)}
    made = declared(search=Search(space, trials=2, sampler="grid", pruner="none"), epochs=1)
    run_dir = tmp_path / "run"
    trained(run_dir, made)
    assert all(e["private_batches"] == 0 for e in of_kind(run_dir, "epoch"))

    made = declared(members=[{"flip": True, "lr": 0.1}, {"flip": None, "lr": 0.1}], epochs=1)
    trained(tmp_path / "apart", made)
    assert "nothing is shared" in caplog.text and "seed" in caplog.text
    assert all(e["shared_batches"] == 0 for e in of_kind(tmp_path / "apart", "epoch"))
