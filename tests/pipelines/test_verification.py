"""What a reader is served is compared with what its own pipeline prepares."""

from __future__ import annotations

import collections
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_pipes import Feeder
from hypothesis import given
from hypothesis import strategies as st

from pipelines import Pipeline, attach, sources
from pipelines.errors import SamplesDiffer
from pipelines.feeder.process import spawn
from pipelines.ipc import messages
from pipelines.loader.resident import resident
from pipelines.samples.fields import FAILED, GOOD
from pipelines.verification.checker import SampleChecker, ServedSample
from pipelines.verification.compare import CheckResult, compare_arrays, flatten_sample
from pipelines.verification.reader import AT_START, SAMPLES, choose_first, choose_later


def test_a_difference_is_named_by_field_position_and_size() -> None:
    served = {"label": np.int64(3), "x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    own = {"label": np.int64(3), "x": served["x"].copy()}
    assert compare_arrays(_arrays(served), _arrays(own), is_exact=True).kind == "equal"
    own["x"][1, 2] += 0.5
    own["x"][0, 1] += 0.25
    found = compare_arrays(_arrays(served), _arrays(own), is_exact=True)
    assert (found.kind, found.field, found.position, found.size) == ("different", "x", (1, 2), 0.5)
    assert "'x' at [1, 2] is 5.0 where it was prepared, 5.5 here, a difference of 0.5" in found.detail
    one, two = _arrays({"x": 1}), _arrays({"x": 1, "y": 2})
    assert compare_arrays(one, two, is_exact=False).field == "y"
    assert compare_arrays(two, one, is_exact=False).kind == "different"


NAN, RANGE = np.array([np.nan, 1.0]), np.array([0.0, 1000.0])
ROUNDED = [(np.float32(1), np.float32(1 + 1e-6)), (np.uint8([7, 9]), np.uint8([8, 8])), (0.0, -0.0)]
ROUNDED += [(RANGE, np.array([0.005, 1000.0]))]  # of the range, not of the value
ROUNDED += [(NAN, np.array([np.nan, 1 + 1e-7])), (np.complex64(1 + 1j), np.complex64(1 + 1.000001j))]
OTHER = [(np.float32(1), np.float32(1 + 1e-4)), (RANGE, np.array([0.05, 1000.0])), (np.uint8(0), np.uint8(255))]
OTHER += [(np.uint8([7, 9]), np.uint8([7, 7])), (np.bool_(True), np.bool_(False)), (np.nan, 1.0), ("cat", "dog")]
OTHER += [(np.array((1, 2.0), "i4,f4"), np.array((9, 2.0), "i4,f4")), (b"cat", b"dog"), (np.int64(1), np.int32(1))]
OTHER += [(np.datetime64("2026-01-01"), np.datetime64("2027-01-01")), (np.zeros(2), np.zeros(3))]


@pytest.mark.parametrize(
    ("served", "own", "elsewhere"), [(*x, "rounding") for x in ROUNDED] + [(*x, "different") for x in OTHER]
)
def test_rounding_is_allowed_where_processors_or_versions_differ_and_nowhere_else(
    served: Any, own: Any, elsewhere: str
) -> None:
    pair = _arrays({"x": served}), _arrays({"x": own})
    assert compare_arrays(*pair, is_exact=True).kind == "different"
    assert compare_arrays(*pair, is_exact=False).kind == elsewhere
    assert compare_arrays(pair[0], pair[0], is_exact=True).kind == "equal"
    if isinstance(served, str):  # a letter of a kept text is not rounded
        kept = [flatten_sample({"text": text}) for text in ("cat", "bat", "")]
        result = compare_arrays(*kept[:2], is_exact=False)
        assert (result.kind, result.field, result.position) == ("different", "text", (0,))
        assert compare_arrays(kept[2], kept[2], is_exact=False).kind == "equal"


def _arrays(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value) for name, value in fields.items()}


@given(st.integers(1, 10_000), st.integers(1, 40), st.text(max_size=9))
def test_two_positions_at_the_start_then_one_an_epoch_and_in_so_many_samples(
    n: int, epochs: int, name: str
) -> None:
    first = choose_first(name, 0, 0, n)
    assert len(first) == len(set(first)) == min(AT_START, n) and all(0 <= place < n for place in first)
    later = [choose_later(name, epoch, n) for epoch in range(epochs)]
    assert later == [choose_later(name, epoch, n) for epoch in range(epochs)]
    assert len({choose_later(f"member-{i}", 3, 20_000) for i in range(16)}) > 12, "others look elsewhere"
    due = [place for place in later if place is not None]
    assert all(0 <= place < n for place in due)
    assert len(due) == min(epochs, epochs * n // SAMPLES) if n >= SAMPLES else len(due) == epochs * n // SAMPLES


def rows(n: int = 64) -> Any:
    return sources.arrays(x=np.arange(4.0 * n).reshape(n, 4), label=np.arange(n))


def as_served(pipeline: Pipeline, place: int = 0, status: Any = GOOD) -> ServedSample:
    batch = next(iter(pipeline.loader(len(pipeline), 1)))
    columns = {name: batch[name][place].numpy() for name in batch if name != "index"}
    where = {"stages": len(pipeline.stages), "epoch": 0, "place": place, "index": int(batch["index"][place])}
    return ServedSample(**where, status=status, structure=None, columns=columns)


def refuse_odd(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["label"] % 2:
        raise ValueError("odd")
    return sample


def test_skipped_equals_skipped_and_nothing_else() -> None:
    skipping = Pipeline(rows(), shuffle=False, on_error="skip", max_skipped=1.0)
    bad, good = skipping.map(refuse_odd), skipping.map(dict)
    there = as_served(good, 1, status=FAILED)
    assert SampleChecker(bad).check(there).kind == "equal"
    assert SampleChecker(good).check(there).kind == "different"
    result = SampleChecker(bad).check(as_served(good, 1))
    assert result.kind == "different" and "could not be prepared here" in result.detail


def test_a_stage_that_is_unequal_to_itself_is_named() -> None:
    calls = iter(range(10_000))

    def counts(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "x": sample["x"] + max(0, next(calls) - 70)}

    pipeline = Pipeline(rows(), shuffle=False).map(counts, id="counts")
    served = as_served(pipeline)
    last = [SampleChecker(pipeline).check(served) for _ in range(4)][-1]
    assert last.kind == "unstable" and "counts" in last.detail


def complain(sample: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("\U0001f600" * 100_000)


def use_gpu(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": torch.as_tensor(sample["x"]).cuda().cpu().numpy()}


def test_a_stage_that_fails_here_is_a_short_result_and_one_that_needs_a_gpu_or_a_spool_is_left_out() -> None:
    served = as_served(Pipeline(rows(), shuffle=False).map(dict))
    result = SampleChecker(Pipeline(rows(), shuffle=False).map(complain)).check(served)
    message = messages.pack("result", found=result.as_record())
    assert result.kind == "different" and len(message) < messages.MAX_MESSAGE_BYTES
    assert CheckResult.from_record(messages.unpack(message)["found"]) == result
    spooled = Pipeline(sources.iterable([{"x": np.float32(i)} for i in range(8)], length=8))
    assert SampleChecker(spooled).check(as_served(spooled)).kind == "left_out"
    if not torch.cuda.is_available():
        result = SampleChecker(Pipeline(rows(), shuffle=False).map(use_gpu)).check(served)
        assert result.kind == "left_out" and "needs a GPU" in result.detail


def reads(path: Path) -> Any:
    """A stage that opens a file."""
    return lambda sample: {**sample, "x": sample["x"] + float(path.read_text())}


def multiply(sample: dict[str, Any]) -> dict[str, Any]:
    """A stage of which its `id=` says nothing."""
    return {**sample, "x": sample["x"] * float(os.environ.get("LOOK", "1"))}


def looking() -> Pipeline:
    return Pipeline(rows(), seed=0).map(multiply, id="multiply")


def test_an_attacher_in_another_environment_prepares_alone_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOK", "1")
    feeder = spawn(looking(), resident={"valid": looking()})
    try:
        monkeypatch.setenv("LOOK", "2")
        loader = attach(feeder.address, looking(), 16, epochs=range(1), name="me")
        with pytest.warns(UserWarning, match=r"differs from what me prepares, so it works alone: epoch 0.*'x'"):
            batches = [batch["x"].clone() for batch in loader]
        for mine, alone in zip(batches, looking().loader(16, range(1)), strict=True):
            assert torch.equal(mine, alone["x"])
        assert loader.stats()["shared_batches"] == 0
        with pytest.warns(UserWarning, match="the resident set 'valid' differs from what"):
            held = resident(feeder.address, "valid", looking())
        assert next(iter(held.loader(1)))["x"][0, 1] == 2.0
        believing = attach(feeder.address, looking(), 16, epochs=range(1), verify=False)
        assert not torch.equal(next(iter(believing))["x"], batches[0])
    finally:
        feeder.stop()


def test_a_late_difference_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "shift"
    path.write_text("0")
    there = Pipeline(rows(SAMPLES), seed=0).map(reads(path), id="shift")
    here = Pipeline(rows(SAMPLES), seed=0).map(dict, id="shift")
    with Feeder(there, capacity=200) as feeder:
        batches = iter(attach(feeder.address, here, 50, epochs=range(3), name="me"))
        for _ in range(SAMPLES // 50):
            next(batches)
        path.write_text("1")
        with pytest.raises(SamplesDiffer, match=r"position \d+ \(sample \d+\): 'x'.*a difference of 1") as raised:
            collections.deque(batches, maxlen=0)
        assert raised.value.finding.is_late and raised.value.finding.result.field == "x"


def blur(image: Any) -> Any:
    return image + torch.rand(image.shape).numpy() + np.random.random() + random.random()


def test_a_verification_leaves_the_generators_as_they_were() -> None:
    def build() -> Pipeline:
        return Pipeline(rows(), seed=0).map(blur, field="x", random="global", id="blur")

    def draw(loader: Any) -> list[float]:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        drawn = []
        for batch in loader:
            drawn += [torch.rand(()).item(), np.random.random(), random.random(), batch["x"].sum().item()]
        return drawn

    with Feeder(build()) as feeder:
        drawn = draw(attach(feeder.address, build(), 16, epochs=range(2)))
    assert drawn == draw(build().loader(16, range(2)))


def test_a_cache_of_a_file_that_has_changed_is_renewed(tmp_path: Path) -> None:
    path = tmp_path / "shift"
    pipeline = Pipeline(rows(), seed=0).map(reads(path), id="shift, of version 1")

    def check(value: str, renewed: bool) -> None:
        path.write_text(value)
        with Feeder(pipeline, cache="disk", cache_dir=tmp_path / "cache") as feeder:
            assert (feeder.stats()["cache_renewed"] is not None) == renewed
            loader = attach(feeder.address, pipeline, 16, epochs=range(2), verify=False)
            shifts = {v for batch in loader for v in (batch["x"][:, 0] - 4 * batch["label"]).unique().tolist()}
            assert shifts == {float(value)}

    check("1", False)
    check("1", False)  # from the cache
    with pytest.warns(UserWarning, match=r"differ from what the pipeline prepares now.*'x'.*a difference of 1"):
        check("2", True)
