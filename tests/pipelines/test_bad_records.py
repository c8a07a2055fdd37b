"""Records that cannot be prepared: named by index and file, or left out and counted, for every reader alike.

A grid: every fault of every kind of source (`bad_data.py`), alone and shared, with `on_error` "raise" and "skip".
"""

from __future__ import annotations

import errno
import os
import re
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_data import MAKERS, Case, N
from core_pipes import Feeder, leaves_nothing, record, together, wait_until  # noqa: F401

from pipelines import Pipeline, PipelineError, SampleError, attach, sources, stages
from pipelines.errors import TooManySkipped

READERS = [(4, 0, 1), (7, 0, 2), (7, 1, 2), (N, 0, 1)]  # batch size, rank, world


def made(kind: str, fault: str, path: Path, on_error: Any) -> tuple[Case, Pipeline]:
    (path / "data").mkdir()
    case = MAKERS[kind][0](path / "data", fault)
    return case, case.pipeline(Pipeline(case.source(), seed=5, on_error=on_error, max_skipped=1.0))


def read(loader: Any) -> tuple[list[Any], SampleError | None]:
    """The records of the batches that came, and the error that ended them."""
    records: list[Any] = []
    try:
        records.extend(record(batch) for batch in loader)
    except SampleError as error:
        return records, error
    return records, None


def indices(records: list[Any]) -> list[int]:
    return [index for *_, listed, _ in records for index in listed]


GRID = [
    pytest.param(kind, fault, id=f"{kind}: {fault}") for kind, (_, faults) in MAKERS.items() for fault in faults
]
on_each_fault = pytest.mark.parametrize(("kind", "fault"), GRID)


@on_each_fault
def test_a_bad_record_ends_the_reading_before_its_batch_and_is_named(
    kind: str, fault: str, tmp_path: Path
) -> None:
    case, pipeline = made(kind, fault, tmp_path, "raise")
    places = [int(i) for i in pipeline.order()(0, 0, len(pipeline))]
    first_bad = next(place for place in range(N) if places[place] in case.bad)
    errors: list[SampleError] = []
    for size, rank, world in READERS:
        records, error = read(pipeline.loader(size, 1, rank, world))
        assert not set(indices(records)) & case.bad, "a batch with the bad record was delivered"
        if world == 1:
            assert indices(records) == places[: first_bad // size * size], "all before it was delivered"
            assert error is not None
        errors += [error] if error is not None else []
    assert len(errors) >= 3
    for error in errors:
        assert error.index in case.bad and str(error).startswith(f"sample {error.index} ("), error
        assert case.path in error.where and (len(case.bad) > 1 or error.where == case.file), error
        assert re.search(case.reason, error.reason), error


@on_each_fault
def test_a_bad_record_is_left_out_and_counted(kind: str, fault: str, tmp_path: Path) -> None:
    case, pipeline = made(kind, fault, tmp_path, "skip")
    loaders = [pipeline.loader(size, 2, rank, world) for size, rank, world in READERS]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        by_fours, *by_ranks, whole = ([*map(record, loader)] for loader in loaders)
    texts = [str(warning.message) for warning in caught if "left out" in str(warning.message)]
    assert {int(index) for text in texts for index in re.findall(r"left out: sample (\d+)", text)} == case.bad
    assert any(case.path in text and re.search(case.reason, text) for text in texts)
    assert loaders[0].stats()["skipped"] == loaders[-1].stats()["skipped"] == 2 * len(case.bad)
    good = sorted(set(range(N)) - case.bad)
    for epoch in range(2):
        for records in (by_fours, [*by_ranks[0], *by_ranks[1]], whole):
            assert sorted(indices([r for r in records if r[0] == epoch])) == good
        sizes = {(step, size) for records in by_ranks for e, step, size, *_ in records if e == epoch}
        assert sum(size for _, size in sizes) == len(good), "the ranks know the same global sizes"


SHARED = []  # what is bad is told alike, whatever it is
for number, (kind, fault) in enumerate(param.values for param in GRID):
    is_first = fault == MAKERS[kind][1][0]
    for on_error in ("raise", "skip") if is_first else [("raise", "skip")[number % 2]]:
        marks = () if is_first else pytest.mark.more
        SHARED.append(pytest.param(kind, fault, on_error, id=f"{kind}: {fault}, {on_error}", marks=marks))


@pytest.mark.filterwarnings("ignore:left out")
@pytest.mark.parametrize(("kind", "fault", "on_error"), SHARED)
def test_readers_of_one_stream_see_of_a_bad_record_what_each_sees_alone(
    kind: str, fault: str, on_error: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    case, pipeline = made(kind, fault, tmp_path, on_error)
    expected = [read(pipeline.loader(size, 2, rank, world)) for size, rank, world in READERS]
    recwarn.clear()
    with Feeder(pipeline, capacity=40, expect=3) as feeder:
        attached = partial(attach, feeder.address, pipeline, epochs=range(2))
        loaders = [attached(size, name=f"{size}", rank=rank, world=world) for size, rank, world in READERS]
        shared = together([partial(read, loader) for loader in loaders])
        if on_error == "raise":  # it lives, and says the same to who comes later
            shared.append(read(attached(4, name="later")))
        good = 2 * (N - len(case.bad))
        if on_error == "skip":  # what is left out is neither prepared nor consumed
            wait_until(lambda: feeder.stats()["consumed"] == 3 * good and 2 * feeder.stats()["prepared"] == good)
        stats = feeder.stats()
    assert stats["failure"] is None and stats["restarts"] == 0
    for (records, error), (own_records, own_error) in zip(shared, [*expected, expected[0]], strict=False):
        assert records == own_records and str(error) == str(own_error)
    if on_error == "raise":
        assert set(stats["bad"]) <= case.bad and all(case.path in text for text in stats["bad"].values())
        return
    assert stats["skipped"] == len(case.bad) and set(stats["bad"]) == case.bad, "once for both epochs"
    texts = [str(warning.message) for warning in recwarn if "left out for all" in str(warning.message)]
    assert len(texts) == len(case.bad), "each once"
    for loader in loaders:
        assert loader.stats()["skipped"] == 2 * len(case.bad)
        assert loader.stats()["private_batches"] == 0


def odd_first(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": np.zeros(7)} if sample["label"] == 0 else sample


def numbers(stage: Any, **options: Any) -> Pipeline:
    source = sources.arrays(x=np.zeros((N, 3)), label=np.arange(N))
    return Pipeline(source, **{"on_error": "skip", "max_skipped": 1.0, **options}).map(stage)


@pytest.mark.filterwarnings("ignore:left out")
def test_a_first_record_that_is_the_odd_one_is_an_error_and_not_a_run_on_one_record() -> None:
    pipeline = numbers(odd_first, max_skipped=0.01)
    assert pipeline.fields["x"].shape == (7,), "the first record says what is right"
    with pytest.raises(TooManySkipped):
        read(pipeline.loader(5))


LACKS = (MemoryError("no memory left"), OSError(errno.EMFILE, "Too many open files"))


@pytest.mark.parametrize("lack", LACKS, ids=str)
def test_a_record_is_not_left_out_for_what_the_machine_lacks(lack: Exception) -> None:
    def runs_out(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] == 7:
            raise lack
        return sample

    records, error = read(numbers(runs_out).loader(4))
    assert error is not None and error.index == 7 and len(records) < 6


def kills_its_worker_once(sample: dict[str, Any], *, path: str) -> dict[str, Any]:
    if sample["label"] == 7:
        raise ValueError("a bad record")
    if sample["label"] == 8 and not os.path.exists(path):
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def test_a_record_left_out_is_counted_once_though_its_run_was_prepared_twice(tmp_path: Path) -> None:
    pipeline = numbers(partial(kills_its_worker_once, path=str(tmp_path / "file")), shuffle=False)
    with Feeder(pipeline, capacity=40, block=20) as feeder:
        loader = attach(feeder.address, pipeline, 4, verify=False)  # which would prepare record 8 in this process
        assert len(indices(read(loader)[0])) == N - 1
        assert feeder.stats()["restarts"] == 1
        assert feeder.stats()["skipped"] == loader.stats()["skipped"] == 1


def mistaken(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": {}["colour"]} if int(sample["label"]) == 3 else {"x": sample["x"]}


def test_a_key_error_of_a_stage_is_one_and_what_ends_its_readers_is_not_said_to_be_left_out(recwarn: Any) -> None:
    small = numbers(mistaken, on_error="raise", shuffle=False)
    with pytest.raises(SampleError, match=r"sample 3 .*mistaken: KeyError: 'colour'"):
        list(small.loader(4))
    with Feeder(small, capacity=8) as feeder:
        assert read(attach(feeder.address, small, 4, range(1)))[1] is not None
        assert feeder.stats()["bad"].keys() == {3}
    assert [w for w in recwarn if "left out" in str(w.message)] == []


def test_numpy_integers_and_the_home_directory_are_what_they_are(tmp_path: Path, monkeypatch: Any) -> None:
    two: Any = np.int64(2)
    for stage in (stages.resize("x", two), stages.resize("x", shorter=two), stages.pad("x", two, axis=two)):
        assert not any(isinstance(value, np.generic) for value in vars(stage).values())
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.csv").write_text("x\n1\n2\n")
    assert len(sources.csv("~/a.csv")) == len(sources.csv("~/*.csv")) == 2
    with pytest.raises(PipelineError, match="holds no image"):
        sources.image_folder("~")
