"""Samples are kept from the first epoch on; what is read back is what was kept, or it is prepared again."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import core_pipes as pipes
import numpy as np
import pytest
from core_pipes import Feeder, Job, N, leaves_nothing, pipe  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st

from pipelines import Pipeline, PipelineError, attach, sources
from pipelines.cache import codec, file
from pipelines.cache.file import Cache
from pipelines.ipc.child_processes import child_environment
from pipelines.samples.memory_order import layout_of

MIB = 2**20


def traced(sample: dict[str, Any]) -> dict[str, Any]:
    """Says in a file, where there is one, that a sample was prepared."""
    if "TRACE" in os.environ:
        with open(os.environ["TRACE"], "ab", buffering=0) as file:
            file.write(b"%d\n" % sample["label"])
    return {**sample, "text": "a dog", "number": float("nan") if sample["label"] == 1 else 3, "raw": b"\0" * 40}


def scribbled(sample: dict[str, Any]) -> dict[str, Any]:
    """Writes into what it was given."""
    assert sample.pop("text") == "a dog" and sample.pop("raw") == b"\0" * 40
    sample["number"] = np.float64(sample["number"])
    sample["image"] *= 2
    return {**sample, "label": np.int64(sample["label"])}


def kept_pipe(on_error: Any = "raise", **options: Any) -> Pipeline:
    options = {"seed": 3, "on_error": on_error, "max_skipped": 1.0, **options}
    base = Pipeline(pipes.data(), **options).map(pipes.laid_out).map(traced, version=1)
    return (base.map(pipes.refuse_others) if on_error == "skip" else base).map(pipes.noise).map(scribbled)


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "trace"
    monkeypatch.setenv("TRACE", str(path))
    return path


def prepared(trace: Path) -> int:
    return len(trace.read_text().split()) if trace.exists() else 0


def reading(pipeline: Pipeline, loader: Any = None) -> list[Any]:
    job = Job(epochs=(0, 3), spoil=loader is not None)
    return pipes.read(loader or pipeline.loader(8, range(3)), job)


@pytest.mark.parametrize(("where", "workers"), [("memory", 1), ("disk", 2)])
def test_later_epochs_prepare_nothing_that_is_kept(where: Any, workers: int, trace: Path, tmp_path: Path) -> None:
    pipeline = kept_pipe()
    expected = reading(pipeline)
    trace.unlink()
    options: dict[str, Any] = {"cache_dir": tmp_path / "cache"} if where == "disk" else {}
    with Feeder(pipeline, workers=workers, capacity=32, cache=where, cache_bytes=MIB, **options) as feeder:
        probes = prepared(trace)
        assert reading(pipeline, attach(feeder.address, pipeline, 8, range(3))) == expected
    stats = feeder.stats()["cache"]
    assert prepared(trace) - probes == 3 * N - stats["hits"], "what is kept is not prepared"
    # Two may prepare a sample that the epochs' seam has twice in the ring at the same time, and keep it twice.
    assert stats["samples"] >= N and stats["hits"] >= 2 * N - 32 * (workers - 1) and stats["wrong"] == 0
    assert (stats["samples"], stats["hits"]) == (N, 2 * N) or workers == 2
    assert N * 84 < stats["bytes"] <= stats["limit"] == MIB


def test_a_disk_keeps_samples_for_the_next_feeder(trace: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache": "disk", "cache_dir": tmp_path / "cache"}
    expected = reading(kept_pipe())
    for turn in range(2):
        pipeline = kept_pipe()
        with Feeder(pipeline, **options) as feeder:
            before = prepared(trace)
            assert reading(pipeline, attach(feeder.address, pipeline, 8, range(3))) == expected
        assert prepared(trace) - before == (0 if turn else N)
        assert feeder.stats()["cache"]["samples"] == N
    another = Pipeline(pipes.data()).map(traced, version=1).map(pipes.noise).map(scribbled)
    # Another seed sees the same decoded samples; another stage does not.
    for other, new in ((kept_pipe(seed=9), 0), (another, N)):
        with Feeder(other, **options) as feeder:
            before = prepared(trace)
            list(attach(feeder.address, feeder.pipeline, 8, range(1)))
        assert prepared(trace) - before == new


@pytest.mark.filterwarnings("ignore:left out")
def test_bad_records_are_bad_in_every_epoch_and_never_kept() -> None:
    pipeline = kept_pipe("skip")
    expected = reading(pipeline)
    with Feeder(pipeline, capacity=32, cache="memory", cache_bytes=MIB) as feeder:
        assert reading(pipeline, attach(feeder.address, pipeline, 8, range(3))) == expected
        bad = sorted(feeder.stats()["bad"])
    assert bad == [7, 17, 27, 37, 47, 57] and feeder.stats()["cache"]["samples"] == N - 6


def test_members_with_ends_of_their_own_share_what_is_kept() -> None:
    jobs = [Job(kind="ended numpy", epochs=(0, 3), name="one"), Job(kind="ended", epochs=(0, 3), name="two")]
    with Feeder(pipe("begun"), expect=2, capacity=32, cache="memory", cache_bytes=MIB) as feeder:
        results = pipes.together([partial(pipes.shared, job, feeder.address) for job in jobs])
    assert [codec for codec, _ in results] == [pipes.alone(dataclasses.replace(job, name="")) for job in jobs]
    assert feeder.stats()["cache"]["hits"] >= 2 * 50


def test_too_little_room_is_said_when_the_first_samples_are_known() -> None:
    images = np.random.default_rng(0).integers(0, 255, (60, 300_000), np.uint8)
    pipeline = Pipeline(sources.arrays(image=images), seed=4).map(dict)
    words, expected = r"room for about \d+% of the samples: all need about \d+ MiB", reading(pipeline)
    with pytest.warns(UserWarning, match=words), Feeder(pipeline, cache="memory", cache_bytes=12 * MIB) as feeder:
        assert reading(pipeline, attach(feeder.address, pipeline, 8, range(3))) == expected
    kept = feeder.stats()["cache"]
    assert kept["samples"] < 60 and kept["bytes"] <= 12 * MIB < kept["expected_bytes"]


def sample(index: int) -> dict[str, Any]:
    image = np.full((3, 40, 30), index, np.uint8).transpose(0, 2, 1)
    return {"image": image, "label": np.int64(index), "key": "x"}


@pytest.fixture
def fd(tmp_path: Path) -> Any:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    file.initialize(fd, 100)
    yield fd
    os.close(fd)


HALF = f"""
import os, sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from test_cache import Cache, sample
def half(fd, buffers, offset):
    os.pwrite(fd, b"".join(bytes(b) for b in buffers)[:1000], offset)
    os._exit(9)
mine = Cache(int(sys.argv[1]), 100, 1, 10**6)
mine.put(1, sample(1))
os.pwritev = half
mine.put(2, sample(2))
"""


def test_a_record_that_was_not_finished_is_not_in_the_index(fd: int) -> None:
    """The child dies with the bytes half written, between two of the calls that `put` makes."""
    command = [sys.executable, "-c", HALF, str(fd)]
    assert subprocess.run(command, pass_fds=(fd,), env=child_environment(), timeout=300).returncode == 9
    mine = Cache(fd, 100, 1, 10**6)
    assert mine.get(2) is None and mine.wrong == 0
    assert (mine.get(1)["image"] == 1).all()
    mine.put(2, sample(2))
    assert mine.get(2) is not None and mine.get(1) is not None, "the dead one's stretch is nobody's"


@pytest.mark.parametrize("place", [0, 4, 10, 20, 30, 45, 60, 300, -1])
def test_a_wrong_byte_is_noticed_wherever_it_is(fd: int, place: int) -> None:
    mine, size = Cache(fd, 100, 1, 10**6), sum(len(bytes(b)) for b in codec.encode(5, sample(5)))
    mine.put(5, sample(5))
    offset = file.records_offset(100) + place % size
    os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 1]), offset)
    assert [mine.get(5), mine.wrong, mine.get(5), mine.wrong] == [None, 1] * 2, "it is looked for once"
    mine.put(5, sample(5))
    assert mine.get(5) is not None


def test_a_truncated_file_has_what_is_left_of_it_and_another_samples_record_is_not_taken(fd: int) -> None:
    mine = Cache(fd, 100, 1, 10**6)
    for index in range(20):
        mine.put(index, sample(index))
    os.ftruncate(fd, file.records_offset(100) + 20_000)
    whole = [index for index in range(20) if mine.get(index) is not None]
    assert whole == list(range(len(whole))) and 3 < len(whole) < 10 and mine.wrong == 20 - len(whole)
    os.pwrite(fd, os.pread(fd, 8, 4096 + 8 * 2), 4096 + 8 * 50)
    assert mine.get(50) is None and mine.wrong == 21 - len(whole) and mine.get(2) is not None
    os.ftruncate(fd, 10)
    assert mine.get(0) is None


def test_the_limit_is_kept_to_by_all_writers_together(fd: int) -> None:
    limit = file.records_offset(100) + 50_000
    writers = [Cache(fd, 100, 1, limit) for _ in range(3)]
    for index in range(100):
        writers[index % 3].put(index, sample(index))
    added = sum(writer.added for writer in writers)
    assert 8 <= added <= 13 and file.count_used_bytes(fd) <= limit
    assert os.fstat(fd).st_size <= limit and file.count_samples(fd, 100) == added
    assert sum(writers[0].get(index) is not None for index in range(100)) == added


VALUES = st.one_of(
    st.binary(max_size=20), st.text(max_size=9), st.none(), st.booleans(), st.integers(), st.floats(),
    st.sampled_from([np.float32(1.5), np.int8(3), np.bool_(True), np.array(3.5), np.zeros((0, 3))]),
    st.permutations(range(3)).map(lambda p: np.arange(24, dtype=np.int16).reshape(2, 3, 4).transpose(p)),
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=5))
def test_a_record_gives_back_exactly_what_it_was_given(given: dict[str, Any]) -> None:
    given = {name: value.copy("K") if isinstance(value, np.ndarray) else value for name, value in given.items()}
    with tempfile.TemporaryFile(buffering=0) as file:
        buffers = codec.encode(3, given)
        assert not isinstance(buffers, str)
        os.pwritev(file.fileno(), buffers, 77)
        got = codec.read_record(file.fileno(), 77, 3, 10**6)
    assert list(got) == list(given)
    for name, value in given.items():
        assert type(got[name]) is type(value)
        if isinstance(value, np.ndarray | np.generic):
            assert got[name].dtype == value.dtype and layout_of(got[name]) == layout_of(value)
            assert np.array_equal(got[name], value)
            assert not isinstance(value, np.ndarray) or got[name].flags.writeable
        else:
            assert repr(got[name]) == repr(value)


def as_set(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "label": {1}}


def without_label(sample: dict[str, Any]) -> dict[str, Any]:
    return {"image": sample["image"]}


NAMELESS = r"recognize .*: .*nameless reads the environment.*cache='memory'"
WITH_SET = pipe("plain").map(as_set).map(pipes.noise).map(without_label)
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (kept_pipe(), {"cache": "ram"}, "cache must be 'memory', 'disk' or None, got 'ram'"),
    (kept_pipe(), {"cache_bytes": 0}, "cache_bytes must be at least 1, got 0"),
    (kept_pipe(), {"cache_bytes": 100}, "cache_bytes must be above 8192 for 61 samples"),
    (kept_pipe(), {"cache_bytes": 1 << 60}, "MiB are free"),
    (kept_pipe(), {"cache": "disk"}, "needs cache_dir="),
    (kept_pipe(), {"cache_dir": "x"}, "cache_dir= is for cache='disk'"),
    (pipe("plain").map(pipes.nameless).map(pipes.noise), {"cache": "disk", "cache_dir": "x"}, NAMELESS),
    (pipe("numpy"), {}, "nothing of .* can be cached: its first stage, noise, is random"),
    (pipe("plain"), {}, "nothing of .* can be cached: it has no stages"),
    (WITH_SET, {}, "nothing of .* can be cached: after as_set the field 'label' is builtins.set"),
]


@pytest.mark.parametrize(("pipeline", "options", "words"), WRONG)
def test_what_cannot_be_meant_or_has_nothing_to_keep_is_refused(
    pipeline: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(PipelineError, match=words):
        Feeder(pipeline, **{"cache": "memory", **options})


def test_an_earlier_stage_is_kept_where_the_last_cannot_be() -> None:
    pipeline = pipe("plain").map(pipes.laid_out).map(as_set).map(pipes.noise).map(without_label)
    with pytest.warns(UserWarning, match="the cache keeps samples up to laid_out: after as_set"):
        feeder = Feeder(pipeline, cache="memory")
    with feeder:
        assert len(list(attach(feeder.address, pipeline, 8, range(2)))) == 16
    assert feeder.stats()["cache"]["hits"] == N


def test_a_file_that_is_no_cache_is_replaced_and_a_directory_of_somebody_else_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache": "disk", "cache_dir": tmp_path / "cache"}
    for damage in (b"\0" * 9000, json.dumps({"pipelines": "cache", "v": 0}).encode(), b"at its end"):
        with Feeder(kept_pipe(), **options) as feeder:
            list(attach(feeder.address, kept_pipe(), 8, range(1)))
        assert feeder.stats()["cache"]["samples"] == N
        (own,) = (tmp_path / "cache").glob("[0-9a-f]*[0-9a-f]")
        assert own.stat().st_mode & 0o777 == 0o700 and (own / "samples").stat().st_mode & 0o777 == 0o600
        (own / "samples").write_bytes(damage)
    for mode, user in ((0o755, -1), (0o700, 12345)):
        own.chmod(mode)
        if user < 0 or os.geteuid() == 0:
            os.chown(own, user, -1)
            with pytest.raises(PipelineError, match="not a directory of yours alone"):
                Feeder(kept_pipe(), **options)
