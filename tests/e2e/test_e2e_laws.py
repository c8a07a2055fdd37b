"""Sharing changes nothing: members trained on one pipeline and alone end with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.finished_runs import finished_hashes, hashes, of_kind, once, read_state

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


def declare(sharing: str, members: int = 2, precision: Any = "bf16") -> Ensemble:
    """Widths 1 and 2, of eight also 3, and two batch sizes; augmentation of every sample in every epoch."""
    rng = np.random.default_rng(5)
    images = rng.integers(0, 256, (SAMPLES + VALID, 1, 8, 8)).astype(np.uint8)
    labels = rng.integers(0, 10, SAMPLES + VALID)
    normalize = stages.scale("image", mean=(0.5,), std=(0.25,))
    train = Pipeline(sources.arrays(image=images[:SAMPLES], label=labels[:SAMPLES]), seed=3)
    valid = Pipeline(sources.arrays(image=images[SAMPLES:], label=labels[SAMPLES:]))
    places = [{"workers": WORKERS[n], "batch_size": 48 if n % 2 else 32} for n in range(members)]
    usual: dict[str, Any] = {"epochs": EPOCHS, "gate_timeout_s": 300.0}
    usual["resources"] = Resources(cpus_per_worker=0.1)
    usual["train"] = train.map(stages.random_crop("image", size=8, padding=2)).map(normalize).map(grain)
    usual["members"] = [Member({"width": 4 + n, "lr": 0.05}, **how) for n, how in enumerate(places)]
    recipe = Recipe(model=model, loss=loss, optimizer=optimizer)
    options = {"precision": precision, "sharing": sharing}
    return Ensemble(name="laws", recipe=recipe, valid=valid.map(normalize), **options, **usual)


def train(run_dir: Path, declared: Ensemble) -> tuple[dict[str, str | None], float]:
    result = ensemble.submit(declared, run_dir, executor="local").wait()
    assert result.ledger is not None
    return finished_hashes(run_dir), result.ledger["reuse"]["factor"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    found, reuse = train(tmp_path_factory.mktemp("alone") / "run", declare("independent"))
    assert reuse == pytest.approx(1.0)
    return found


def check_shared(run_dir: Path, expected: dict[str, str | None], **options: Any) -> None:
    found, reuse = train(run_dir, declare("node", len(expected), **options))
    assert found == expected and len(set(found.values())) == len(expected)
    assert reuse == pytest.approx(len(expected))
    epochs = of_kind(run_dir, "epoch")
    assert len(epochs) == len(expected) * EPOCHS
    assert all(e["private_batches"] == 0 and e["shared_batches"] > 0 for e in epochs)


def test_members_sharing_end_with_the_bits_of_members_alone(alone: dict[str, str | None], tmp_path: Path) -> None:
    check_shared(tmp_path / "run", alone)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_eight_members_sharing_end_with_the_bits_of_eight_alone(precision: Any, tmp_path: Path) -> None:
    expected, _ = train(tmp_path / "alone", declare("independent", 8, precision))
    check_shared(tmp_path / "run", expected, precision=precision)


@pytest.mark.more
@pytest.mark.usefixtures("requests_are_seen_at_once")
def test_a_stop_in_the_middle_and_a_resume_change_no_bit(alone: dict[str, str | None], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    stop_early = once("epoch", lambda: run.stop())
    run = ensemble.submit(declare("node"), run_dir, executor="local", on_event=stop_early)
    assert run.wait().stopped
    state = read_state(run_dir)
    assert any(member.state == "stopped" for member in state.members.values())
    ensemble.resume(run_dir).wait()
    assert hashes(run_dir) == alone
