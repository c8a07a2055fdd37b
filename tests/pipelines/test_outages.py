"""Data out of reach for a while are read again with growing pauses; no more records are skipped than allowed."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import Feeder, Pipeline, attach, resident, sources
from pipelines.errors import DataOutOfReach, TooManySkipped
from pipelines.loader.resident import StreamedSet
from pipelines.prepare import transient

N = 40
ON_SHARE = range(20, 30)


class Share:
    """A stage that opens a file of a file server, which answers with an error for its first so many requests, but
    those of the process `reached_by`.
    """

    bad: tuple[int, ...] = ()
    pauses_s: tuple[float, ...] | None = None
    reached_by: int | None = None

    def __init__(self, answers: Path, failures: int, number: int, **other: Any) -> None:
        self.answers, self.failures, self.number = str(answers), failures, number
        vars(self).update(other)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if self.pauses_s is not None:  # of whichever process this is
            transient.PAUSES_S = self.pauses_s
        sample["x"] *= 2  # in place: what is read again begins anew
        if int(sample["label"]) in ON_SHARE:
            with open(self.answers, "ab", buffering=0) as file:
                file.write(b".")
                asked = os.fstat(file.fileno()).st_size
            if asked <= self.failures and os.getpid() != self.reached_by:
                raise OSError(self.number, os.strerror(self.number), "/net/share/part-0")
        if int(sample["label"]) in self.bad:
            raise OSError(self.number, os.strerror(self.number), "/data/part-0")
        return sample


def to_float64(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": sample["x"].astype(np.float64)}


def pipeline(stage: Any, **options: Any) -> Pipeline:
    x = np.arange(N, dtype=np.float32)[:, None]
    made = Pipeline(sources.arrays(x=x, label=np.arange(N)), seed=3, **options)
    return made.map(stage, fields={"x": ((1,), "float32"), "label": ((), "int64")})


def rows(loader: Any) -> list[tuple[int, float]]:
    return [(int(i), float(x)) for batch in loader for i, x in zip(batch["index"], batch["x"][:, 0], strict=True)]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made; they take no time."""
    made: list[float] = []
    monkeypatch.setattr(transient.time, "sleep", made.append)
    return made


@pytest.mark.parametrize(
    ("number", "on_error"), [(errno.EIO, "raise"), (errno.ESTALE, "skip"), (errno.ETIMEDOUT, "skip")]
)
def test_an_outage_loses_no_record_and_is_said_once(
    number: int, on_error: Any, tmp_path: Path, pauses: list[float]
) -> None:
    with pytest.warns(RuntimeWarning, match="out of reach") as warned:
        read = rows(pipeline(Share(tmp_path / "n", 8, number), on_error=on_error).loader(8, epochs=1))
    assert sorted(read) == [(index, 2.0 * index) for index in range(N)]
    assert len(warned) == 1
    assert pauses == sorted(pauses) and len(pauses) == 8 and sum(transient.PAUSES_S) < 62


def test_the_workers_of_a_feeder_wait_for_their_data(tmp_path: Path) -> None:
    made = pipeline(Share(tmp_path / "n", 2, errno.ESTALE), on_error="skip", id="share")
    with Feeder(made, workers=1) as feeder:
        read = rows(attach(feeder.address, made, 8, range(1), verify=False))
        stats = feeder.stats()
    assert sorted(read) == [(index, 2.0 * index) for index in range(N)]
    assert stats["skipped"] == 0 and stats["restarts"] == 0


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_outage_that_lasts_is_an_error_of_its_own_and_loses_no_record(
    on_error: Any, tmp_path: Path, pauses: list[float]
) -> None:
    made = pipeline(Share(tmp_path / "n", 10**6, errno.EIO), on_error=on_error, max_skipped=1.0)
    loader, words = made.loader(8, epochs=1), r"EIO.*although it was tried again for .* seconds"
    with pytest.warns(RuntimeWarning) as caught, pytest.raises(DataOutOfReach, match=words):
        rows(loader)
    assert pauses == list(transient.PAUSES_S) and len(caught) == 1, "no record was left out"
    for use in (made.resident, lambda: rows(StreamedSet(made).loader(8))):
        with pytest.raises(DataOutOfReach):
            use()
    assert loader.stats()["skipped"] == 0


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("way", ["workers", "feeder", "feeder's prefix", "resident set"])
def test_what_a_process_of_its_own_could_not_reach_is_read_by_the_reader(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transient, "PAUSES_S", (0.0,))

    def read(reached_by: int | None) -> list[tuple[int, float]]:
        share = Share(tmp_path / "n", 10**6, errno.ESTALE, pauses_s=(0.0,), reached_by=reached_by)
        fed = pipeline(share, on_error="skip", max_skipped=1.0, id="share")
        if way == "workers":
            return rows(fed.loader(8, epochs=1, workers=1))
        with Feeder(fed, workers=1, resident={"valid": fed} if way == "resident set" else None) as feeder:
            if way == "resident set":
                return rows(resident(feeder.address, "valid", fed, verify=False).loader(8))
            made = fed.map(to_float64) if way == "feeder's prefix" else fed
            read = rows(attach(feeder.address, made, 8, range(1), verify=False))
            assert feeder.stats()["skipped"] == feeder.stats()["restarts"] == 0
            return read

    assert sorted(read(os.getpid())) == [(index, 2.0 * index) for index in range(N)]
    with pytest.raises(DataOutOfReach, match="Stale file handle"):
        read(None)


@pytest.mark.filterwarnings("ignore:left out")
@pytest.mark.parametrize(
    ("limit", "bad", "passes"), [(None, 1, True), (0.01, 2, False), (3, 3, True), (3, 4, False)]
)
def test_no_more_records_are_skipped_than_is_allowed_nor_is_another_error_waited_for(
    limit: Any, bad: int, passes: bool, tmp_path: Path, pauses: list[float]
) -> None:
    stage = Share(tmp_path / "n", 0, errno.ENOENT, bad=tuple(range(5, 5 + bad)))
    options = {"max_skipped": limit} if limit is not None else {}  # by default a hundredth, also in a copy
    made = pickle.loads(pickle.dumps(pipeline(stage, on_error="skip", **options)))
    assert made.max_skipped == (limit or 0.01)
    words = rf"^{bad} of the {N} records of an epoch .* at most {bad - 1} .*max_skipped=.*5 \(arrays"
    for use in (made.resident, lambda: rows(made.loader(N, epochs=1))):
        with contextlib.nullcontext() if passes else pytest.raises(TooManySkipped, match=words):
            assert len(use()) == N - bad
    assert pauses == []
