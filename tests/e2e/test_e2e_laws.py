"""Sharing changes nothing: members trained on one pipeline and alone end with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.finished_runs import finished_hashes, of_kind

import ensemble
from ensemble import Ensemble, Member, Recipe, Resources
from pipelines import Pipeline, sources, stages

SAMPLES, VALID = 61, 20  # batches of 32 and 48 leave uneven last ones
EPOCHS = 8
WORKERS = (1, 2, 1, 3, 1, 2, 1, 1)


def model(params: dict[str, Any]) -> Any:
    from torch import nn

    width = params["width"]
    first = [nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*first, nn.Dropout(0.2), nn.Linear(64 * width, 10))


def loss(net: Any, batch: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(net(batch["image"]), batch["label"], reduction="none")


def optimizer(net: Any, params: dict[str, Any]) -> Any:
    import torch

    return torch.optim.SGD(net.parameters(), lr=params["lr"], momentum=0.9)


def grain(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "image": sample["image"] + rng.normal(0, 0.1, sample["image"].shape).astype(np.float32)}


def declare(sharing: str, members: int, precision: Any, apart: bool) -> Ensemble:
    """Widths 1 and 2, of eight also 3, and two batch sizes; augmentation of every sample in every epoch.

    Apart: some members' pipelines end otherwise than others', and what all have is cached before it is augmented.
    """
    rng = np.random.default_rng(5)
    images = rng.integers(0, 256, (SAMPLES + VALID, 1, 8, 8)).astype(np.uint8)
    labels = rng.integers(0, 10, SAMPLES + VALID)
    normalize = stages.scale("image", mean=(0.5,), std=(0.25,))
    train = Pipeline(sources.arrays(image=images[:SAMPLES], label=labels[:SAMPLES]), seed=3).map(normalize)
    train = train.map(stages.random_crop("image", size=8, padding=2))
    valid = Pipeline(sources.arrays(image=images[SAMPLES:], label=labels[SAMPLES:]))

    def end(params: dict[str, Any]) -> Pipeline:
        return train.map(grain) if params["width"] % 2 else train

    places = [{"workers": WORKERS[n], "batch_size": 48 if n % 2 else 32} for n in range(members)]
    usual: dict[str, Any] = {"epochs": EPOCHS, "gate_timeout_s": 300.0}
    usual |= {"cache": "memory", "cache_bytes": 10**7} if apart else {}
    usual["resources"] = Resources(cpus_per_worker=0.1)
    usual["members"] = [Member({"width": 4 + n, "lr": 0.05}, **how) for n, how in enumerate(places)]
    usual |= {"precision": precision, "sharing": sharing, "train": end if apart else train.map(grain)}
    recipe = Recipe(model=model, loss=loss, optimizer=optimizer)
    return Ensemble(name="laws", recipe=recipe, valid=valid.map(normalize), **usual)


def train(run_dir: Path, declared: Ensemble) -> tuple[dict[str, str | None], float]:
    result = ensemble.submit(declared, run_dir, executor="local").wait()
    assert result.ledger is not None
    return finished_hashes(run_dir), result.ledger["reuse"]["factor"]


# Stopped in the middle and resumed: tests/executors/test_executors_contract.py; killed: test_e2e_samples.py.
@pytest.mark.parametrize(
    ("members", "precision", "apart"),
    [
        (2, "bf16", False),
        pytest.param(2, "bf16", True, marks=pytest.mark.more),
        *(pytest.param(8, precision, False, marks=pytest.mark.slow) for precision in ("fp32", "bf16")),
    ],
)
def test_members_sharing_end_with_the_bits_of_members_alone(
    members: int, precision: str, apart: bool, tmp_path: Path
) -> None:
    expected, reuse = train(tmp_path / "alone", declare("independent", members, precision, apart))
    assert reuse == pytest.approx(1.0)
    found, reuse = train(tmp_path / "run", declare("node", members, precision, apart))
    assert found == expected and len(set(found.values())) == members
    assert reuse == pytest.approx(members)
    epochs = of_kind(tmp_path / "run", "epoch")
    assert len(epochs) == members * EPOCHS
    assert all(e["private_batches"] == 0 and e["shared_batches"] > 0 for e in epochs)
    if apart:
        fed = of_kind(tmp_path / "run", "feeder")[-1]
        assert fed["prepared"] == EPOCHS * SAMPLES, "once for all"
        assert fed["cache"]["hits"] == (EPOCHS - 1) * SAMPLES
