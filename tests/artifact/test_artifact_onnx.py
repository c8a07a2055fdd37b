"""ONNX beside the program: within its tolerance of `load`, or refused with nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from artifact_runs import CROP, SCALE, make_images

import ensemble
from ensemble.artifact import ArtifactError, onnx
from ensemble.artifact.onnx import measure_difference

onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")


@pytest.mark.more
def test_onnx_computes_the_same_within_its_tolerance(run: Path, tmp_path: Path) -> None:
    made = ensemble.export(run, tmp_path / "out", onnx=True, uncertainty=False)
    session = onnxruntime.InferenceSession(made / "model.onnx", providers=["CPUExecutionProvider"])
    for count, height, width in ((37, 10, 12), (1, 8, 8), (3, 19, 9)):
        images = np.random.default_rng(count).integers(0, 256, (count, 3, height, width), np.uint8)
        found = session.run(["values"], {"image": images})[0]
        batch = np.stack([SCALE(CROP({"image": image}))["image"] for image in images])
        values = ensemble.load(run)({"image": torch.from_numpy(batch)}).numpy()
        assert found.shape == values.shape and np.abs(found - values).max() <= 1e-5
    assert "`model.onnx` is the same for ONNX runtimes" in (made / "README.md").read_text()
    content = (made / "model.onnx").read_bytes()
    assert b"artifact_runs.py" not in content and b"F.relu(" not in content
    assert make_images(1)["image"][0].tobytes() not in content


class Session:
    """onnxruntime whose first value is another one."""

    def __init__(self, path: Path, value: float | None) -> None:
        self.session = onnxruntime_session(path, providers=["CPUExecutionProvider"])
        self.value = value

    def run(self, names: list[str], given: Any) -> list[Any]:
        found = self.session.run(names, given)[0].copy()
        if self.value is None:
            return [found[:1]]
        found[0, 0] = self.value
        return [found]


onnxruntime_session = onnxruntime.InferenceSession


@pytest.mark.more
@pytest.mark.parametrize("value", [float("nan"), None])
def test_onnx_that_differs_is_refused_and_nothing_is_left(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float | None
) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda path, providers: Session(path, value))
    with pytest.raises(ArtifactError, match=r"ONNX differs from load\(\) by .*; export without --onnx"):
        ensemble.export(run, tmp_path / "out", onnx=True, uncertainty=False)
    assert os.listdir(tmp_path) == []


def test_a_difference_counts_in_parts_of_large_numbers_and_sees_what_is_no_number() -> None:
    one, nan = np.array([1.0, -2.0, 3e5], np.float32), np.array([np.nan, 1.0, np.inf])
    assert measure_difference(one, one) == 0 and measure_difference(nan, nan) == 0
    assert measure_difference(one + np.float32(0.25), one) == pytest.approx(0.25)
    assert measure_difference(np.array([3e5 + 3]), np.array([3e5])) == pytest.approx(1e-5)
    assert measure_difference(np.array([1e-3]), np.array([0.0])) == pytest.approx(1e-3)
    assert measure_difference(one, nan) == measure_difference(nan, one) == float("inf")
    assert measure_difference(nan, np.array([np.nan, 1.0, -np.inf])) == float("inf")
    assert measure_difference(one[None], one) == measure_difference(one[:1], one) == float("inf")
    assert onnx.TOLERANCE == 1e-5 and measure_difference(one[:0], one[:0]) == 0
