"""arrays() and dataset(): records that lie in memory, or in somebody else's Dataset."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pipelines import sources
from pipelines.errors import PipelineError, SampleError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (10, 3, 8, 8), dtype=np.uint8)
LABELS = np.arange(10)


def test_a_record_has_the_row_of_each_array() -> None:
    record = sources.arrays(image=IMAGES, label=LABELS)[7]
    np.testing.assert_array_equal(record["image"], IMAGES[7])
    assert record["label"] == 7 and record["label"].dtype == LABELS.dtype


def test_ragged_lists_are_of_one_dtype_and_arrays_keep_theirs() -> None:
    source = sources.arrays(ids=[[1, 2], [], [3.5]], series=[np.zeros((2, n), np.float32) for n in (3, 0, 5)])
    assert [source[i]["ids"].dtype for i in range(3)] == [np.float64] * 3
    assert [source[i]["series"].shape for i in range(3)] == [(2, 3), (2, 0), (2, 5)]
    assert all(source[i]["series"].dtype == np.float32 for i in range(3))
    assert sources.arrays(ids=[[1, 2], []])[1]["ids"].dtype == np.int64


def test_texts_bytes_and_ragged_rows_are_columns() -> None:
    source = sources.arrays(
        text=["one", "two"], data=(b"1", b"2"), tokens=[[1, 2, 3], [4]], strings=np.array(["a", "b"])
    )
    record = source[0]
    assert (record["text"], record["data"], record["strings"]) == ("one", b"1", "a")
    np.testing.assert_array_equal(record["tokens"], [1, 2, 3])


def test_a_tensor_is_a_column() -> None:
    torch = pytest.importorskip("torch")
    record = sources.arrays(x=torch.arange(6).reshape(3, 2))[1]
    assert isinstance(record["x"], np.ndarray) and record["x"].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({}, "no column"),
        ({"a": np.zeros(3), "b": np.zeros(4)}, "differ in length: a 3, b 4"),
        ({"a": np.zeros((0, 3))}, "holds no record"),
        ({"a": np.float32(3)}, "column 'a' must be an array"),
        ({"a": np.array(3)}, "scalar"),
        ({"a": "text"}, "column 'a' must be an array"),
        ({"a": 5}, "column 'a' must be an array"),
    ],
)
def test_columns_that_are_no_records_are_refused(columns: dict[str, Any], said: str) -> None:
    with pytest.raises(PipelineError, match=said):
        sources.arrays(**columns)


def test_identity_of_arrays_is_their_content_or_the_given_id() -> None:
    def name(**columns: Any) -> str:
        return json.dumps(sources.arrays(**columns).identity())

    same = name(image=IMAGES, label=LABELS)
    assert name(image=np.asfortranarray(IMAGES), label=LABELS.copy()) == same
    changed = IMAGES.copy()
    changed[9, 0, 0, 0] ^= 1
    others = [
        name(image=changed, label=LABELS),
        name(image=IMAGES, label=LABELS.astype(np.int32)),
        name(image=IMAGES, target=LABELS),
        name(text=["ab", "c"]),
        name(text=["a", "bc"]),
        name(text=[b"a", b"bc"]),
        name(rows=[[1], [2, 3]]),
        name(rows=[[1, 2], [3]]),
        name(x=LABELS, id="mine"),
    ]
    assert len({same, *others}) == len(others) + 1
    assert name(x=LABELS, id="mine") == name(x=LABELS + 1, id="mine")


def test_writing_into_a_record_leaves_the_data_alone() -> None:
    source = sources.arrays(image=IMAGES[:2].copy(), series=[np.arange(3), np.arange(5)])
    record = source[1]
    record["image"][:], record["series"][:] = 0, -1
    np.testing.assert_array_equal(source[1]["image"], IMAGES[1])
    assert source[1]["series"].tolist() == [0, 1, 2, 3, 4]


class Pairs:
    """A map-style Dataset as torch users write them."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_items_of_a_dataset_become_records() -> None:
    assert sources.dataset(Pairs([{"a": 1}]))[0] == {"a": 1}
    assert sources.dataset(Pairs([("pixels", 5)]))[0] == {"image": "pixels", "label": 5}
    assert sources.dataset(Pairs([(1, 2, 3)]), names=("x", "y", "z"))[0] == {"x": 1, "y": 2, "z": 3}
    assert sources.dataset(Pairs([5]), names=("x",))[0] == {"x": 5}


def test_an_item_with_other_than_the_named_values_is_a_sample_error() -> None:
    with pytest.raises(SampleError, match=r"sample 0 \(Pairs\[0\]\): an item of 3 values.*image, label"):
        sources.dataset(Pairs([(1, 2, 3)]))[0]


def test_a_dataset_that_fails_is_a_sample_error_that_names_the_index() -> None:
    source = sources.dataset(Pairs([{"a": 1}, {"a": 2}]))
    source.items.items.pop()
    with pytest.raises(SampleError, match=r"sample 1 \(Pairs\[1\]\): IndexError: list index"):
        source[1]


def test_what_a_stage_writes_into_does_not_reach_the_dataset() -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.zeros(4, 2), torch.arange(4))
    source = sources.dataset(data)
    record = source[1]
    assert isinstance(record["image"], np.ndarray) and int(record["label"]) == 1
    record["image"][:] = 5
    assert float(data[1][0].sum()) == 0


def test_a_foreign_dataset_has_an_identity_only_by_id() -> None:
    assert sources.dataset(Pairs([{}])).identity() is None
    assert (
        sources.dataset(Pairs([{}]), id="pairs").identity() == sources.dataset(Pairs([{}]), id="pairs").identity()
    )
    assert sources.dataset(Pairs([{"a": 1}] * 4)).take(2).identity() is None


def test_what_is_no_map_style_dataset_is_refused() -> None:
    with pytest.raises(PipelineError, match="map-style"):
        sources.dataset(iter([1, 2]))
    with pytest.raises(PipelineError, match="Pairs holds no record"):
        sources.dataset(Pairs([]))


def test_arrays_of_any_layout_come_in_native_byte_order_and_structured_ones_as_dicts() -> None:
    made = np.array([(1, 2.5), (3, 4.5)], [("a", ">i4"), ("b", "f8")])
    record = sources.arrays(x=made, y=np.asfortranarray(np.arange(4, dtype=">f4").reshape(2, 2)))[1]
    assert record["x"] == {"a": 3, "b": 4.5} and record["y"].tolist() == [2, 3] and record["y"].dtype.isnative


def test_tensors_that_numpy_cannot_hold_are_converted_exactly_or_refused() -> None:
    torch = pytest.importorskip("torch")
    source = sources.arrays(
        half=torch.full((2, 3), 1.5, dtype=torch.bfloat16), graph=torch.ones(2, requires_grad=True)
    )
    assert source[0]["half"].dtype == np.float32 and source[0]["half"].tolist() == [1.5] * 3
    assert source[0]["graph"] == 1
    half = sources.dataset(Pairs([{"x": torch.ones(2, dtype=torch.bfloat16)}]))[0]["x"]
    assert half.dtype == np.float32
    with pytest.raises(PipelineError, match=r"column 'x' cannot be an array: .*Sparse"):
        sources.arrays(x=torch.eye(3).to_sparse())


def test_masked_values_are_refused() -> None:
    with pytest.raises(PipelineError, match="column 'x' has masked values"):
        sources.arrays(x=np.ma.array([1, 2], mask=[False, True]))
    assert sources.arrays(x=np.ma.array([1, 2]))[1]["x"] == 2


def test_a_list_of_bfloat16_tensors_is_a_float32_column() -> None:
    torch = pytest.importorskip("torch")
    ones = torch.full((3,), 1.5, dtype=torch.bfloat16)
    source = sources.arrays(x=[ones, ones], scalar=list(ones[:2]), ragged=[ones, ones[:1]])
    assert source.columns["x"].shape == (2, 3) and source.columns["scalar"].shape == (2,)
    assert [source[1][name].tolist() for name in ("x", "scalar", "ragged")] == [[1.5] * 3, 1.5, [1.5]]
    assert {source[1][name].dtype for name in source[1]} == {np.dtype("float32")}
    with pytest.raises(PipelineError, match=r"column 'x' cannot be an array: "):
        sources.arrays(x=[torch.eye(3).to_sparse()] * 2)
