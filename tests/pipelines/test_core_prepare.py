"""From record to memory: stages, their randomness, their mistakes, their identity, the way to workers."""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_pipes import leaves_nothing, noise, pipe, record  # noqa: F401

from pipelines import Pipeline, PipelineError, SampleError, sources
from pipelines.ipc import memory_pickle
from pipelines.ipc.child_processes import child_environment
from pipelines.prepare.preparer import Preparer
from pipelines.samples.fields import Field
from pipelines.samples.poison_records import KILLED
from pipelines.sources._arrays import Arrays


def records(n: int = 8) -> Any:
    return sources.arrays(x=np.arange(n, dtype=np.float32), y=np.arange(n))


def first(pipeline: Pipeline) -> Any:
    return next(iter(pipeline.loader(len(pipeline))))


def whatever(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["y"] == 5:
        raise RuntimeError("too green")
    return sample


def test_what_a_stage_raises_is_the_same_alone_in_a_resident_set_and_pickled() -> None:
    said = r"sample 5 \(arrays\(x, y\):row 5\): whatever: too green"
    for use in (first, Pipeline.resident):
        with pytest.raises(SampleError, match=said) as caught:
            use(Pipeline(records()).map(whatever))
        copied = pickle.loads(pickle.dumps(caught.value))
        assert str(copied) == str(caught.value)
        assert (copied.index, copied.where, copied.reason) == (5, "arrays(x, y):row 5", "whatever: too green")


UNFIT: list[tuple[Any, str]] = [
    ({"caption": "a dog"}, r"'caption' is str, which a batch cannot.*stages.drop\('caption'\)"),
    ({"x": torch.zeros(2, dtype=torch.bfloat16)}, "'x' is torch.bfloat16, which a batch"),
    ({"x": np.zeros(2, ">f4")}, "'x' is >f4, which a batch cannot"),
    ({"x": np.longdouble(1)}, "'x' is float128, which a batch cannot|'x' is float64"),
    ({"index": 1}, r"'index' is taken.*stages.rename\(index="),
    ({}, "no fields"),
]


@pytest.mark.parametrize(("fields", "words"), UNFIT, ids=str)
def test_what_cannot_stand_in_a_batch_is_said_before_the_first_one(fields: Any, words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        first(Pipeline(records()).map(lambda sample: {**sample, **fields} if fields else {}))


def test_a_torch_stage_gives_the_same_bits_however_many_threads_the_training_process_uses() -> None:
    values = np.random.default_rng(0).standard_normal((2, 1_000_000), dtype=np.float32)
    pipeline = Pipeline(sources.arrays(x=values), shuffle=False)
    pipeline = pipeline.map(lambda image: torch.from_numpy(image).sum(0), field="x")
    before, sums = torch.get_num_threads(), set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            sums.add(first(pipeline)["x"].numpy().tobytes())
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert len(sums) == 1


def moved(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"draw": rng.random()}


def padded(sample: dict[str, Any], rng: object = None) -> dict[str, Any]:
    assert rng is None
    return sample


def test_the_same_stage_twice_draws_twice_and_an_rng_can_be_declared_no_randomness() -> None:
    once, twice = Pipeline(records()).map(moved), Pipeline(records()).map(lambda s: s).map(moved)
    assert not np.array_equal(first(once)["draw"], first(twice)["draw"])
    assert Pipeline(records()).map(padded).random_stage is not None
    still = Pipeline(records()).map(padded, random=False)
    assert still.random_stage is None and len(still.resident()) == 8


def test_a_large_image_is_stored_alike_however_it_lies_in_memory() -> None:
    for dtype in ("uint8", "float32", "int64", "bool", "float16"):
        lying = np.random.default_rng(0).integers(0, 2, (80, 90, 3)).astype(dtype).transpose(2, 0, 1)
        columns = {"index": np.zeros(1, np.int64), "image": np.zeros((1, 3, 80, 90), dtype)}
        pipeline = Pipeline(records(1)).map(lambda s, image=lying: {"image": image}, random=False)
        Preparer(pipeline).fill(columns, 0, 0, 0, 1)
        assert np.array_equal(columns["image"][0], lying)


def scaled(sample: dict[str, Any], by: float = 2.0) -> dict[str, Any]:
    return {**sample, "x": sample["x"] * by}


def test_whatever_changes_the_samples_changes_the_fingerprint() -> None:
    plain, partial = Pipeline(records()), functools.partial
    made = [plain, Pipeline(records(7)), Pipeline(records(), seed=1), Pipeline(records(), shuffle=False)]
    made += [Pipeline(records(), on_error="skip", max_skipped=1.0), Pipeline(records(), id="other")]
    made += [plain.map(scaled), plain.map(partial(scaled, by=3.0)), plain.map(partial(scaled, by=3))]
    made += [plain.map(scaled).map(scaled), plain.map(moved), plain.map(moved, random="torch")]
    made += [plain.map(scaled, id="mine")]
    prints = [p.fingerprint for p in made]
    assert None not in prints and len(set(prints)) == len(made)


def reads(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "n": len(os.environ)}


def holds(sample: dict[str, Any], lock: object = threading.Lock()) -> dict[str, Any]:
    return sample


def test_what_has_no_sure_identity_says_what_to_do() -> None:
    for stage, why in ((reads, "the environment of the process (os.environ)"), (holds, "an object of _thread")):
        unsure = Pipeline(records()).map(stage)
        assert unsure.fingerprint is None and why in str(unsure.why_unsure)
        assert "give id= or version= to map()" in str(unsure.why_unsure)
        given: list[dict[str, Any]] = [{"id": "s"}, {"version": 1}, {"version": 2}]
        sure = {Pipeline(records()).map(stage, **options).fingerprint for options in given}
        assert None not in sure and len(sure) == 3
    other = Pipeline(records()).map(lambda sample: {**sample, "n": len(os.environ) + 1}, version=1)
    assert other.fingerprint != Pipeline(records()).map(reads, version=1).fingerprint, "its code is compared still"


def test_the_fingerprint_is_the_same_in_another_process_and_under_another_hash_seed() -> None:
    code = "from core_pipes import pipe; print(*(pipe(k).fingerprint for k in ('torch', 'skip')))"
    env = {**child_environment(), "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=env, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert said.stdout.split() == [pipe("torch").fingerprint, pipe("skip").fingerprint], said.stderr


def test_a_seed_may_be_any_integer_and_declared_fields_prepare_nothing() -> None:
    assert Pipeline(records(), seed=np.int64(3)).fingerprint == Pipeline(records(), seed=3).fingerprint
    with pytest.raises(PipelineError, match=r"seed must be an integer, got 1\.5"):
        Pipeline(records(), seed=1.5)  # type: ignore[arg-type]
    declared = Pipeline(records()).map(padded, fields={"x": ((), "float32")})
    assert declared.fields == {"x": Field((), "float32")}


def copies_by_workers(value: Any, count: int = 1) -> list[Any]:
    """What as many workers are given."""
    fd = memory_pickle.dump(value)
    try:
        return [memory_pickle.load(fd) for _ in range(count)]
    finally:
        os.close(fd)


def test_a_cached_function_of_a_module_that_is_not_importable_is_passed_by_value() -> None:
    module = types.ModuleType("nowhere")
    exec("import functools\n@functools.lru_cache(3)\ndef double(n):\n    return 2 * n\n", vars(module))
    sys.modules["nowhere"] = module
    try:
        assert copies_by_workers(module.double) == [module.double]
    finally:
        del sys.modules["nowhere"]
    double = copies_by_workers({"x": module.double})[0]["x"]
    assert double(4) == 8 and double.cache_parameters()["maxsize"] == 3


def test_big_arrays_are_mapped_not_copied_and_writable_for_their_reader_alone() -> None:
    mine, other = (held["big"] for held in copies_by_workers({"big": np.zeros(4 << 20), "small": [1, 2]}, 2))
    assert not mine.flags.owndata and not mine.any()
    mine[0] = 5
    assert other[0] == 0


class Doubled(Arrays):
    """A user's source: the arrays, with other records."""

    def _read(self, index: int) -> dict[str, Any]:
        return {name: 2 * value for name, value in super()._read(index).items()}


class Halved(Arrays):
    def __getitem__(self, index: Any) -> Any:
        return {name: value // 2 for name, value in super().__getitem__(index).items()}


def copies(source: Any) -> bool:
    """Whether records of the source are copied many at once; with the bits of records read one by one."""
    pipeline, contents = Pipeline(source, seed=3), []
    preparers = Preparer(pipeline), Preparer(pipeline)
    preparers[1].copies_rows = False
    for preparer in preparers:
        columns = {name: np.zeros((5, *shape), dtype) for name, (shape, dtype) in pipeline.fields.items()}
        columns |= {"index": np.zeros(5, np.int64), "_ok": np.zeros(5, np.uint8)}
        preparer.fill(columns, 3, 1, 1, 5)  # to the end of the columns, and on from their start
        contents.append({name: column.tobytes() for name, column in columns.items()})
    assert contents[0] == contents[1]
    return preparers[0].copies_rows


def test_records_in_memory_are_copied_many_at_once_with_the_same_bits(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(20, 3, 2)).astype(np.float32)
    x[4] = np.nan
    half, label = x.astype(np.float16)[:, ::-1], np.arange(20)
    plain = sources.arrays(x=x, half=half, label=label, flag=label % 2 == 0)
    file, of_users = np.memmap(tmp_path / "x", np.float32, "w+", shape=(20, 2)), Doubled({"x": x}, None)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(x))
    mapped, fortran = (sources.memmap(x=tmp_path / f"{name}.npy") for name in ("x", "fortran"))
    at_once = [plain, plain.split(0.5, seed=1)[0], plain.take(7), fortran, mapped]
    at_once += [pickle.loads(pickle.dumps(sources.arrays(x=file))), sources.arrays(x=[np.arange(2)] * 20)]
    # Of the memmap itself nobody can tell whether the file is cut short: the record that kills is to be known.
    one_by_one = [of_users, of_users.take(9), sources.arrays(x=file), sources.arrays(x=x.astype(">f4"))]
    assert [*map(copies, at_once), *map(copies, one_by_one)] == [True] * 7 + [False] * 4
    assert not copies(Halved({"x": label}, None))
    with open(tmp_path / "x.npy", "r+b") as cut:
        cut.truncate(200)
    assert not mapped.copy_records(np.arange(2), {"x": np.empty((2, 3, 2), np.float32)})
    assert not Preparer(Pipeline(records()).map(whatever)).copies_rows
    pipeline = Pipeline(records())
    preparer = Preparer(pipeline)
    pipeline.poison_records.codes[2] = KILLED
    columns = {"x": np.zeros(8, np.float32), "y": np.zeros(8, np.int64), "index": np.zeros(8, np.int64)}
    with pytest.raises(SampleError):
        preparer.fill(columns, 0, 0, 0, 8)


def test_what_a_reader_writes_into_its_batches_is_in_no_later_one() -> None:
    """Rows of several batches are copied at once; a loader may be set back within them."""
    data = np.arange(40, dtype=np.float32)
    loader = Pipeline(sources.arrays(x=data), seed=1).loader(4, epochs=1)
    state, indices = loader.state_dict(), list[int]()
    for _ in range(2):
        loader.load_state_dict(state)
        for batch in loader:
            assert torch.equal(batch["x"], torch.from_numpy(data[batch["index"]]))
            indices += batch["index"].tolist()
            batch["x"].fill_(-1.0)
            batch["index"].fill_(-1)
    assert indices[:40] == indices[40:] and sorted(indices[:40]) == list(range(40))


def test_torch_is_not_read_while_another_thread_is_importing_it(tmp_path: Path) -> None:
    """As by two loaders in threads, of which one imports torch: its generator is there before it can be read."""
    code = "import sys, time; default_generator = 'too early'; sys.began.set(); "
    (tmp_path / "torch.py").write_text(code + "time.sleep(0.2); default_generator = 1")
    reading = "import sys, threading; from pipelines.prepare.generators import TORCH, find_global; "
    reading += "sys.began = threading.Event(); threading.Thread(target=__import__, args=('torch',)).start(); "
    reading += "sys.began.wait(); print(find_global()[TORCH])"
    environment = child_environment() | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    assert subprocess.check_output([sys.executable, "-c", reading], env=environment, text=True) == "1\n"
