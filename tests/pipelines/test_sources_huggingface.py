"""huggingface(): Datasets of every feature, in files and in memory, selected, shuffled and filtered."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import sources

datasets: Any = None
N = 1500


@pytest.fixture(scope="module", autouse=True)
def whole() -> Any:
    global datasets  # dear to import
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    value, array = datasets.Value, datasets.Array2D
    nested = {"p": value("float32"), "q": value("string"), "grid": array((2, 2), "int64")}
    features: dict[str, Any] = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    features |= {"grid": array((2, 3), "float32"), "tokens": datasets.List(value("int32")), "nested": nested}
    features |= {"boxes": datasets.List({"x": value("int32"), "name": value("string")}), "text": value("string")}
    features |= {"words": datasets.Sequence(value("string"))}

    def row(i: int) -> dict[str, Any]:
        image = {"bytes": b"image %d" % i, "path": None}
        grids = {"grid": np.full((2, 3), i, np.float32), "tokens": [i] * (i % 3), "words": ["w"] * (i % 2)}
        nested = {"p": i / 2, "q": f"q{i}", "grid": [[1, 2], [3, i]]}
        boxes = [{"x": i, "name": "a"}] * (i % 3)
        return {"image": image, "label": i % 2, **grids, "nested": nested, "boxes": boxes, "text": f"é{i}"}

    return datasets.Dataset.from_list([row(i) for i in range(N)], features=datasets.Features(features))


def check(record: dict[str, Any], i: int) -> None:
    assert record["image"] == b"image %d" % i and record["text"] == f"é{i}"
    assert record["label"] == i % 2 and record["label"].dtype == np.int64
    assert record["grid"].dtype == np.float32 and record["grid"].shape == (2, 3) and (record["grid"] == i).all()
    assert record["tokens"].dtype == np.int32 and record["tokens"].tolist() == [i] * (i % 3)
    assert (record["nested"]["p"], record["nested"]["q"]) == (i / 2, f"q{i}")
    assert record["nested"]["grid"].tolist() == [[1, 2], [3, i]]
    assert record["boxes"] == [{"x": i, "name": "a"}] * (i % 3) and record["words"] == ["w"] * (i % 2)


@pytest.fixture(scope="module")
def folder(whole: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("huggingface") / "set"
    whole.save_to_disk(place)
    return place


def test_records_are_what_is_stored_whatever_was_selected(whole: Any, folder: Path) -> None:
    data = datasets.load_from_disk(folder)
    odd = [i for i in range(N) if i % 2]
    cases = [
        (data, list(range(N))),
        (data.select(range(100, 1400)), list(range(100, 1400))),
        (data.select([5, 3, 3]), [5, 3, 3]),
        (data.shuffle(seed=1), data.shuffle(seed=1).with_format("arrow")["text"].to_pylist()),
        (data.filter(lambda label: label == 1, input_columns=["label"]), odd),
        (datasets.concatenate_datasets([data, whole]), [*range(N), *range(N)]),
        (data.shard(3, 1), list(range(500, 1000))),
    ]
    identities = []
    for made, expected in cases:
        source = sources.huggingface(made)
        copy = pickle.loads(pickle.dumps(source))
        numbers = [int(str(each).removeprefix("é")) for each in expected]
        assert len(source) == len(numbers)
        for index in {0, 1, len(numbers) // 2, len(numbers) - 1}:
            check(source[index], numbers[index])
            check(copy[index], numbers[index])
        assert copy.identity() == source.identity() == sources.huggingface(made).identity()
        identities.append(repr(source.identity()))
        assert source.classes == ("cat", "dog")
        np.testing.assert_array_equal(source.column("label"), np.array(numbers) % 2)
    assert len(set(identities)) == len(cases)
    first, second = (sources.huggingface(made, id="mine") for made in (data, data.take(3)))
    assert first.identity() == second.identity()


def test_only_the_columns_that_are_asked_for_are_read(whole: Any) -> None:
    assert set(sources.huggingface(whole.with_format("arrow", columns=["label", "text"]))[3]) == {"label", "text"}
    made = datasets.Dataset.from_dict({"x": [1, None], "image": [{"bytes": b"1", "path": None}, None]})
    assert sources.huggingface(made, columns=["x"])[0] == {"x": 1}
