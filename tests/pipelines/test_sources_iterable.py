"""iterable(): streams, read once into a spool; streams that end, fail or change."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import Pipeline, sources
from pipelines.errors import DataOutOfReach, PipelineError


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENSEMBLE_SOURCES_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept" / "ray-ensemble" / "sources"


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


def test_a_stream_is_read_once_and_has_its_records_by_index_in_any_order() -> None:
    stream = Shifting()
    source = sources.iterable(stream, length=4)
    assert [source[i]["x"] for i in (3, 0, 2, 1, 3)] == [3, 0, 2, 1, 3] and stream.passes == 1
    assert [record["x"] for record in source] == [record["x"] for record in source] == [0, 1, 2, 3]
    assert source.where(2) == "Shifting:record 2" and len(source.split(0.5)[0]) == 2


def test_values_come_back_to_the_last_bit_and_may_be_changed() -> None:
    torch = pytest.importorskip("torch")
    item: dict[str, Any] = {"big": np.arange(3, dtype=">i4"), "scalar": np.float32(1.5), "flag": np.bool_(True)}
    item |= {"text": "é\ud800", "raw": b"\0\xff", "nan": float("nan"), "huge": 2**80, "none": None}
    item |= {"nested": {"a": [1, (2.5, "b")], "when": np.datetime64("2024-01-01")}, "tensor": torch.ones(2)}
    item |= {"half": torch.full((2,), 1.5, dtype=torch.bfloat16)}
    record = sources.iterable([item], length=1)[0]
    assert record["big"].dtype == np.dtype(">i4") and record["big"].tolist() == [0, 1, 2]
    assert (record["scalar"], record["scalar"].dtype, record["flag"].dtype) == (1.5, np.float32, bool)
    assert (record["text"], record["raw"], record["huge"], record["none"]) == ("é\ud800", b"\0\xff", 2**80, None)
    assert np.isnan(record["nan"]) and record["nested"] == item["nested"]
    assert record["tensor"].dtype == record["half"].dtype == np.float32 and record["half"].tolist() == [1.5, 1.5]
    record["tensor"][:] = 0
    assert item["tensor"].sum() == 2


def test_a_process_elsewhere_reads_the_stream_again_and_refuses_one_that_differs(kept: Path) -> None:
    for stream, said in ((number, ""), (Shifting(), "record 2 differs from that of the first pass")):
        source = sources.iterable(stream, length=4)
        copy, another = (pickle.loads(pickle.dumps(source)) for _ in range(2))
        (spool,) = kept.glob("*-records~")
        spool.unlink()
        if not said:
            for each in (copy, another):  # the second finds what the first has written again
                assert [record["label"] for record in each] == [0, 1, 2, 3]
            spool.unlink()
            continue
        for _ in range(2):
            with pytest.raises(DataOutOfReach, match=said):
                list(Pipeline(copy, on_error="skip", max_skipped=1.0).loader(2, epochs=1))
        assert not list(kept.iterdir())


def test_who_writes_a_missing_spool_again_removes_it_at_its_end(kept: Path, tmp_path: Path) -> None:
    source = sources.iterable(number, length=4)
    (spool,) = kept.glob("*-records~")
    spool.unlink()
    (tmp_path / "sent").write_bytes(pickle.dumps(source))
    code = (
        "import pickle, sys; sys.path.insert(0, sys.argv[2]); source = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print([int(source[i]['label']) for i in range(4)])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "sent"), str(Path(__file__).parent)]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout == "[0, 1, 2, 3]\n"
    assert not list(kept.iterdir())


WRITER = """
import sys, time
from pipelines import sources

def stream():
    yield {"x": 0}
    if sys.argv[1] == "unfinished":
        print("here", flush=True)
        time.sleep(600)

source = sources.iterable(stream, length=1)
print("here", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_files_of_a_process_stay_while_it_lives_and_go_when_it_was_killed(
    kept: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setenv("ENSEMBLE_SOURCES_BYTES", "1")  # there is never room
    with subprocess.Popen([sys.executable, "-c", WRITER, state], stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None and owner.stdout.readline() == b"here\n"
            theirs = set(kept.iterdir())
            for file in theirs:
                os.utime(file, (1, 1))
            sources.iterable(number, length=4)
            assert theirs and theirs <= set(kept.iterdir())
        finally:
            owner.kill()
    sources.iterable(number, length=4)
    gc.collect()
    assert not list(kept.iterdir())


def test_a_spool_that_was_cut_is_not_read_and_no_record_is_left_out_for_it(kept: Path) -> None:
    owner = sources.iterable(number, length=4)
    (spool,) = kept.glob("*-records~")
    os.truncate(spool, spool.stat().st_size - 1)
    with pytest.raises(DataOutOfReach, match="was changed after it was written"):
        list(Pipeline(owner, on_error="skip", max_skipped=1.0).loader(2, epochs=1))


def test_the_identity_is_that_of_the_records_in_their_order_or_the_given_one() -> None:
    streams = (number, list(number()), list(number())[::-1])
    own, again, backwards = (sources.iterable(stream, length=4).identity() for stream in streams)
    assert own == again != backwards
    assert len({str(sources.iterable(stream, length=4, id="mine").identity()) for stream in streams}) == 1


def test_the_spool_goes_with_the_source(kept: Path) -> None:
    source = sources.iterable(number, length=4)
    assert kept.stat().st_mode & 0o777 == 0o700 and source[3]["label"] == 3 and list(kept.iterdir())
    sent = pickle.dumps(source)
    another = sources.iterable(lambda: iter(pickle.loads(sent)), length=4)
    assert [record["label"] for record in another] == [0, 1, 2, 3]
    del source, another
    with pytest.raises(PipelineError):
        sources.iterable([{"x": 0}, {"x": {1}}], length=2)
    gc.collect()
    assert not list(kept.iterdir()), "neither a file nor a lock"


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
