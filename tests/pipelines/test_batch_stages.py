"""Stages that compute on batches: a sample is a function of pipeline, epoch and index, to the last bit."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_pipes import LIMIT_S, Feeder, N, data, laid_out, leaves_nothing, together  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples
from torch import nn

from pipelines import Pipeline, PipelineError, SampleError, attach, find_shared_stages, sources
from pipelines.environment.library_settings import find_settings
from pipelines.errors import ForeignRandomness
from pipelines.ipc.child_processes import child_environment
from pipelines.stages import _batched

BAD, KILLS, BUSY_S = 13, 17, 0.2
Rows = dict[tuple[int, int], dict[str, bytes]]


@functools.cache
def network(seed: int = 0) -> nn.Module:
    """Whose last bits depend on the size of a batch; in training mode, on its other samples too."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(21, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Dropout(), nn.Linear(300, 77)
        )


def noisy(batch: dict[str, Any], rngs: list[torch.Generator]) -> dict[str, Any]:
    drawn = torch.stack([torch.randn(77, generator=rng) for rng in rngs])
    return {"label": batch["label"], "image": batch["image"] + drawn, "first": drawn[:, 0]}


def halved(sample: dict[str, Any]) -> dict[str, Any]:
    sample["image"] *= np.float32(0.5)
    return sample


def traced(batch: dict[str, Any]) -> dict[str, Any]:
    """Says in a file, where there is one, which samples were computed."""
    if "TRACE" in os.environ:
        with open(os.environ["TRACE"], "a") as file:
            file.write(f"{sorted(set(batch['label'].tolist()))}\n")
    return {**batch, "double": 2 * batch["label"]}


def refuse_bad(batch: dict[str, Any]) -> dict[str, Any]:
    if BAD in batch["label"]:
        raise ValueError("a bad record")
    return batch


def kill(batch: dict[str, Any]) -> dict[str, Any]:
    """Ends its process: at one record always, or, where there is a marker to be made, once."""
    path = os.environ.get("MARKER")
    if KILLS in batch["label"] and (path is None or not os.path.exists(path)):
        if path is not None:
            open(path, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return batch


def made(on_error: Any = "raise", seed: int = 3) -> Pipeline:
    """Two batch stages among others, of which the second draws; memory orders differ from sample to sample."""
    begun = Pipeline(data(), seed=seed, on_error=on_error, max_skipped=1.0).map(laid_out)
    return begun.map_batches(network(), field="image", batch_size=16).map(halved).map_batches(noisy, batch_size=5)


def still(*functions: Any, on_error: Any = "raise", size: int = 8) -> Pipeline:
    pipeline = Pipeline(data(), seed=3, on_error=on_error, max_skipped=1.0)
    return functools.reduce(lambda mapped, f: mapped.map_batches(f, batch_size=size), functions, pipeline)


def rows(loader: Iterable[Any]) -> Rows:
    """(epoch, index) -> the bytes of each field."""
    return {
        (batch.epoch, index): {name: batch[name][row].numpy().tobytes() for name in batch}
        for batch in loader
        for row, index in enumerate(batch["index"].tolist())
    }


@functools.cache
def one_by_one(epochs: int = 2) -> Rows:
    return rows(made().loader(1, epochs))


def select(epochs: Iterable[int]) -> Rows:
    return {key: row for key, row in one_by_one().items() if key[0] in epochs}


@examples(12)
@given(size=st.integers(1, N + 3), world=st.integers(1, 3), step=st.integers(0, 2), threads=st.integers(1, 2))
def test_a_loader_alone_makes_the_samples_that_it_makes_one_by_one(
    size: int, world: int, step: int, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        read = [rows(made().loader(size, range(1, 2), rank, world, start_step=step)) for rank in range(world)]
    finally:
        torch.set_num_threads(before)
    merged = functools.reduce(lambda one, other: one | other, read)
    assert len(merged) == max(0, N - size * step) == sum(map(len, read))
    assert merged.items() <= one_by_one().items()


@pytest.mark.parametrize(("workers", "rank", "world"), [(2, 0, 1), (1, 1, 3)])
def test_workers_of_a_loader_make_the_same_samples(workers: int, rank: int, world: int) -> None:
    options: dict[str, Any] = {"rank": rank, "world": world, "start_step": 1}
    with_workers = rows(made().loader(9, 2, workers=workers, **options))
    assert with_workers == rows(made().loader(9, 2, **options))
    assert with_workers.items() <= one_by_one().items()


@pytest.mark.parametrize(
    ("workers", "block", "capacity", "cache"),
    [(1, 1, 33, None), (2, 7, 40, "memory"), (3, None, 64, "disk"), (1, None, 512, None)],
)
def test_a_feeder_makes_the_same_samples(
    workers: int, block: int | None, capacity: int, cache: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"workers": workers, "block": block, "capacity": capacity, "cache": cache}
    options["forks"] = workers > 1
    options["cache_dir"] = tmp_path / "cache" if cache == "disk" else None
    for epochs in (range(1), range(1, 2)):  # of the cache on disk, the second is another feeder's
        with Feeder(made(), **options) as feeder:
            loader = attach(feeder.address, made(), 11, epochs, name="a")
            assert rows(loader) == select(epochs)
            assert loader.stats()["private_batches"] == 0


def test_what_members_compute_after_their_common_stages_is_what_they_compute_alone() -> None:
    begun = made().take_stages(2)
    mine, other = begun.map_batches(noisy, batch_size=5), begun.map_batches(noisy, batch_size=6)
    shared = find_shared_stages([mine, other])
    assert len(shared.stages) == 2
    with Feeder(shared, capacity=40, expect=2) as feeder:
        loaders = [attach(feeder.address, pipe, 9, range(1), name=str(n)) for n, pipe in enumerate((mine, other))]
        read = together([functools.partial(rows, loader) for loader in loaders])
    for pipe, taken, loader in zip((mine, other), read, loaders, strict=True):
        assert taken == rows(pipe.loader(4, 1)) and loader.stats()["private_batches"] == 0


def test_draws_depend_on_seed_epoch_and_index() -> None:
    drawn = [row["first"] for row in one_by_one().values()]
    assert len(set(drawn)) == 2 * N
    assert not set(drawn) & {row["first"] for row in rows(made(seed=4).loader(8, 1)).values()}


def test_what_is_not_random_is_computed_once_for_all_epochs(tmp_path: Path, monkeypatch: Any) -> None:
    trace = tmp_path / "trace"
    pipeline = still(traced, size=7)
    _ = pipeline.fields
    monkeypatch.setenv("TRACE", str(trace))
    with Feeder(pipeline, workers=2, forks=True) as feeder:
        assert len(rows(attach(feeder.address, pipeline, 9, range(3), name="a"))) == 3 * N
    assert len(trace.read_text().splitlines()) == -(-N // 7), "blocks of whole batches, each once"


def busy(batch: dict[str, Any]) -> dict[str, Any]:
    until = time.thread_time() + BUSY_S
    while time.thread_time() < until:
        pass
    return batch


def test_cpu_seconds_of_batch_stages_are_told_from_those_of_other_preparation() -> None:
    pipeline = still(busy)
    with Feeder(pipeline, workers=2, forks=True) as feeder:
        rows(attach(feeder.address, pipeline, 8, range(1), name="a"))
        used = feeder.stats()["cpu_s"]
    assert BUSY_S * (N // 8) <= used["batch"] < 1.5 * BUSY_S * -(-N // 8)
    assert 0 < used["prepare"] < used["batch"]
    with Feeder(Pipeline(data())) as feeder:
        assert set(feeder.stats()["cpu_s"]) == {"feed", "prepare"}


def test_auto_is_the_device_that_the_process_which_loads_the_declaration_has_found(monkeypatch: Any) -> None:
    monkeypatch.setattr(_batched, "auto_device", "cuda")  # as where there is a GPU
    settings = find_settings()
    monkeypatch.setattr(_batched, "auto_device", None)
    program = (
        "import json, sys\n"
        "from pipelines.environment.library_settings import apply_settings\n"
        "from pipelines.stages._batched import make_batched\n"
        "apply_settings(json.loads(sys.argv[1]))\n"
        "print(make_batched(len, 8, 'auto').device)"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", program, json.dumps(given)],
            env=child_environment(),
            capture_output=True,
            text=True,
        ).stdout
        for given in (settings, {})
    ]
    assert found == ["cuda\n", "cuda\n" if torch.cuda.is_available() else "cpu\n"]


class Doubler:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "image": self.factor * batch["image"]}


IN_TRAINING = nn.BatchNorm1d(3)
MISTAKES: dict[str, tuple[Any, type[Exception], str]] = {
    "training": (lambda b: {**b, "image": IN_TRAINING(b["image"])}, ForeignRandomness, "batch_size=1"),
    "mean": (lambda b: {**b, "image": b["image"] - b["image"].mean(0)}, ForeignRandomness, "other samples"),
    "place": (lambda b: {**b, "place": torch.arange(8)}, ForeignRandomness, "on its place"),
    "draws": (lambda b: {**b, "image": torch.rand(8)}, ForeignRandomness, "f(batch, rngs)"),
    "one generator": (
        lambda b, rngs: {**b, "draw": torch.rand(8, generator=rngs[0])}, ForeignRandomness, "from this row",
    ),
    "rows": (lambda b: {**b, "image": b["image"][:3]}, SampleError, "Tensor [3, 3, 7] for a batch of 8"),
    "total": (lambda b: {**b, "image": b["image"].sum()}, SampleError, "return a row for each sample"),
    "dtype": (lambda b: {**b, "image": b["image"].bfloat16()}, SampleError, "torch.bfloat16"),
    "nothing": (lambda b: None, SampleError, "it returned None"),
    "tensor": (lambda b: b["image"], SampleError, "not a dict"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_function_of_a_sample_is_refused(name: str) -> None:
    function, error, words = MISTAKES[name]
    with pytest.raises(error) as raised:
        _ = still(function).fields
    assert words in str(raised.value)


def test_arguments_are_checked() -> None:
    for options in ({"batch_size": 0}, {"device": "tpu"}, {"batch_size": 2.5}):
        with pytest.raises(PipelineError):
            Pipeline(data()).map_batches(traced, **options)  # type: ignore[arg-type]
    for call in ("traced", nn.Flatten):
        with pytest.raises(PipelineError):
            Pipeline(data()).map_batches(call)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_the_cpu_and_a_gpu_is_an_error_that_says_so() -> None:
    assert still(traced).fingerprint == Pipeline(data(), seed=3, max_skipped=1.0).map_batches(
        traced, batch_size=8, device="cpu"
    ).fingerprint  # fmt: skip
    with pytest.raises(SampleError, match=r"traced: No CUDA GPUs for device='cuda:1'"):
        _ = Pipeline(data()).map_batches(traced, device="cuda:1").fields


def test_a_network_is_copied_and_is_what_it_was_when_it_was_mapped() -> None:
    mine = nn.Sequential(nn.Flatten(), nn.LayerNorm(21)).train()  # no product, whose last bits depend on the row
    pipeline = Pipeline(data(), seed=3).map_batches(mine, field="image")
    before, fingerprint = rows(pipeline.loader(8, 1)), pipeline.fingerprint
    with torch.no_grad():
        mine[1].weight.add_(1.0)
    assert mine.training and mine[1].weight.requires_grad
    assert rows(pipeline.loader(8, 1)) == before and pipeline.fingerprint == fingerprint
    assert Pipeline(data(), seed=3).map_batches(mine, field="image").fingerprint != fingerprint
    assert not any(batch["image"].requires_grad for batch in pipeline.loader(8, 1))


def print_fingerprints() -> None:
    print(made().fingerprint, still(Doubler(2)).fingerprint)


def test_fingerprints_are_equal_in_other_processes_and_know_code_weights_and_size() -> None:
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_batch_stages as t; t.print_fingerprints()"
    other = subprocess.run(
        [sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    base = Pipeline(data(), seed=3)
    own = [made().fingerprint, still(Doubler(2)).fingerprint]
    assert other.stdout.split() == own, other.stderr
    others = [
        base.map_batches(network(1), field="image", batch_size=8), base.map_batches(network(), field="image"),
        base.map_batches(network(), field="image", batch_size=8), still(Doubler(3)), still(Doubler(2), size=9),
        *(base.map_batches(traced, id="a", batch_size=size) for size in (4, 5)), still(noisy), still(refuse_bad),
    ]  # fmt: skip
    fingerprints = [*own, *(pipeline.fingerprint for pipeline in others)]
    assert None not in fingerprints and len(set(fingerprints)) == len(fingerprints)


@pytest.mark.filterwarnings("ignore:left out")
def test_a_bad_record_costs_only_itself_and_is_named() -> None:
    good = {key: row for key, row in rows(still(traced).loader(8, 1)).items() if key[1] != BAD}
    skipping = still(refuse_bad, traced, on_error="skip")
    assert rows(skipping.loader(9, 1)) == good
    with Feeder(skipping, workers=2, capacity=40, forks=True) as feeder:
        assert rows(attach(feeder.address, skipping, 9, range(1), name="a")) == good
        assert list(feeder.stats()["bad"]) == [BAD]
    with pytest.raises(SampleError, match="refuse_bad: a bad record") as raised:
        list(still(refuse_bad).loader(8, 1))
    assert raised.value.index == BAD


def test_a_worker_that_is_killed_amid_a_batch_changes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    pipeline = still(kill, traced).map(halved)
    with Feeder(pipeline, workers=1, capacity=40, block=8, forks=True) as feeder:
        read = rows(attach(feeder.address, pipeline, 9, range(1), name="a"))
        assert feeder.stats()["restarts"] == 1 and feeder.stats()["poison"] == []
    assert read == rows(still(traced).map(halved).loader(9, 1))


@pytest.mark.filterwarnings("ignore:left out")
def test_the_record_that_ends_whoever_computes_it_is_found_in_its_batch() -> None:
    pipeline = still(kill, traced, on_error="skip")
    with Feeder(pipeline, workers=1, capacity=40, block=8, forks=True) as feeder:
        read = rows(attach(feeder.address, pipeline, 9, range(1), name="a"))
        assert [record["index"] for record in feeder.stats()["poison"]] == [KILLS]
    assert read == {key: row for key, row in rows(still(traced).loader(9, 1)).items() if key[1] != KILLS}


def test_samples_of_several_shapes_and_values_that_are_no_tensors_are_computed_beside_their_like() -> None:
    sizes = [4, 6, 4, 4, 9, 6, 4, 9, 4]

    def vary(sample: dict[str, Any]) -> dict[str, Any]:
        size = sizes[int(sample["label"]) % len(sizes)]
        return {"image": np.full((size, size), sample["label"], np.float32), "name": f"a {size}", "label": 3.5}

    def summed(batch: dict[str, Any]) -> dict[str, Any]:
        assert {f"a {length}" for length in batch["image"].shape[1:]} == set(batch["name"])
        assert batch["label"].dtype == torch.float64
        return {"total": batch["image"].sum((1, 2)), "length": [len(name) for name in batch["name"]]}

    pipeline = Pipeline(sources.arrays(label=np.arange(30)), seed=0).map(vary).map_batches(summed, batch_size=4)
    read = rows(pipeline.loader(30, 1))
    assert read == rows(pipeline.loader(1, 1)) and len(read) == 30
    totals = {index: np.frombuffer(row["total"], np.float32)[0] for (_, index), row in read.items()}
    assert totals == {index: index * sizes[index % len(sizes)] ** 2 for index in range(30)}
