"""Resident sets: prepared once, shared by all who ask, read at any pace."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import core_pipes as pipes
import numpy as np
import pytest
from core_pipes import Feeder, N, leaves_nothing, pipe  # noqa: F401

from pipelines import Pipeline, PipelineError, SampleError, attach, resident, sources
from pipelines.loader.resident import Resident, StreamedSet
from pipelines.shm.private_mapping import PAGE


def rows(loader: Any) -> list[Any]:
    """(index, content) of each sample, each batch spoilt after it was seen."""
    seen = []
    for batch in loader:
        assert pipes.record(batch)
        for row in range(len(batch["index"])):
            seen.append((int(batch["index"][row]), *(batch[k][row].numpy().tobytes() for k in sorted(batch))))
        pipes.spoil(batch)
    return seen


def expected(pipeline: Pipeline) -> list[Any]:
    return rows(pipeline.without_randomness().loader(8, 1))


def bad_sets() -> tuple[Pipeline, Pipeline]:
    """Of bad records: one that fails at them, and one that leaves them out."""
    source = pipe("plain").source
    skipping = Pipeline(source, on_error="skip", max_skipped=1.0)
    return Pipeline(source).map(pipes.refuse_some), skipping.map(pipes.refuse_some)


@pytest.mark.parametrize("with_feeder", [True, False])
def test_a_resident_set_equals_plain_preparation_and_its_ranks_share_it_out(with_feeder: bool) -> None:
    with Feeder(pipe("numpy"), resident={"valid": pipe("plain")}, workers=2, capacity=16) as feeder:
        held = resident(feeder.address if with_feeder else None, "valid", pipe("plain"))
    assert len(held) == N and (held.prepare_cpu_s == 0) == with_feeder
    wanted = expected(pipe("plain"))
    assert [i for i, *_ in wanted] == list(range(N))
    for batch_size in (1, 7, N, 100):
        assert rows(held.loader(batch_size)) == wanted, "the traces of an earlier reading are left"
    for world in (2, 3):
        assert [row for rank in range(world) for row in rows(held.loader(5, rank, world))] == wanted
    pipes.spoil(next(iter(held.loader(8))))
    again, half = held.loader(8, rank=1, world=2), N - N // 2
    assert rows(again) == rows(again) == wanted[N // 2 :], "each pass has the same batches"
    assert len(again) == -(-half // 8)
    assert again.stats()["batches"] == 2 * len(again) and again.stats()["samples"] == 2 * half
    for wrong in ({"batch_size": 0}, {"batch_size": 8, "rank": 1}, {"batch_size": 8, "world": 0}):
        with pytest.raises(PipelineError, match="must be"):
            held.loader(**wrong)


@pytest.mark.parametrize("with_feeder", [True, False])
def test_a_set_that_memory_does_not_hold_is_prepared_batch_by_batch_with_the_same_bits(
    with_feeder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = expected(pipe("plain"))
    monkeypatch.setattr("pipelines.environment.machine_limits.available_bytes", lambda: 2 * PAGE)
    with (
        Feeder(pipe("numpy"), resident={"valid": pipe("plain")}, workers=1, capacity=16) as feeder,
        pytest.warns(UserWarning, match="'valid' is prepared again at each pass: .* half of the memory"),
    ):
        held = resident(feeder.address if with_feeder else None, "valid", pipe("plain"))
    for batch_size in (1, 7, N, 100):
        for world in (1, 3):
            loaders = [held.loader(batch_size, rank, world) for rank in range(world)]
            for _ in range(2):
                assert [row for loader in loaders for row in rows(loader)] == wanted
    first, second = (iter(held.loader(4)) for _ in range(2))
    assert next(first)["index"].tolist() == next(second)["index"].tolist() == [0, 1, 2, 3], "each has its memory"
    assert len(held) == N and held.prepare_cpu_s > 0


def test_a_set_is_given_up_when_others_take_the_memory_while_it_is_prepared(monkeypatch: Any) -> None:
    monkeypatch.setattr("pipelines.loader.resident.LEAST_CHECKED", 1)  # in parts, as a large set
    free = iter([2**30] * 12)
    monkeypatch.setattr("pipelines.environment.machine_limits.available_bytes", lambda: next(free, PAGE))
    failing, skipping = bad_sets()
    for pipeline in (pipe("plain"), skipping):  # the second finds no memory from its start
        with pytest.warns(UserWarning, match="prepared again at each pass"):
            held = resident(None, "valid", pipeline)
        assert rows(held.loader(8)) == expected(pipeline)
    with pytest.warns(UserWarning, match="prepared again"):
        held = resident(None, "valid", failing)
    with pytest.raises(SampleError, match="sample"):
        rows(held.loader(8))


def test_processes_share_one_set_and_read_it_at_their_own_pace_though_a_worker_was_killed() -> None:
    still = Pipeline(pipe("plain").source, shuffle=False).map(pipes.slowly)
    with Feeder(pipe("plain"), resident={"valid": still, "test": pipe("plain")}) as feeder:
        os.kill(feeder.stats()["workers"][0], 9)
        held = pipes.together([partial(resident, feeder.address, "valid", still) for _ in range(3)])
        assert pipes.together([partial(rows, r.loader(9)) for r in held]) == [expected(still)] * 3
        mapped = re.findall(r"(\d+) +/memfd:valid", Path("/proc/self/maps").read_text())
        assert len(mapped) == 3 and len(set(mapped)) == 1, "three readers map one and the same memory"
        # Nobody has written to it: what a reader wrote was its own.
        assert rows(resident(feeder.address, "valid", still).loader(4)) == expected(still)
        assert resident(feeder.address, "test", pipe("plain"))
        stats = feeder.stats()
        assert (stats["resident"], stats["prepared"], stats["restarts"]) == (2 * N, 0, 1)
    assert rows(held[0].loader(9)) == expected(still), "it outlives its feeder"


def test_a_feeder_that_takes_anothers_place_prepares_sets_when_they_are_asked_for() -> None:
    held = {"valid": pipe("still"), "test": pipe("plain")}
    with Feeder(pipe("plain"), resident=held, replacement=True) as feeder:
        assert len(list(attach(feeder.address, pipe("plain"), 8, range(2)))) == 2 * -(-N // 8)
        assert feeder.stats()["resident"] == 0
        assert rows(resident(feeder.address, "valid", pipe("still")).loader(4)) == expected(pipe("still"))
        assert feeder.stats()["resident"] == N


def test_a_random_stage_is_refused_by_name() -> None:
    for use in (pipe("numpy").resident, lambda: Feeder(pipe("plain"), resident={"valid": pipe("torch")})):
        with pytest.raises(PipelineError, match="prepared once, but the stage noise is random"):
            use()


def test_an_unknown_set_or_another_pipeline_is_refused_and_no_feeder_is_done_without(tmp_path: Path) -> None:
    with Feeder(pipe("plain"), resident={"valid": pipe("plain")}) as feeder:
        with pytest.raises(PipelineError, match=r"no resident set 'tset' here .known: valid."):
            resident(feeder.address, "tset", pipe("plain"))
        with pytest.raises(PipelineError, match="the pipelines differ: seed"):
            resident(feeder.address, "valid", pipe("plain", seed=9))
        unsure = pipe("plain").map(pipes.nameless)
        with pytest.warns(UserWarning, match=r"prepared here: .*nameless reads"):
            assert len(resident(feeder.address, "valid", unsure)) == N
    with pytest.warns(UserWarning, match="no feeder answers"):
        assert rows(resident(str(tmp_path / "x"), "valid", pipe("plain")).loader(8)) == expected(pipe("plain"))


@pytest.mark.filterwarnings("ignore:left out")
def test_records_left_out_of_a_set_are_left_out_for_all_and_a_bad_one_is_named() -> None:
    failing, skipping = bad_sets()
    here = skipping.resident()
    with Feeder(skipping, resident={"valid": skipping}) as feeder:
        there = resident(feeder.address, "valid", skipping)
        assert feeder.stats()["skipped"] == N - len(there)
    bad = pytest.raises(SampleError, match=r"sample 3 .*row 3.*refuse_some: a bad record")
    with Feeder(pipe("plain"), resident={"failing": failing}) as feeder, bad:
        resident(feeder.address, "failing", failing)
    assert len(here) == len(there) == N - 9
    assert rows(here.loader(8)) == rows(there.loader(8))
    assert [i for i, *_ in rows(here.loader(8))] == [i for i in range(N - 3) if i % 10 != 3]


@pytest.mark.parametrize(("batch_size", "world"), [(1, 1), (7, 1), (4, 3), (100, 3)])
def test_chosen_rows_come_in_full_batches_also_of_a_set_that_is_not_in_memory(batch_size: int, world: int) -> None:
    n = 50
    pipeline = Pipeline(sources.arrays(x=np.arange(n)), shuffle=False)
    for chosen in (np.random.default_rng(0).random(n) < 0.3, np.zeros(n, bool), np.arange(n) < 20):
        for made in (Resident.prepare(pipeline), StreamedSet(pipeline)):
            values = []
            for rank in range(world):
                loader = made.loader(batch_size, rank, world, chosen=chosen)
                batches = [batch["x"].tolist() for batch in loader]
                count = chosen[n * rank // world : n * (rank + 1) // world].sum()
                assert [*map(len, batches)] == [min(batch_size, count - i) for i in range(0, count, batch_size)]
                assert len(loader) == len(batches) and loader.stats()["skipped"] == 0
                values += [x for batch in batches for x in batch]
            assert values == np.flatnonzero(chosen).tolist()
