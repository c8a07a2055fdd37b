"""`state_dict` and `load_state_dict` of loaders, beside torchdata's StatefulDataLoader in the same scenarios."""

from __future__ import annotations

import itertools
import json
import warnings
from typing import Any

import numpy as np
import pytest
from core_pipes import Feeder, N, data, leaves_nothing, noise, pipe, record, together  # noqa: F401
from torchdata.stateful_dataloader import StatefulDataLoader

from pipelines import Pipeline, PipelineError, attach, sources, stages

B = 8
STEPS = -(-N // B)


def ours(workers: int = 0) -> Any:
    return Pipeline(sources.arrays(x=np.arange(N)), shuffle=False).loader(B, workers=workers)


def theirs() -> Any:
    return StatefulDataLoader(list(range(N)), batch_size=B)


def values(batch: Any) -> list[int]:
    return (batch["x"] if isinstance(batch, dict) else batch).tolist()  # type: ignore[no-any-return]


def stop_at(loader: Any, passes: int = 0, at: int | None = 2, is_left: bool = False) -> Any:
    """The state after so many passes and the batch of that number, or after the loop was left there."""
    for _ in range(passes):
        list(loader)
    for number, _ in enumerate(loader if at is not None else ()):
        if number == at:
            if is_left:
                break
            return loader.state_dict()
    return loader.state_dict()


EARLY, SECOND = {"at": 1, "is_left": True}, {"passes": 1}
SCENARIOS: list[dict[str, Any]] = [{"at": None}, {}, {"at": STEPS - 1}, {"passes": 1, "at": None}, EARLY, SECOND]


def continued(state: Any, fresh: Any) -> list[list[list[int]]]:
    """What the next two passes over a fresh loader yield after the state is loaded, twice."""
    fresh.load_state_dict(state)
    fresh.load_state_dict(state)
    return [[values(batch) for batch in fresh] for _ in range(2)]


@pytest.mark.parametrize(("scenario", "workers"), [*((s, 0) for s in SCENARIOS), (EARLY, 2), (SECOND, 2)], ids=str)
def test_a_fresh_loader_continues_as_torchdatas_does(scenario: dict[str, Any], workers: int) -> None:
    state = json.loads(json.dumps(stop_at(ours(workers), **scenario)))
    passes = continued(state, ours(workers))
    assert passes == continued(stop_at(theirs(), **scenario), theirs())
    assert len(passes[1]) == STEPS


@pytest.mark.parametrize(("kind", "workers"), [("numpy", 0), ("torch", 2), ("skip", 2)])
def test_the_rest_is_bitwise_what_the_first_loader_reads(kind: str, workers: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of records that are left out
        first, states, records = pipe(kind).loader(B, 3, workers=workers), [], []
        for batch in first:
            states.append(first.state_dict())
            records.append(record(batch))
        for taken in (0, STEPS - 1, STEPS, len(states) - 1):
            again = pipe(kind).loader(B, 3, workers=workers)
            again.load_state_dict(states[taken])
            assert [record(batch) for batch in again] == records[taken + 1 :]


def test_len_is_of_what_is_left_of_the_pass() -> None:
    loader = pipe("plain").loader(B, workers=1)
    loader.load_state_dict(stop_at(pipe("plain").loader(B)))
    assert len(loader) == STEPS - 3 == len(list(loader))
    list(loader)
    assert len(loader) == STEPS
    assert len(pipe("plain").loader(B, 3, drop_last=True, start_step=2)) == 3 * (N // B) - 2
    loader.close()


def test_the_state_is_small_and_an_earlier_one_can_be_loaded_after_a_later_one() -> None:
    loader = Pipeline(sources.arrays(x=np.arange(20_000))).map(stages.cast("x", "float32")).loader(1000, 1)
    early = loader.state_dict()
    assert len(json.dumps(early)) < 2000
    records, steps = zip(*((record(batch), loader.state_dict()["step"]) for batch in loader), strict=True)
    assert steps == (*range(1, 21),)  # as Accelerate does
    loader.load_state_dict(loader.state_dict())
    assert list(loader) == []
    loader.load_state_dict(early)
    assert [record(batch) for batch in loader] == list(records)


def resumed(state: Any, batch_size: int = B, **options: Any) -> list[list[int]]:
    """The indices of the batches that a loader reads from a state."""
    loader = pipe("numpy").loader(batch_size, **options)
    loader.load_state_dict(state)
    return [batch["index"].tolist() for batch in loader]


def test_other_ranks_go_on_from_the_same_state() -> None:
    state = stop_at(pipe("numpy").loader(B, rank=1, world=2))
    assert state == {**stop_at(pipe("numpy").loader(B)), "pipeline": state["pipeline"]}
    ranks = zip(*(resumed(state, rank=rank, world=4) for rank in range(4)), strict=True)
    assert [[*itertools.chain(*parts)] for parts in ranks] == resumed(state)


def test_another_batch_size_goes_on_where_one_of_its_batches_begins() -> None:
    state = stop_at(pipe("numpy").loader(B))  # after 24 samples
    assert [*itertools.chain(*resumed(state, 12))] == [*itertools.chain(*resumed(state))]
    with pytest.raises(PipelineError, match=r"after 24 samples of epoch 0.*batch_size=7.*divides 24"):
        resumed(state, 7)
    assert resumed(stop_at(pipe("numpy").loader(B), at=STEPS - 1), 7) == []


OTHERS = [
    (Pipeline(data(), seed=4).map(noise), "the seed differs"),
    (Pipeline(data(), seed=3, shuffle=False).map(noise), "the shuffle differs"),
    (Pipeline(data(), seed=3), "it has stage 0 noise in place of no stage"),
    (Pipeline(data(), seed=3).map(noise).map(stages.drop("mask")), "it has no stage in place of stage 1"),
    (Pipeline(data(N - 1), seed=3).map(noise), f"epochs had {N} samples, here they have {N - 1}"),
]


@pytest.mark.parametrize(("other", "words"), OTHERS)
def test_the_state_of_another_pipeline_is_refused_with_what_differs(other: Pipeline, words: str) -> None:
    state = json.loads(json.dumps(pipe("numpy").loader(B).state_dict()))
    with pytest.raises(PipelineError, match=words):
        other.loader(B).load_state_dict(state)


def test_what_has_no_sure_identity_is_said() -> None:
    def unsure() -> Pipeline:
        return Pipeline(sources.dataset([{"x": np.float32(i)} for i in range(N)]))

    state = unsure().loader(B).state_dict()
    with pytest.warns(UserWarning, match="cannot check that .*id="):
        unsure().loader(B).load_state_dict(state)
    same = unsure()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.loader(B).load_state_dict(same.loader(B).state_dict())


def test_what_is_no_state_is_refused_and_so_is_one_of_another_version_or_epoch() -> None:
    state = pipe("plain").loader(B).state_dict()
    cases: list[tuple[Any, str]] = [(wrong, "needs what state_dict") for wrong in (None, {"_num_yielded": 3})]
    cases += [({**state, "version": 7}, "version 7"), ({**state, "step": -1}, "step must be at least 0")]
    cases += [({**state, "epoch": 5}, "at epoch 5, step 0; this loader reads the epochs 0 to 1")]
    for wrong, words in cases:
        with pytest.raises(PipelineError, match=words):
            pipe("plain").loader(B, 2).load_state_dict(wrong)


def test_set_epoch_is_for_the_next_pass() -> None:
    epochs = [[record(b) for b in pipe("numpy").loader(B, range(e, e + 1))] for e in range(6)]
    loader = pipe("numpy").loader(B, workers=1)
    for epoch in (0, 1, 4, 5, 2, 2):
        loader.set_epoch(epoch)
        assert [record(b) for b in loader] == epochs[epoch]
    assert [record(b) for b in loader] == epochs[3]
    loader.load_state_dict(stop_at(pipe("numpy").loader(B)))
    loader.set_epoch(0)  # of the epoch that is resumed: what is left of it stays
    assert [record(b) for b in loader] == epochs[0][3:]
    loader.close()
    with pytest.raises(PipelineError, match="without epochs=: this one reads the epochs 0 to 1"):
        pipe("plain").loader(B, 2).set_epoch(1)


@pytest.mark.parametrize("is_attached", [False, True], ids=["alone", "attached"])
def test_an_iterator_that_was_never_read_is_no_pass(is_attached: bool) -> None:
    """Lightning calls `iter` once to check what it was given, and once more to read it."""
    whole = [[record(b) for b in pipe("numpy").loader(B, range(e, e + 1))] for e in range(4)]
    with Feeder(pipe("numpy"), capacity=16) as feeder:

        def make(epochs: range | None = None) -> Any:
            if is_attached:
                return attach(feeder.address, pipe("numpy"), B, epochs)
            return pipe("numpy").loader(B, epochs, workers=1)

        def read_passes() -> None:
            loader = make()
            unread, opened = iter(loader), loader.epochs()
            assert [record(b) for b in loader] == whole[0]
            begun = iter(loader)  # in the middle of its pass, and kept
            assert record(next(begun)) == whole[1][0]
            assert [record(b) for b in loader] == whole[2], "the next pass is the epoch after it"
            assert [record(b) for b in unread] == whole[3], "an iterator begins its pass when it is read"
            assert not is_attached or loader.stats()["private_batches"] == 0
            del opened, begun
            loader.close()
            bounded = make(range(1, 3))
            unread, late = iter(bounded), bounded.epochs()
            assert [record(b) for b in bounded] == whole[1] + whole[2]
            for again in (lambda: next(unread), lambda: next(late), lambda: iter(bounded), bounded.epochs):
                with pytest.raises(PipelineError, match=r"a second pass .* leave epochs= out"):
                    again()

        together([read_passes])


def test_the_loader_of_a_feeder_continues_from_a_state() -> None:
    whole = [record(b) for b in pipe("numpy").loader(B, 3)]
    with Feeder(pipe("numpy")) as feeder:
        loader, again = (attach(feeder.address, pipe("numpy"), B, epochs=range(3), name=name) for name in "ab")
        batches = iter(loader)
        for _ in range(STEPS + 2):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
        alone = pipe("numpy").loader(B, 3, workers=1)  # whoever prepares
        for other in (again, alone):
            other.load_state_dict(state)
            assert [record(b) for b in other] == whole[STEPS + 2 :]
        assert again.stats()["shared_batches"] > 0
