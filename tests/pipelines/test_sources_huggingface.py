"""huggingface(): Datasets of every feature, in files and in memory, selected, shuffled and filtered."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import sources
from pipelines.errors import PipelineError, SampleError

datasets: Any = None
N = 1500


@pytest.fixture(scope="module", autouse=True)
def whole() -> Any:
    global datasets  # dear to import
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    value, kinds = datasets.Value, datasets.Features
    features = kinds(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "grid": datasets.Array2D((2, 3), "float32"),
            "tokens": datasets.List(value("int32")),
            "nested": {"p": value("float32"), "q": value("string"), "grid": datasets.Array2D((2, 2), "int64")},
            "boxes": datasets.List({"x": value("int32"), "name": value("string")}),
            "text": value("string"),
            "words": datasets.Sequence(value("string")),
        }
    )
    rows = [
        {
            "image": {"bytes": b"image %d" % i, "path": None},
            "label": i % 2,
            "grid": np.full((2, 3), i, np.float32),
            "tokens": [i] * (i % 3),
            "nested": {"p": i / 2, "q": f"q{i}", "grid": [[1, 2], [3, i]]},
            "boxes": [{"x": i, "name": "a"}] * (i % 3),
            "text": f"é{i}",
            "words": ["w"] * (i % 2),
        }
        for i in range(N)
    ]
    return datasets.Dataset.from_list(rows, features=features)


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
    """`whole`, saved."""
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


def test_a_set_in_files_is_pickled_as_places_in_them_and_one_in_memory_out_of_band(
    whole: Any, folder: Path
) -> None:
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(sources.huggingface(datasets.load_from_disk(folder)), 5, buffer_callback=buffers.append)
    assert not any(each.raw().nbytes for each in buffers) and b"image 7" not in body
    body = pickle.dumps(sources.huggingface(whole), 5, buffer_callback=buffers.append)
    assert b"image 7" not in body and any(b"image 7" in bytes(each) for each in buffers)


def test_the_order_of_loading_does_not_matter_to_the_identity_and_other_data_do(whole: Any, folder: Path) -> None:
    def identity(change: int) -> Any:
        return sources.huggingface(datasets.Dataset.from_dict({"x": [1, 2, 3 + change]})).identity()

    assert identity(0) == identity(0) != identity(1)
    first, second = (sources.huggingface(datasets.load_from_disk(folder)) for _ in range(2))
    assert first.identity() == second.identity() != sources.huggingface(whole).identity()
    assert (
        sources.huggingface(whole, id="mine").identity()
        == sources.huggingface(whole.take(3), id="mine").identity()
    )


def test_what_changes_the_values_or_is_no_dataset_is_refused_with_what_to_do(whole: Any) -> None:
    for made, said in (
        (
            datasets.DatasetDict({"train": whole, "test": whole}),
            r"DatasetDict; give one of its splits \('train', 'test'\)",
        ),
        (whole.to_iterable_dataset(), "no random access; give it to iterable"),
        (
            whole.with_format("torch", columns=["label"]),
            r"format 'torch'.*with_format\(None\), columns=\['label'\]",
        ),
        (whole.with_transform(lambda rows: rows), r"has a transform; .*map\(\) the rest as a stage"),
        (whole.select([]), "holds no record"),
        ([1, 2], "needs a datasets.Dataset, got list"),
    ):
        with pytest.raises(PipelineError, match=said):
            sources.huggingface(made)
    with pytest.raises(PipelineError, match=r"no column 'x' \(there are: image, label"):
        sources.huggingface(whole, columns=["x"])
    assert set(sources.huggingface(whole.with_format("arrow", columns=["label", "text"]))[3]) == {"label", "text"}


def test_a_missing_value_is_a_sample_error_that_names_its_row(tmp_path: Path) -> None:
    made = datasets.Dataset.from_dict({"x": [1, None], "image": [{"bytes": b"1", "path": None}, None]})
    source = sources.huggingface(made, columns=["x"])
    assert source[0] == {"x": 1}
    with pytest.raises(SampleError, match=r"sample 1 \(.*\[1\]\): column 'x' is null"):
        source[1]


@pytest.fixture
def outside(tmp_path: Path) -> Any:
    """A Dataset that names its images, and holds the bytes of one."""
    for i in range(6):
        (tmp_path / f"{i}.png").write_bytes(b"image %d" % i)
    rows: list[Any] = [{"bytes": None, "path": str(tmp_path / f"{i}.png")} for i in range(6)]
    rows[4] = {"bytes": b"image 4", "path": "4.png"}
    made = datasets.Dataset.from_dict({"image": rows, "label": list(range(6))})
    return made.cast_column("image", datasets.Image())


def test_images_that_the_data_only_name_are_read_from_their_files(outside: Any) -> None:
    mixed = outside.select([5, 0, 4, 4, 2])
    both = datasets.concatenate_datasets([outside, mixed])
    for made, expected in ((outside, range(6)), (mixed, (5, 0, 4, 4, 2)), (both, (*range(6), 5, 0, 4, 4, 2))):
        source = sources.huggingface(made)
        copy = pickle.loads(pickle.dumps(source))
        for index, number in enumerate(expected):
            assert source[index] == copy[index] == {"image": b"image %d" % number, "label": number}
        assert source.column("image").tolist() == [b"image %d" % number for number in expected]
        assert copy.identity() == source.identity() == sources.huggingface(made).identity()


def test_an_image_outside_that_is_changed_or_missing_is_named(outside: Any, tmp_path: Path) -> None:
    source = sources.huggingface(outside)
    (tmp_path / "1.png").write_bytes(b"another image")
    (tmp_path / "2.png").unlink()
    assert sources.huggingface(outside).identity() != source.identity()
    with pytest.raises(SampleError, match=r"sample 1 \(.*1\.png: was changed after its records were indexed"):
        source[1]
    with pytest.raises(SampleError, match=r"sample 2 \(.*2\.png: cannot be opened: No such file"):
        source[2]
    with pytest.raises(SampleError, match=r"kept outside of the data, in .*2\.png; .*save_to_disk"):
        sources.huggingface(outside)[2]
    few = sources.huggingface(outside.select([0, 3]))
    (tmp_path / "5.png").unlink()
    assert sources.huggingface(outside.select([0, 3])).identity() == few.identity(), "of the files that are read"
