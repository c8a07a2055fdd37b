"""Sharing changes nothing: eight members trained on one pipeline and alone end with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ensemble
from ensemble import Ensemble, Member, Recipe, Resources
from ensemble.store import fold, read_events
from pipelines import Pipeline, sources, stages

SAMPLES, VALID = 301, 60  # batches of 32 and 48 leave uneven last ones
EPOCHS = 4


def model(params: dict[str, Any]) -> Any:
    from torch import nn

    width = params["width"]
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64 * width, 10),
    )


def loss(net: Any, batch: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(net(batch["image"]), batch["label"], reduction="none")


def optimizer(net: Any, params: dict[str, Any]) -> Any:
    import torch

    return torch.optim.SGD(net.parameters(), lr=params["lr"], momentum=0.9)


def grain(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "image": sample["image"] + rng.normal(0, 0.1, sample["image"].shape).astype(np.float32)}


def eight(precision: Any, sharing: str, epochs: int = EPOCHS) -> Ensemble:
    """Widths 1, 2 and 3, two batch sizes; augmentation of every sample in every epoch."""
    rng = np.random.default_rng(5)
    images = rng.integers(0, 256, (SAMPLES + VALID, 1, 8, 8)).astype(np.uint8)
    labels = rng.integers(0, 10, SAMPLES + VALID)
    normalize = stages.scale("image", mean=(0.5,), std=(0.25,))
    train = Pipeline(sources.arrays(image=images[:SAMPLES], label=labels[:SAMPLES]), seed=3)
    valid = Pipeline(sources.arrays(image=images[SAMPLES:], label=labels[SAMPLES:]))
    return Ensemble(
        name="laws",
        recipe=Recipe(model=model, loss=loss, optimizer=optimizer),
        members=[
            Member(
                {"width": 4 + number, "lr": 0.05},
                workers=(1, 2, 3, 1, 1, 2, 1, 1)[number],
                batch_size=48 if number % 2 else 32,
            )
            for number in range(8)
        ],
        train=train.map(stages.random_crop("image", size=8, padding=2)).map(normalize).map(grain),
        valid=valid.map(normalize),
        epochs=epochs,
        precision=precision,
        sharing=sharing,
        resources=Resources(cpus_per_worker=0.1),
    )


def trained(run_dir: Path, declared: Ensemble) -> tuple[dict[str, str | None], ensemble.Result]:
    """Weight hashes of all members, which must all have finished."""
    result = ensemble.submit(declared, run_dir, executor="local").wait()
    state = fold(read_events(run_dir / "events.jsonl"))
    assert [member.state for member in state.members.values()] == ["finished"] * 8
    return {member.id: member.weights_sha256 for member in state.members.values()}, result


@pytest.fixture(scope="module", params=[pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def precision(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def alone(precision: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    hashes, result = trained(tmp_path_factory.mktemp("alone") / "run", eight(precision, "independent"))
    assert result.ledger is not None
    assert result.ledger["reuse"]["factor"] == pytest.approx(1.0)
    return hashes


def test_eight_members_sharing_end_with_the_bits_of_eight_alone(
    precision: Any, alone: dict[str, str | None], tmp_path: Path
) -> None:
    hashes, result = trained(tmp_path / "run", eight(precision, "node"))
    assert hashes == alone
    assert len(set(hashes.values())) == 8
    assert result.ledger is not None
    assert result.ledger["reuse"]["factor"] == pytest.approx(8.0, rel=0.01)
    epochs = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["type"] == "epoch"]
    assert len(epochs) == 8 * EPOCHS
    assert all(e["private_batches"] == 0 and e["shared_batches"] > 0 for e in epochs)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"], indirect=True)
def test_a_stop_in_the_middle_and_a_resume_change_no_bit(
    precision: Any, alone: dict[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ensemble.controller.controller.TICK_S", 0.0)  # requests are seen at once
    run_dir = tmp_path / "run"
    asked: list[str] = []

    def stop_early(event: dict[str, Any]) -> None:
        if event["type"] == "epoch" and not asked:
            asked.append(event["member"])
            run.stop()

    declared = eight(precision, "node")
    run = ensemble.submit(declared, run_dir, executor="local", on_event=stop_early)
    assert run.wait().stopped
    state = fold(read_events(run_dir / "events.jsonl"))
    assert any(member.state == "stopped" for member in state.members.values())
    ensemble.resume(run_dir).wait()
    state = fold(read_events(run_dir / "events.jsonl"))
    assert {member.id: member.weights_sha256 for member in state.members.values()} == alone
