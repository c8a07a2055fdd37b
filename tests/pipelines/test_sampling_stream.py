"""Sampled pipelines through real feeders: shared, resumed, late, on several nodes, with bad records, in parts."""

from __future__ import annotations

import os
import signal
import warnings
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_pipes import leaves_nothing, noise, record, together, wait_until  # noqa: F401

from pipelines import (
    Feeder,
    Peers,
    Pipeline,
    PipelineError,
    attach,
    find_shared_stages,
    sampling,
    sources,
)
from pipelines import weights as sample_weights

N, POSITIONS = 40, 61
LABELS = np.where(np.arange(N) < 4, 1, 0)
KINDS = ("balanced", "weighted", "subset")


def made_sampling(kind: str) -> Any:
    if kind == "balanced":
        return sampling.balanced("kind", samples=POSITIONS)
    weights = 1.0 + 20 * LABELS
    if kind == "weighted":
        return sampling.weighted(weights, samples=POSITIONS)
    return sampling.weighted(weights, samples=23, replacement=False)


def dropped(image: Any) -> Any:
    import torch

    return torch.from_numpy(image) * torch.rand(image.shape)


def begun(kind: str, seed: int = 3, **options: Any) -> Pipeline:
    rng = np.random.default_rng(0)
    source = sources.arrays(image=rng.random((N, 3, 7), dtype=np.float32), kind=LABELS, label=np.arange(N))
    return Pipeline(source, seed=seed, sampling=made_sampling(kind), **options)


def pipe(kind: str) -> Pipeline:
    return begun(kind).map(noise)


def torch_pipe(kind: str) -> Pipeline:
    """Its workers import torch, which is dear."""
    return pipe(kind).map(dropped, field="image", random="torch")


def batches(loader: Any) -> list[Any]:
    return [record(batch) for batch in loader]


def alone(pipeline: Pipeline, batch_size: int = 8, epochs: Any = 3, **options: Any) -> list[Any]:
    return batches(pipeline.loader(batch_size, epochs, **options))


# --- the law ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "threads", "make"),
    [
        *((kind, threads, pipe) for threads, kind in ((True, "balanced"), (False, "weighted"), (True, "subset"))),
        *(pytest.param(kind, False, torch_pipe, marks=pytest.mark.more) for kind in KINDS),
    ],
)
def test_members_that_share_get_the_batches_of_members_alone(kind: str, threads: bool, make: Any) -> None:
    pipeline = make(kind)
    wanted = alone(pipeline)
    assert [row[:3] for row in wanted if row[0] == 2][-1][1] == len(wanted) // 3 - 1
    for epoch in range(3):
        read = [index for row in wanted if row[0] == epoch for index in row[3]]
        assert read == pipeline.order()(epoch, 0, len(pipeline)).tolist(), "each position exactly once"
    with Feeder(pipeline, workers=2, threads=threads, capacity=24, block=5, expect=2) as feeder:
        first = attach(feeder.address, pipeline, 8, range(3), name="a")
        ranks = [attach(feeder.address, pipeline, 6, range(3), name="b", rank=r, world=2) for r in range(2)]
        got = together([partial(batches, each) for each in (first, *ranks)])
        prepared = feeder.stats()["prepared"]
    assert got[0] == wanted
    assert got[1:] == [alone(pipeline, 6, rank=r, world=2) for r in range(2)]
    assert all(each.stats()["private_batches"] == 0 for each in (first, *ranks))
    assert prepared == 3 * len(pipeline) and len(first) == len(wanted)


def test_a_record_drawn_again_gets_other_random_numbers_and_a_record_drawn_once_today_s() -> None:
    pipeline = torch_pipe("balanced")
    draws: dict[int, list[Any]] = {}
    for batch in pipeline.loader(8, 1):
        for index, draw, image in zip(batch["index"].tolist(), batch["draw"], batch["image"], strict=True):
            draws.setdefault(index, []).append((draw.item(), image.sum().item()))
    repeated = [each for each in draws.values() if len(each) > 1]
    assert repeated and all(len(set(drawn)) == len(each) for each in repeated for drawn in zip(*each, strict=True))
    # Without sampling a sample is what it was before: keyed by its index alone, wherever it is.
    plain = Pipeline(pipeline.source, seed=3).map(noise)
    by_index = {
        i: d for b in plain.loader(8, 1) for i, d in zip(b["index"].tolist(), b["draw"].tolist(), strict=True)
    }
    shifted = Pipeline(plain.source, seed=3, shuffle=False).map(noise)
    again = {
        i: d for b in shifted.loader(5, 1) for i, d in zip(b["index"].tolist(), b["draw"].tolist(), strict=True)
    }
    assert by_index == again


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_in_the_middle_of_an_epoch_goes_on_with_the_same_bits(kind: str) -> None:
    pipeline = pipe(kind)
    wanted = alone(pipeline, 4)
    rest = [row for row in wanted if row[0] > 1 or (row[0] == 1 and row[1] >= 3)]
    assert alone(pipeline, 4, range(1, 3), start_step=3) == rest
    with Feeder(pipe(kind), workers=2, capacity=24) as feeder:
        loader = attach(feeder.address, pipeline, 4, range(1, 3), start_step=3)
        assert batches(loader) == rest and loader.stats()["private_batches"] == 0


def test_a_late_member_joins_at_the_next_epoch() -> None:
    pipeline = pipe("balanced")
    with Feeder(pipeline, capacity=16) as feeder:
        first = attach(feeder.address, pipeline, 8, range(4), name="first")
        iterator = iter(first)
        got = [record(next(iterator)) for _ in range(3)]
        late = attach(feeder.address, pipeline, 10, 2, name="late")
        assert late.reading.epochs == range(1, 3)
        rest, others = together([partial(batches, iterator), partial(batches, late)])
        assert late.stats()["private_batches"] == 0
    assert got + rest == alone(pipeline, 8, 4)
    assert others == alone(pipeline, 10, range(1, 3))


@pytest.mark.parametrize(
    ("kind", "design"),
    [
        ("balanced", "all"),
        pytest.param("weighted", "single", marks=pytest.mark.more),
        pytest.param("subset", "node", marks=pytest.mark.more),
    ],
)
def test_nodes_that_share_a_stream_carry_the_same_positions(kind: str, design: str, tmp_path: Path) -> None:
    pipeline = pipe(kind)
    with ExitStack() as stack:
        feeders = []
        for rank in range(2):
            peers = Peers(str(tmp_path / "peers"), rank, 2, "lo", "gloo")
            options: dict[str, Any] = {"capacity": 64, "expect": 1, "gate_timeout_s": 600.0, "design": design}
            feeders.append(Feeder(pipe(kind), peers=peers, **options))
            stack.callback(feeders[-1].close)
        got = together(
            [
                lambda each=each, size=size: batches(attach(each.address, pipeline, size, range(2)))  # type: ignore[misc]
                for each, size in zip(feeders, (8, 5), strict=True)
            ]
        )
        assert got == [alone(pipeline, 8, 2), alone(pipeline, 5, 2)]
        prepared = [each.stats()["prepared"] for each in feeders]
        assert sum(prepared) >= 2 * len(pipeline)


# --- stages in the members --------------------------------------------------------------------------------------


def test_members_with_ends_of_their_own_key_a_repeated_record_by_its_position_too() -> None:
    ends = [torch_pipe("balanced"), begun("balanced").map(dropped, field="image", random="torch")]
    shared = find_shared_stages(ends)
    with Feeder(shared, capacity=24, expect=2) as feeder:
        loaders = [attach(feeder.address, each, 8, range(2), name=f"{n}") for n, each in enumerate(ends)]
        got = together([partial(batches, each) for each in loaders])
        assert all(each.stats()["private_batches"] == 0 for each in loaders)
    assert got == [alone(each, 8, 2) for each in ends]


def test_members_with_other_weights_do_not_share_and_are_told_why() -> None:
    with pytest.raises(PipelineError, match=r"have nothing in common: the pipelines differ: sampling at"):
        find_shared_stages([pipe("balanced"), pipe("weighted")])
    with Feeder(pipe("balanced"), capacity=16) as feeder, pytest.raises(PipelineError, match="another sampling"):
        attach(feeder.address, pipe("weighted"), 8, 1)


# --- the cache, skipped and poison records ----------------------------------------------------------------------


def scaled(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "image": sample["image"] * np.float32(0.5)}


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_a_cache_keeps_records_not_positions(cache: Any, tmp_path: Path) -> None:
    where = {"cache_dir": str(tmp_path / "cache")} if cache == "disk" else {}
    for kind in ("balanced", "subset"):  # more positions than records, and fewer
        pipeline = begun(kind).map(scaled).map(noise)
        with Feeder(pipeline, capacity=16, cache=cache, cache_bytes=10**7, **where) as feeder:
            assert batches(attach(feeder.address, pipeline, 8, range(3))) == alone(pipeline)
            stats = feeder.stats()["cache"]
        drawn = {i for epoch in range(3) for i in pipeline.order()(epoch, 0, len(pipeline)).tolist()}
        assert stats["samples"] == len(drawn) or cache == "disk"
        assert stats["hits"] >= 3 * len(pipeline) - len(drawn)


def refuse_some(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["label"] in (1, 3):
        raise ValueError("a bad record")
    return sample


@pytest.mark.filterwarnings("ignore:left out")
def test_a_record_that_is_left_out_is_left_out_at_each_of_its_positions() -> None:
    pipeline = begun("balanced", on_error="skip", max_skipped=1.0).map(refuse_some).map(noise)
    order = pipeline.order()(0, 0, POSITIONS).tolist()
    missing = sum(index in (1, 3) for index in order)
    assert missing > 2
    wanted = alone(pipeline, 8, 2)
    assert sum(row[2] for row in wanted if row[0] == 0) == POSITIONS - missing
    assert [i for row in wanted if row[0] == 0 for i in row[3]] == [i for i in order if i not in (1, 3)]
    with Feeder(pipeline, workers=2, capacity=24) as feeder:
        loader = attach(feeder.address, pipeline, 8, range(2))
        assert batches(loader) == wanted and loader.stats()["private_batches"] == 0
        stats = feeder.stats()
        assert set(stats["bad"]) == {1, 3}
        missing += sum(index in (1, 3) for index in pipeline.order()(1, 0, POSITIONS).tolist())
        assert stats["skipped"] == missing, "counted at each position"


def kill_on_a_draw(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Ends its process at some positions of record 2, not at its first."""
    if sample["label"] == 2 and rng.random() < 0.3:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def test_a_record_that_kills_at_one_of_its_positions_is_found() -> None:
    pipeline = begun("weighted", on_error="skip", max_skipped=1.0).map(kill_on_a_draw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Feeder(pipeline, workers=1, capacity=80) as feeder:
            got = batches(attach(feeder.address, pipeline, 8, range(1)))
            poison = feeder.stats()["poison"]
    assert [each["index"] for each in poison] == [2]
    read = [i for row in got for i in row[3]]
    order = pipeline.order()(0, 0, POSITIONS).tolist()
    # Positions that were prepared before it was found may be there.
    assert Counter(i for i in read if i != 2) == Counter(i for i in order if i != 2)


# --- weights of samples, resident sets --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weights", [sample_weights.bootstrap(1), sample_weights.fold(N, 4, 1), lambda i: (i % 2).astype(np.float32)]
)
def test_weights_of_samples_go_by_record_at_every_position(weights: Any) -> None:
    pipeline = pipe("balanced")
    with Feeder(pipeline, capacity=16) as feeder:
        for batch in attach(feeder.address, pipeline, 8, range(2), weights=weights):
            assert batch["weight"].tolist() == weights(batch["index"].numpy()).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_with_workers_of_its_own_reads_the_same_positions_and_its_state_is_resumed(kind: str) -> None:
    pipeline = pipe(kind)
    wanted = alone(pipeline)
    loader = pipeline.loader(8, 3, workers=2)
    iterator = iter(loader)
    got = [record(next(iterator)) for _ in range(len(wanted) // 2)]
    state = loader.state_dict()
    iterator.close()
    rest = pipeline.loader(8, 3)
    rest.load_state_dict(state)
    assert got + batches(rest) == wanted
    for rank in range(2):
        own = {"rank": rank, "world": 2, "drop_last": True}
        assert batches(pipeline.loader(7, 2, workers=1, **own)) == alone(pipeline, 7, 2, **own)
