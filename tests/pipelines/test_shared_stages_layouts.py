"""Between two stages an array is normalize_layout: dense, writable, its axes in the order in which they lay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from pipelines import Pipeline, sources
from pipelines.prepare.sample_maker import SampleMaker
from pipelines.samples.memory_order import copy_in_layout, layout_of, normalize_layout


@st.composite
def views(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Views of all kinds: transposed, cut out, with steps, backwards, broadcast, of length 0 and 1."""
    shape = draw(st.lists(st.integers(0, 4), min_size=0, max_size=4))
    dtype = draw(st.sampled_from(["uint8", "float32", "complex64"]))
    array = (
        np.arange(int(np.prod(shape)), dtype=dtype)
        .reshape(shape)
        .transpose(draw(st.permutations(range(len(shape)))))
    )
    cuts = tuple(
        slice(draw(st.integers(0, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 2)))
        if draw(st.booleans())
        else slice(None, None, draw(st.sampled_from([1, -1])))
        for _ in shape
    )
    array = array[(*cuts, ...)]
    if draw(st.booleans()):
        array = np.broadcast_to(array, (2, *array.shape)).transpose(draw(st.permutations(range(array.ndim + 1))))
    return array


@examples(100)
@given(views())
def test_a_settled_array_is_dense_writable_and_of_the_form_that_was_foretold(view: np.ndarray[Any, Any]) -> None:
    array = normalize_layout(view)
    assert array.shape == view.shape and (array == view).all() and array.flags.behaved
    assert array.transpose(layout_of(view)).flags.c_contiguous
    assert layout_of(array) == layout_of(view) and normalize_layout(array) is array
    again = copy_in_layout(np.ascontiguousarray(view).reshape(view.shape), layout_of(view))
    steps = [[s for s, n in zip(a.strides, a.shape, strict=True) if n > 1] for a in (again, array) if a.size]
    assert (again == view).all() and steps == steps[::-1]


def seen(calls: list[Any]) -> Any:
    def stage(sample: dict[str, Any]) -> dict[str, Any]:
        calls.append(sample)
        return sample

    return stage


@pytest.mark.parametrize("field", ["x", None])
def test_a_stage_gets_settled_arrays_and_whatever_else_as_it_is(field: str | None) -> None:
    def views_of(value: Any) -> Any:
        x = value if field else value["x"]
        x = x.transpose(2, 0, 1)[:, 1:]
        return x if field else {**value, "x": x}

    calls: list[Any] = []
    source = sources.arrays(x=np.arange(120.0).reshape(2, 5, 4, 3), text=["a", "b"])
    pipeline = Pipeline(source).map(views_of, field=field).map(seen(calls)).map(lambda s: {"x": s["x"]})
    batch = next(iter(pipeline.loader(2)))
    x = calls[-1]["x"]
    assert x.strides == (8, 96, 24) and x.base.flags.owndata and calls[-1]["text"] in "ab"
    assert batch["x"].shape == (2, 3, 4, 4)


def test_what_cannot_be_written_to_is_copied_before_the_next_stage() -> None:
    def frozen(value: Any) -> Any:
        return np.frombuffer(value.tobytes(), value.dtype)

    def add(value: Any) -> Any:
        value += 1
        return value

    source = sources.arrays(x=np.zeros((4, 3)))
    batch = next(iter(Pipeline(source).map(frozen, field="x").map(add, field="x").loader(4)))
    assert (batch["x"] == 1).all()


def test_stages_run_in_parts_as_in_one_go() -> None:
    def noise(sample: Any, rng: np.random.Generator) -> Any:
        return {**sample, "x": sample["x"] + rng.random(3)}

    pipeline = Pipeline(sources.arrays(x=np.zeros((4, 3))), seed=1).map(noise).map(noise).map(noise)
    maker = SampleMaker(pipeline)
    for cut in range(4):
        part = maker.make(2, 5, last=cut)
        whole = maker.make(2, 5, part, first=cut)
        assert (whole["x"] == maker.make(2, 5)["x"]).all()
