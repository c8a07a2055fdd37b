"""iterable(): streams, read once into a spool; streams that end, fail or change."""

from __future__ import annotations

import gc
import itertools
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import Feeder, Pipeline, attach, sampling, sources, stages
from pipelines.errors import PipelineError, SampleError


def number(n: int = 4) -> Iterator[dict[str, Any]]:
    for i in range(n):
        yield {"x": np.full(3, i), "label": i}


class Shifting:
    """A stream whose second pass differs from record 2 on."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        self.passes += 1
        return ({"x": i + 10 * (self.passes - 1) * (i >= 2)} for i in range(4))


def fail() -> Iterator[dict[str, int]]:
    yield {"x": 0}
    yield {"x": 1}
    raise OSError("the connection is lost")


def test_a_stream_is_read_once_and_has_its_records_by_index_in_any_order() -> None:
    stream = Shifting()
    source = sources.iterable(stream, length=4)
    assert [source[i]["x"] for i in (3, 0, 2, 1, 3)] == [3, 0, 2, 1, 3] and stream.passes == 1
    assert [record["x"] for record in source] == [record["x"] for record in source] == [0, 1, 2, 3]
    assert source.where(2) == "Shifting:record 2" and len(source.split(0.5)[0]) == 2


def test_values_come_back_to_the_last_bit_and_may_be_changed() -> None:
    torch = pytest.importorskip("torch")
    item = {
        "big": np.arange(3, dtype=">i4"),
        "scalar": np.float32(1.5),
        "flag": np.bool_(True),
        "text": "é\ud800",
        "raw": b"\0\xff",
        "nan": float("nan"),
        "huge": 2**80,
        "none": None,
        "nested": {"a": [1, (2.5, "b")], "when": np.datetime64("2024-01-01")},
        "tensor": torch.ones(2),
        "half": torch.full((2,), 1.5, dtype=torch.bfloat16),
    }
    record = sources.iterable([item], length=1)[0]
    assert record["big"].dtype == np.dtype(">i4") and record["big"].tolist() == [0, 1, 2]
    assert (record["scalar"], record["scalar"].dtype, record["flag"].dtype) == (1.5, np.float32, bool)
    assert (record["text"], record["raw"], record["huge"], record["none"]) == ("é\ud800", b"\0\xff", 2**80, None)
    assert np.isnan(record["nan"]) and record["nested"] == item["nested"]
    assert record["tensor"].dtype == record["half"].dtype == np.float32 and record["half"].tolist() == [1.5, 1.5]
    record["tensor"][:] = 0
    assert item["tensor"].sum() == 2


@pytest.mark.parametrize(
    ("stream", "length", "said"),
    [
        (number(), 4, "generator is an iterator, which can be read only once; give the function that makes it"),
        (map(str, range(3)), 3, "map is an iterator"),
        (5, 1, "int can neither be iterated over nor be called"),
        (lambda: 5, 1, "record 0: TypeError: 'int' object is not iterable"),
        (number, 5, "ended after 4 records, but length=5"),
        (number, 3, "yields more records than length=3"),
        (number, 0, "length must be at least 1"),
        (number, 4.0, "length must be an integer"),
        (fail, 3, "record 2: OSError: the connection is lost"),
        ([1, 2], 2, r"record 0: an item of 1 value \(int\), .*names=\('field1',\)"),
        ([{"x": {1, 2}}], 1, "record 0: 'x' of the record is builtins.set; yield arrays"),
        ([{"x": np.array([None])}], 1, "'x' of the record is an array of object"),
        ([{1: 2}], 1, "the key 1, which is no text"),
    ],
)
def test_streams_that_are_none_are_refused_with_the_record(
    stream: Any, length: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(PipelineError, match=said):
        sources.iterable(stream, length, folder=tmp_path)
    gc.collect()
    assert not list(tmp_path.iterdir()), "no spool is left"


def test_a_process_elsewhere_reads_the_stream_again_and_refuses_one_that_differs() -> None:
    for stream, said in ((number, ""), (Shifting(), "record 2 is another than in the first pass")):
        source = sources.iterable(stream, length=4)
        copy, another = (pickle.loads(pickle.dumps(source)) for _ in range(2))
        shutil.rmtree(source._folder)
        if not said:
            for each in (copy, another):  # the second finds what the first has written again
                assert [record["label"] for record in each] == [0, 1, 2, 3]
            continue
        with pytest.raises(SampleError, match=rf"sample 1 \(Shifting:record 1\): .*{said}"):
            copy[1]


def test_the_identity_is_that_of_the_records_or_the_given_one() -> None:
    def identify(stream: Any, **options: str) -> Any:
        return sources.iterable(stream, length=4, **options).identity()

    backwards = list(number())[::-1]
    assert identify(number) == identify(list(number())) != identify(backwards), "the order counts"
    assert identify(number, id="mine") == identify(backwards, id="mine")


def test_the_spool_goes_with_the_source(tmp_path: Path) -> None:
    source = sources.iterable(number, length=4, folder=tmp_path)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700 and source[3]["label"] == 3
    del source
    gc.collect()
    assert not folder.exists()


def test_other_libraries_streams_have_their_records(tmp_path: Path) -> None:
    torch, datasets = pytest.importorskip("torch"), pytest.importorskip("datasets")

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[Any]:
            return iter([(torch.ones(2), 1), (torch.zeros(2), 0)])

    assert sources.iterable(Stream(), length=2)[1]["label"] == 0
    made = datasets.Dataset.from_dict({"x": list(range(6))}).to_iterable_dataset().shuffle(seed=3)
    source = sources.iterable(made, length=6)
    assert sorted(record["x"] for record in source) == list(range(6))
    assert [record["x"] for record in source] == [record["x"] for record in source]


def test_of_a_stream_that_does_not_end_the_first_records_are_read() -> None:
    def count() -> Iterator[dict[str, int]]:
        for number in itertools.count():
            yield {"x": number}

    source = sources.iterable(count, length=10, endless=True)
    assert [record["x"] for record in source] == list(range(10))
    pipe = Pipeline(source, seed=0, sampling=sampling.consecutive(4))
    epochs = [
        np.concatenate([batch["x"].numpy() for batch in pipe.loader(4, epochs=range(e, e + 1))]) for e in (0, 1, 2)
    ]
    assert [sorted(each.tolist()) for each in epochs] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 8, 9]]
    with pytest.raises(PipelineError):
        sources.iterable(count, length=10)


def count_up() -> Iterator[dict[str, int]]:
    for number in itertools.count():
        yield {"x": number}


@pytest.mark.parametrize("shuffle", [False, True, "blocks"])
def test_epochs_of_a_stream_without_an_end_go_on_in_it_for_every_reader(shuffle: Any, tmp_path: Path) -> None:
    source = sources.iterable(count_up, length=10, endless=True, folder=tmp_path)
    pipe = Pipeline(source, seed=3, shuffle=shuffle).map(stages.cast("x", "int32"))

    def read(loader: Any) -> list[int]:
        return [int(x) for batch in loader for x in batch["x"]]

    alone = read(pipe.loader(4, epochs=5))
    for epoch in range(5):
        rows = alone[10 * epoch : 10 * (epoch + 1)]
        assert sorted(rows) == list(range(10 * epoch, 10 * (epoch + 1))) and (shuffle or rows == sorted(rows))
    assert sorted(path.name for path in tmp_path.glob("*/records-?")) == ["records-3", "records-4"]
    for other in (pipe, pickle.loads(pickle.dumps(pipe))):  # a restart, in this process and in another
        assert read(other.loader(4, epochs=range(2, 4))) == alone[20:40]
    assert read(pipe.loader(4, epochs=5, workers=2)) == alone
    with Feeder(pipe, workers=2, capacity=8, cache="memory") as feeder:
        assert read(attach(feeder.address, pipe, batch_size=4, epochs=range(5))) == alone
    ended = Pipeline(sources.iterable([{"x": n} for n in range(15)], length=10, endless=True), shuffle=False)
    with pytest.raises(SampleError, match="ended after 5 records, but length=10"):
        read(ended.loader(5, epochs=2))
