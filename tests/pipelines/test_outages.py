"""Data out of reach for a while are read again with growing pauses; no more records are skipped than allowed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.train.worker import classify
from pipelines import Feeder, Pipeline, SampleError, attach, sources
from pipelines.errors import OutOfReach, TooManySkipped
from pipelines.prepare import transient

N = 40


class Share:
    """A stage that opens a file of a file server, which after its first answers fails for so many requests."""

    def __init__(
        self, answers: Path, failures: int, number: int, bad: tuple[int, ...] = (), first: int = 3
    ) -> None:
        self.answers, self.failures, self.number, self.bad = str(answers), failures, number, bad
        self.first = first

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        sample["x"] *= 2  # in place: what is read again begins anew
        descriptor = os.open(self.answers, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, b".")
        asked = os.fstat(descriptor).st_size
        os.close(descriptor)
        if self.first < asked <= self.first + self.failures or int(sample["label"]) in self.bad:
            raise OSError(self.number, os.strerror(self.number), "/net/share/part-0")
        return sample


def pipeline(stage: Any, **options: Any) -> Pipeline:
    x = np.arange(N, dtype=np.float32)[:, None]
    made = Pipeline(sources.arrays(x=x, label=np.arange(N)), seed=3, **options)
    return made.map(stage, fields={"x": ((1,), "float32"), "label": ((), "int64")})


def rows(loader: Any) -> list[tuple[int, float]]:
    return [
        pair for batch in loader for pair in zip(batch["index"].tolist(), batch["x"][:, 0].tolist(), strict=True)
    ]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made; they take no time."""
    made: list[float] = []
    monkeypatch.setattr(transient.time, "sleep", made.append)
    return made


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_outage_loses_no_record_and_is_said_once(
    number: int, on_error: Any, tmp_path: Path, pauses: list[float]
) -> None:
    with pytest.warns(RuntimeWarning, match="out of reach") as said:
        read = rows(pipeline(Share(tmp_path / "n", 8, number), on_error=on_error).loader(8, epochs=1))
    assert sorted(read) == [(index, 2.0 * index) for index in range(N)]
    assert len(said) == 1
    assert pauses == sorted(pauses) and len(pauses) == 8 and sum(transient.PAUSES_S) < 62


def test_the_workers_of_a_feeder_wait_for_their_data(tmp_path: Path) -> None:
    made = pipeline(Share(tmp_path / "n", 2, errno.ESTALE), on_error="skip", id="share")
    with Feeder(made, workers=1) as feeder:
        read = rows(attach(feeder.address, made, 8, range(1), verify=False))
        stats = feeder.stats()
    assert sorted(read) == [(index, 2.0 * index) for index in range(N)]
    assert stats["skipped"] == 0 and stats["restarts"] == 0


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_outage_that_lasts_is_an_error_after_a_minute_and_no_record_is_left_out(
    on_error: Any, tmp_path: Path, pauses: list[float]
) -> None:
    lasting = pipeline(Share(tmp_path / "n", 10**6, errno.EIO), on_error=on_error, max_skipped=1.0)
    with pytest.warns(RuntimeWarning), pytest.raises(OutOfReach, match=r"Input/output error.*a minute") as raised:
        rows(lasting.loader(8, epochs=1))
    assert pauses == list(transient.PAUSES_S)
    assert classify(raised.value) == ("error", True), "a member is tried again"
    with pytest.warns(RuntimeWarning), pytest.raises(OutOfReach):
        lasting.resident()


def test_a_feeder_leaves_out_nothing_in_an_outage_that_outlasts_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorter = "from pipelines.prepare import transient\ntransient.PAUSES_S = (0.01, 0.01)\n"
    (tmp_path / "sitecustomize.py").write_text(shorter)  # of its workers
    monkeypatch.syspath_prepend(str(tmp_path))
    share = Share(tmp_path / "n", 20, errno.ESTALE, first=16)
    made = pipeline(share, on_error="skip", max_skipped=1.0, id="share")
    with Feeder(made, workers=1) as feeder:
        read = rows(attach(feeder.address, made, 8, range(1), verify=False))
        stats = feeder.stats()
    assert sorted(read) == [(index, 2.0 * index) for index in range(N)]
    assert stats["skipped"] == 0 and stats["restarts"] > 0


def test_another_error_is_not_waited_for(tmp_path: Path, pauses: list[float]) -> None:
    with pytest.raises(SampleError, match="No such file"):
        rows(pipeline(Share(tmp_path / "n", 10**6, errno.ENOENT)).loader(8, epochs=1))
    assert pauses == []


@pytest.mark.filterwarnings("ignore:left out")
@pytest.mark.parametrize(
    ("limit", "bad", "passes"), [(0.01, 1, True), (0.01, 2, False), (3, 3, True), (3, 4, False)]
)
def test_no_more_records_are_skipped_than_is_allowed(limit: float, bad: int, passes: bool, tmp_path: Path) -> None:
    stage = Share(tmp_path / "n", 0, errno.ENOENT, tuple(range(5, 5 + bad)))
    made = pipeline(stage, on_error="skip", max_skipped=limit)
    if passes:
        assert len(rows(made.loader(8, epochs=1))) == N - bad == len(made.resident())
        return
    named = rf"^{bad} records of an epoch of {N} .* at most {bad - 1} .*max_skipped=.*5 \(arrays"
    with pytest.raises(TooManySkipped, match=named):
        rows(made.loader(N, epochs=1))
    with pytest.raises(TooManySkipped, match=named):
        made.resident()


def test_by_default_a_hundredth_is_skipped() -> None:
    assert Pipeline(sources.arrays(x=np.arange(3)), on_error="skip").max_skipped == 0.01
