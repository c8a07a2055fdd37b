"""Twins of stages in torch: bitwise equal to the stages; stages as JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipelines import stages
from pipelines.errors import PipelineError
from pipelines.stages import records

DTYPES = ("uint8", "uint16", "int16", "int64", "float32", "float64")


def images(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    """Images [b, C, H, W]; where there is room all values of uint8 are among them."""
    rng = np.random.default_rng(seed)
    if dtype == "uint8":
        return np.resize(np.arange(256, dtype=np.uint8), shape)
    if dtype.startswith("float"):
        return (300 * rng.standard_normal(shape)).astype(dtype)
    return rng.integers(0, 30_000, shape).astype(dtype)


def check_twin(stage: Any, batch: dict[str, np.ndarray[Any, Any]]) -> None:
    """The twin gives for the batch what the stage gives for each of its samples, bit for bit."""
    count = len(next(iter(batch.values())))
    wanted = [stage({name: value[i] for name, value in batch.items()}) for i in range(count)]
    found = stage.as_module()({name: torch.from_numpy(value) for name, value in batch.items()})
    assert list(found) == list(wanted[0])
    for name, value in found.items():
        whole = np.stack([sample[name] for sample in wanted])
        assert (value.numpy().dtype, value.numpy().shape) == (whole.dtype, whole.shape)
        assert value.numpy().tobytes() == whole.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", ["float16", "float32", "float64"])
def test_the_twin_of_scale_rounds_as_it_does(dtype: str, to: str) -> None:
    stage = stages.scale("image", mean=(0.491, 0.482, 0.447), std=(0.247, 0.244, 0.262), dtype=to)
    check_twin(stage, {"image": images(dtype, (3, 3, 17, 19))})
    check_twin(stages.scale("image", 0.1307, 0.3081, to), {"image": images(dtype, (2, 5, 8, 8))})


@given(mean=st.floats(-3, 3), std=st.floats(1e-3, 10), seed=st.integers(0, 99))
def test_the_twin_of_scale_is_bitwise_equal_for_any_numbers(mean: float, std: float, seed: int) -> None:
    check_twin(stages.scale("image", mean, std), {"image": images("float32", (1, 2, 5, 7), seed)})


def test_the_twin_of_scale_is_equal_for_images_that_opencv_parts() -> None:
    large = np.ascontiguousarray(images("uint8", (2, 96, 128, 3))).transpose(0, 3, 1, 2)
    check_twin(stages.scale("image", 0.3, 0.7), {"image": large})


@given(st.integers(4, 13), st.integers(5, 13), st.sampled_from(DTYPES))
def test_the_twin_of_center_crop_cuts_the_same_part(height: int, width: int, dtype: str) -> None:
    check_twin(stages.center_crop("image", (4, 5)), {"image": images(dtype, (2, 3, height, width))})


@pytest.mark.parametrize("dtype", [*DTYPES, "bool", "int8"])
@pytest.mark.parametrize("to", ["float32", "float64"])
def test_the_twin_of_cast_rounds_as_it_does(dtype: str, to: str) -> None:
    values = np.array([[0, 1, 3], [2**24 + 1, 2**53 + 1, 7]]).astype(dtype)
    check_twin(stages.cast("x", to), {"x": values, "y": values})


@pytest.mark.parametrize("to", ["uint8", "int64", "bool", "float16"])
def test_a_cast_that_torch_may_do_otherwise_has_no_twin(to: str) -> None:
    assert stages.cast("x", to).as_module() is None


@pytest.mark.parametrize("stage", [stages.select("b", "a"), stages.drop("b"), stages.rename(a="z", b="y")])
def test_the_twins_of_select_drop_and_rename_keep_the_same_fields(stage: Any) -> None:
    check_twin(stage, {"a": np.arange(3.0), "b": np.arange(6).reshape(3, 2), "c": np.ones(3, bool)})


def test_twins_take_batches_without_fields_that_they_only_pass_on() -> None:
    batch = {"a": torch.ones(2)}
    for stage in (stages.select("a", "label"), stages.drop("label"), stages.rename(label="y")):
        assert stage.as_module()(batch) == batch


@pytest.mark.parametrize(
    "stage", [stages.random_flip("image"), stages.resize("image", 4), stages.decode_jpeg("image")]
)
def test_a_stage_without_a_twin_says_so(stage: Any) -> None:
    assert stage.as_module() is None


class Halved(type(stages.scale("image"))):  # type: ignore[misc]
    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, self.field: super().__call__(sample)[self.field] / 2}


def test_a_users_class_that_computes_something_else_does_not_have_the_twin_of_ours() -> None:
    assert Halved("image", (0.0,), (1.0,), "float32").as_module() is None


STAGES = [
    stages.cast("x", "float32"),
    stages.center_crop("image", (4, 5)),
    stages.decode_image("image", "GRAY"),
    stages.decode_jpeg("image", min_size=32),
    stages.drop("a", "b"),
    stages.pad("x", 7, lengths="n", side="start"),
    stages.rename(a="b"),
    stages.resize("image", shorter=256, interpolation="area"),
    stages.scale("image", (0.1, 0.2, 0.3), 0.5),
    stages.select("a"),
    stages.tokenize("text", ["the", "film"]),
]


def test_numbers_of_numpy_are_recorded_as_plain_ones() -> None:
    stage = stages.pad("x", np.int64(9), value=np.float32(0.5), mask="mask")
    record = json.loads(json.dumps(records.as_record(stage)))
    assert records.from_record(record) == stage and record["values"]["value"] == 0.5


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: type(stage).__name__)
def test_a_stage_is_the_same_after_json(stage: Any) -> None:
    record = json.loads(json.dumps(records.as_record(stage)))
    assert records.from_record(record) == stage
    assert record["stage"] in stages.__all__


def test_what_is_no_stage_of_ours_has_no_record() -> None:
    assert records.as_record(lambda sample: sample) is None
    assert records.as_record(stages.random_flip("image")) is None


@pytest.mark.parametrize(
    "record", [{"stage": "blur", "values": {}}, {"stage": "cast", "values": {"field": "x"}}, {}]
)
def test_a_record_that_is_not_known_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(PipelineError, match="is not known here; it was written by another version"):
        records.from_record(record)
