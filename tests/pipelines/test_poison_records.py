"""Records that end, or hang, whoever prepares them: found, named, and the failure of nobody else."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import warnings
from functools import partial
from typing import Any

import psutil
import pytest
from core_pipes import Feeder, gone, leaves_nothing, pipe, record, together, wait_until  # noqa: F401

from pipelines import Pipeline, SampleError, attach, resident
from pipelines.feeder.process import spawn
from pipelines.samples.poison_records import HUNG, KILLED

KILLS, HANGS = 17, 23
TIMEOUT_S = 3.0  # for one sample: more than a busy machine takes for any of the others


def poison(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["label"] == KILLS:
        os.kill(os.getpid(), signal.SIGKILL)
    if sample["label"] == HANGS:
        threading.Event().wait()
    return sample


def bad(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["label"] in (KILLS, HANGS):
        raise ValueError("unreadable")
    return sample


def hangs_and_says_so(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["label"] == HANGS:
        with open(os.environ["MARKER"], "w"):
            threading.Event().wait()
    return sample


def kills_by_chance(sample: dict[str, Any], *, always: bool) -> dict[str, Any]:
    """Its worker is killed at the first try, or at every other one."""
    if sample["label"] == KILLS and sys.argv[0].endswith("worker_main.py"):
        if not os.path.exists(os.environ["MARKER"]):
            with open(os.environ["MARKER"], "w"):
                os.kill(os.getpid(), signal.SIGKILL)
        elif always:
            os.unlink(os.environ["MARKER"])
    return sample


def read(loader: Any) -> list[Any]:
    return [record(batch) for batch in loader]


def made(stage: Any, on_error: Any = "skip") -> Pipeline:
    return Pipeline(pipe("plain").source, seed=3, on_error=on_error, max_skipped=1.0).map(stage, version=1)


@pytest.mark.filterwarnings("ignore:left out")
def test_a_record_that_ends_or_hangs_its_process_is_left_out_for_all_and_named() -> None:
    expected, held = read(made(bad).loader(8, range(3))), {"valid": made(poison)}
    options: dict[str, Any] = {"expect": 2, "prepare_timeout_s": TIMEOUT_S, "resident": held}
    with Feeder(made(poison), workers=2, capacity=24, **options) as feeder:
        first = attach(feeder.address, made(poison), 8, range(3), name="a")
        second = attach(feeder.address, made(poison), 8, range(1), name="b")
        epochs = first.epochs()
        records, other = together([lambda: read(next(epochs)), partial(read, second)])
        assert records == other == expected[: len(other)]
        assert len(resident(feeder.address, "valid", made(poison))) == len(made(bad)) - 2
        poisoned = {(each["set"], each["index"]): each for each in feeder.stats()["poison"]}
        assert set(poisoned) == {(name, index) for name in ("ring", "valid") for index in (KILLS, HANGS)}
        assert all("row" in each["where"] for each in poisoned.values())
        assert "ends every process" in feeder.stats()["bad"][KILLS]
        assert "does not end within prepare_timeout_s" in feeder.stats()["bad"][HANGS]
        assert feeder.stats()["failure"] is None
    # Without the feeder it prepares for itself: it has been told which records not to touch.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for epoch in epochs:
            records += read(epoch)
    assert records == expected
    assert first.stats()["private_batches"] > 0 and first.stats()["skipped"] == 6


def test_a_feeder_knows_from_its_start_and_a_kept_pipeline_says_nothing_of_it() -> None:
    """The file may have been mended when the pipeline is used again."""
    pipeline, reader = made(bad), made(bad)
    pipeline.poison_records.codes[HANGS] = HUNG
    assert pickle.loads(pickle.dumps(pipeline)).poison_records.codes == {}
    feeder = spawn(pipeline, workers=1, capacity=24, poison_records={"ring": {KILLS: KILLED}})
    try:
        attach(feeder.address, reader, 8, range(1)).close()
    finally:
        feeder.stop()
    assert reader.poison_records.codes == {KILLS: KILLED, HANGS: HUNG}
    assert pipeline.poison_records.codes == {HANGS: HUNG}


@pytest.mark.filterwarnings("ignore:left out", "ignore:sample")
def test_such_a_record_is_an_error_that_names_it_where_none_may_be_left_out() -> None:
    pipeline = made(poison, "raise")
    with Feeder(pipeline, workers=2, capacity=24, expect=2, prepare_timeout_s=TIMEOUT_S) as feeder:
        loaders = [attach(feeder.address, pipeline, 8, range(1), name=name) for name in "ab"]

        def read_bad(loader: Any) -> SampleError:
            with pytest.raises(SampleError) as caught:
                read(loader)
            return caught.value

        for error in together([partial(read_bad, loader) for loader in loaders]):
            assert error.index in (KILLS, HANGS) and f"row {error.index}" in error.where
            assert "ends every process" in error.reason or "does not end" in error.reason
        assert feeder.stats()["failure"] is None, "the feeder lives on"


@pytest.mark.parametrize(("always", "epochs"), [(False, 1), (True, 4)], ids=["once", "in each epoch"])
def test_a_record_at_which_a_worker_was_killed_by_chance_is_no_bad_one(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, always: bool, epochs: int
) -> None:
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    pipeline = made(partial(kills_by_chance, always=always))
    with Feeder(pipeline, workers=1, capacity=24) as feeder:
        records = read(attach(feeder.address, pipeline, 8, range(epochs)))
        assert feeder.stats()["restarts"] >= epochs and feeder.stats()["bad"] == {}
        assert feeder.stats()["poison"] == [] and (always or feeder.stats()["restarts"] == 1)
    assert records == read(pipeline.loader(8, range(epochs)))


def test_a_worker_that_hangs_does_not_outlive_a_feeder_that_is_killed(tmp_path: Any, monkeypatch: Any) -> None:
    marker = tmp_path / "marker"
    monkeypatch.setenv("MARKER", str(marker))

    class HangsNow(Exception):
        pass

    def look() -> None:
        if marker.exists():
            raise HangsNow

    process = spawn(made(hangs_and_says_so), capacity=24)
    try:
        with pytest.raises(HangsNow):
            read(attach(process.address, made(hangs_and_says_so), 8, range(1), on_wait=look))
        (worker,) = (child.pid for child in psutil.Process(process.pid).children())
    finally:
        process.kill()
        process.stop()
    wait_until(lambda: gone(worker))
