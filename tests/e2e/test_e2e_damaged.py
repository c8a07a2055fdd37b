"""Damaged records of the data on which members are evaluated: named before anything trains, mended at no cost."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_dicts import read_events
from PIL import Image

import ensemble
from ensemble.cli import main
from ensemble.spec.spec_file import load_spec
from pipelines import PipelineError

SPEC = """
import torch
from ensemble import Ensemble, Energy, Recipe, Resources
from pipelines import Pipeline, sources, stages

def model(params):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))

def images(folder, **options):
    read = Pipeline(sources.image_folder({path!r} + "/" + folder), seed=0, **options)
    return read.map(stages.decode_jpeg("image")).map(stages.scale("image"))

def spec(sharing="auto", skip=(), members=2, train=0):
    splits = {{name: images(name, **({{"on_error": "skip", "max_skipped": 1.0}} if name in skip else {{}}))
              for name in ("train", "valid", "test")}}
    return Ensemble(
        name="damaged", recipe=Recipe(model=model, loss="cross_entropy"), **splits, epochs=2, batch_size=8,
        members=[{{"lr": 0.01 * (1 + n)}} for n in range(members)], optimizer="sgd", sharing=sharing, retries=2,
        energy=Energy(measure_idle_s=0), devices="cpu", resources=Resources(workers=1, cpus_per_worker=0.5, threads=1, memory_gb=1.0),
    )
"""
SIZES = {"train": 32, "valid": 12, "test": 12}


def write_image(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(path, quality=95)


def damage(*paths: Path) -> None:
    for path in paths:
        path.write_bytes(path.read_bytes()[:40])


class Frame:
    """A spec on images of two classes, and what its log says."""

    def __init__(self, path: Path) -> None:
        self.data, self.run, self.spec = path / "data", path / "run", path / "spec.py"
        for split, size in SIZES.items():
            for number in range(size):
                write_image(self.image(split, number), 1000 * len(split) + number)
        self.spec.write_text(SPEC.format(path=str(self.data)))

    def image(self, split: str, number: int) -> Path:
        return self.data / split / "ab"[number % 2] / f"{number:03}.jpg"

    def submit(self, executor: str = "inline", **options: Any) -> ensemble.Result:
        settings = [f"{name}={value}" for name, value in options.items()]
        return ensemble.submit(load_spec(str(self.spec), settings), self.run, executor, spec_file=self.spec).wait()

    def events(self, *types: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run / "events.jsonl") if event["type"] in types]


@pytest.fixture
def frame(tmp_path: Path) -> Frame:
    return Frame(tmp_path)


@pytest.mark.parametrize(
    ("executor", "sharing"),
    [
        ("inline", "auto"),
        pytest.param("local", "auto", marks=pytest.mark.more),
        pytest.param("local", "independent", marks=pytest.mark.more),
        pytest.param("ray", "auto", marks=[pytest.mark.more, pytest.mark.ray]),
    ],
)
def test_all_damaged_records_are_named_before_anything_trains_and_replacing_them_is_all_it_takes(
    frame: Frame, executor: str, sharing: str
) -> None:
    bad = [*(frame.image("valid", n) for n in (3,)), *(frame.image("test", n) for n in (0, 5))]
    damage(*bad)
    with pytest.raises(PipelineError, match="nothing was trained") as refused:
        frame.submit(executor, sharing=sharing)
    for path in bad:
        assert str(path) in str(refused.value)
    for way_out in ("Replace the files", 'on_error="skip"', "max_skipped"):
        assert way_out in str(refused.value)
    assert not frame.events("started", "epoch", "checkpoint", "failed"), "no step, and no attempt is used up"
    (stopped,) = frame.events("run_stopped")
    assert str(bad[0]) in stopped["reason"]
    for number, path in enumerate(bad):
        write_image(path, number)
    result = ensemble.resume(frame.run).wait()
    assert [row["state"] for row in result.members] == ["finished"] * 2
    assert result.combined is not None and result.combined["split"] == "test"
