"""Sampled orders on integers alone: what is drawn how often, by whom, and what is refused."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import Pipeline, PipelineError, sampling, sources

CLASSES = st.lists(st.integers(0, 4), min_size=2, max_size=60).filter(lambda labels: len(set(labels)) > 1)


def source(n: int, **columns: Any) -> Any:
    return sources.arrays(x=np.arange(n), **columns)


def epoch(pipeline: Pipeline, number: int = 0) -> list[int]:
    return [int(i) for i in pipeline.order()(number, 0, len(pipeline))]


@given(CLASSES, st.integers(1, 150), st.integers(0, 5), st.integers(0, 3))
def test_a_balanced_epoch_uses_classes_and_records_equally_often(
    labels: list[int], samples: int, seed: int, number: int
) -> None:
    made = sampling.balanced(np.array(labels), samples=samples)
    pipeline = Pipeline(source(len(labels)), seed=seed, sampling=made)
    assert len(pipeline) == samples

    def count(epochs: range) -> list[list[int]]:
        """How often each record is used, class by class."""
        uses = Counter(index for at in epochs for index in epoch(pipeline, at))
        return [[uses[i] for i, own in enumerate(labels) if own == label] for label in set(labels)]

    totals = [sum(uses) for uses in count(range(number, number + 1))]
    assert sum(totals) == samples and max(totals) - min(totals) <= 1
    for epochs in (range(number, number + 1), range(number + 1)):
        assert all(max(uses) - min(uses) <= 1 for uses in count(epochs)), "the records of a class take turns"


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=5).filter(
        lambda parts: any(share for _, share in parts)
    ),
    st.none() | st.integers(1, 200),
    st.integers(0, 3),
    st.integers(1, 9),
)
def test_a_mixed_epoch_has_each_class_by_its_share_and_so_has_each_part_of_it(
    parts: list[tuple[int, int]], samples: int | None, number: int, step: int
) -> None:
    sizes, shares = zip(*parts, strict=True)
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(parts)), sizes))
    made = sampling.mixed({label: share / 10 for label, share in enumerate(shares)}, samples, field="label")
    try:
        pipeline = Pipeline(source(len(labels), label=labels), seed=step, sampling=made)
    except PipelineError as error:  # a class would never be drawn
        total = int(str(error).partition("less than one of ")[2].split()[0])
        assert any(0 < total * share < sum(shares) or share > total == 0 for share in shares)
        return
    total, epochs = len(pipeline), [np.array(epoch(pipeline, at)) for at in range(number + 1)]
    part_of = np.array(shares) / sum(shares)
    counts = np.bincount(labels[epochs[-1]], minlength=len(parts))
    assert counts.sum() == total == (samples or total) and (np.abs(counts - total * part_of) < 1).all()
    so_far = np.cumsum(labels[epochs[-1]][:, None] == np.arange(len(parts)), axis=0)
    even = np.arange(1, total + 1)[:, None] * counts / total
    assert (np.abs(so_far - even) <= 0.5 + np.maximum(0, len(parts) - 2) / 2 * counts / total + 1e-9).all()
    uses = np.bincount(np.concatenate(epochs), minlength=len(labels))
    assert all(np.ptp(uses[labels == label]) <= 1 for label in range(len(parts))), "records of a class take turns"
    if samples is None:
        assert np.bincount(epochs[-1]).max() == 1 and any((total + 1) * part_of > np.array(sizes) - 1e-9)
    order = pipeline.order()
    pieces = [
        i for start in range(0, total, step) for i in order(number, start, min(total, start + step)).tolist()
    ]
    assert pieces == epochs[-1].tolist()


def test_epochs_of_a_mixture_differ_in_their_records_and_a_round_share_needs_a_small_table() -> None:
    pipeline = Pipeline(
        source(100, label=np.arange(100) % 2), sampling=sampling.mixed({0: 0.7, 1: 0.3}, 20, field="label")
    )
    first, second = (set(epoch(pipeline, number)) for number in (0, 1))
    assert not first & second and len(first) == 20, "the next epoch goes on where the first has ended"
    assert Counter(index % 2 for index in first) == {0: 14, 1: 6}
    huge = Pipeline(
        source(4, label=[0, 1, 1, 0]), sampling=sampling.mixed({0: 0.7, 1: 0.3}, 10**12, field="label")
    )
    assert huge.order()(5, 10**12 - 3, 10**12).shape == (3,) and len(pickle.dumps(huge.order())) < 2000


@given(
    st.lists(st.floats(0, 1e6) | st.just(0.0), min_size=1, max_size=60).filter(lambda w: sum(w) > 0),
    st.integers(1, 200),
    st.integers(0, 3),
)
def test_a_record_of_weight_zero_is_never_drawn_and_positions_do_not_depend_on_the_pieces(
    weights: list[float], samples: int, number: int
) -> None:
    pipeline = Pipeline(source(len(weights)), sampling=sampling.weighted(weights, samples=samples))
    whole = epoch(pipeline, number)
    assert len(whole) == len(pipeline) == samples
    assert all(weights[index] > 0 for index in whole)
    order = pipeline.order()
    pieces = [int(i) for start in range(0, samples, 7) for i in order(number, start, min(samples, start + 7))]
    assert pieces == whole


def test_classes_come_by_weight_as_torchs_sampler_draws_them() -> None:
    import torch
    from scipy import stats

    labels, epochs = np.repeat([0, 1, 2, 3], [600, 250, 100, 50]), 200
    by_class = {0: 1.0, 1: 2.0, 2: 7.5, 3: 0.5}
    weights = np.array([by_class[int(label)] for label in labels])
    pipeline = Pipeline(source(1000, label=labels), sampling=sampling.weighted(by_class))
    torch.manual_seed(0)
    sampler = torch.utils.data.WeightedRandomSampler(weights.tolist(), 1000)
    ours = np.array([i for number in range(epochs) for i in epoch(pipeline, number)])
    theirs = np.array([i for _ in range(epochs) for i in sampler])
    counts = [np.bincount(labels[drawn], minlength=4) for drawn in (ours, theirs)]
    share = np.bincount(labels, weights) / weights.sum()
    assert stats.chi2_contingency(counts).pvalue > 1e-3, "two samples of one distribution"
    assert stats.chisquare(counts[0], share * len(ours)).pvalue > 1e-3
    single = np.bincount(ours, minlength=1000)
    assert stats.chisquare(single, weights / weights.sum() * len(ours)).pvalue > 1e-3, "every record by its weight"


def test_the_orders_are_those_of_every_machine_and_version() -> None:
    # Written down once: an epoch that has begun is resumed by another processor or version of numpy.
    weighted = sampling.weighted([0.5, 1, 4, 0, 2, 2, 1, 1])
    balanced = sampling.balanced([0, 0, 0, 1, 0, 2, 0, 0], samples=9)
    orders = [epoch(Pipeline(source(8), seed=11, sampling=made), 2) for made in (weighted, balanced)]
    assert orders == [[1, 6, 2, 2, 6, 2, 5, 2], [3, 5, 3, 3, 5, 0, 6, 4, 5]]
    lengths = source(8, length=[5, 1, 9, 2, 7, 3, 8, 4])
    others = [sampling.bucketed("length", bucket=2, window=2), sampling.consecutive(3)]
    orders = [epoch(Pipeline(lengths, seed=11, sampling=made), 2) for made in others]
    assert orders == [[4, 6, 7, 3, 1, 5, 0, 2], [7, 0, 6]]
    mixed = sampling.mixed({0: 1, 1: 1, 2: 2}, 8, field="label")
    labelled = source(8, label=[0, 0, 0, 1, 0, 2, 1, 2])
    assert epoch(Pipeline(labelled, seed=11, sampling=mixed), 2) == [5, 2, 6, 5, 7, 1, 3, 7]
    for made in (weighted, balanced):
        pipelines = [
            Pipeline(source(8), seed=seed, sampling=pickle.loads(pickle.dumps(made))) for seed in (11, 12)
        ]
        assert len({tuple(epoch(pipeline, number)) for pipeline in pipelines for number in (0, 1)}) == 4
    huge = Pipeline(source(4), sampling=sampling.weighted([1, 2, 3, 4], samples=10**12))
    assert huge.order()(5, 10**12 - 3, 10**12).shape == (3,) and len(pickle.dumps(huge.order())) < 2000


FOUR = np.array([0, 1, 1, 1])
BY_NAME = (FOUR, ["cat", "dog", "dog", "dog"], [b"a", b"b\0", b"b\0", b"b\0"], FOUR == 1, FOUR + 1.0)


@pytest.mark.parametrize("labels", [*BY_NAME, lambda record: "first" if record["x"] == 0 else "other"])
def test_labels_of_many_types_are_classes(labels: Any) -> None:
    drawn = Counter(epoch(Pipeline(source(4), sampling=sampling.balanced(labels, samples=60))))
    assert drawn == {0: 30, 1: 10, 2: 10, 3: 10}
    if not callable(labels):
        named = Pipeline(source(4, kind=labels), sampling=sampling.balanced("kind", samples=60))
        assert Counter(epoch(named)) == drawn


def test_labels_and_weights_may_be_tensors_of_any_dtype_and_lists_of_them() -> None:
    import torch

    tensor, weights = torch.from_numpy(FOUR), torch.tensor([0.5, 0.25, 1.0, 0.0])
    labels = (FOUR, tensor, tensor.bfloat16(), tensor.float().requires_grad_(), list(tensor))
    by_label = [sampling.balanced(v) for v in (*labels, lambda record: torch.tensor(int(record["x"]) > 0))]
    by_weight = (weights, weights.bfloat16(), weights.clone().requires_grad_(), list(weights))
    for made in (by_label, [sampling.weighted(values) for values in by_weight]):
        assert len({tuple(epoch(Pipeline(source(4), sampling=each))) for each in made}) == 1


def test_weights_may_be_a_function_of_the_label_which_is_called_once_a_class() -> None:
    calls: list[str] = []

    def weigh(label: str) -> float:
        calls.append(label)
        return 3.0 if label == "rare" else 1.0

    kinds = ["rare" if i % 10 == 0 else "usual" for i in range(100)]
    records = source(100, label=kinds, kind=kinds)
    by_field = sampling.weighted({"rare": 3, "usual": 1}, field="kind")
    plain = sampling.weighted([3.0 if kind == "rare" else 1.0 for kind in kinds])
    pipelines = [Pipeline(records, sampling=made) for made in (sampling.weighted(weigh), by_field, plain)]
    assert sorted(calls) == ["rare", "usual"] and len({tuple(epoch(made)) for made in pipelines}) == 1
    assert len({made.fingerprint for made in pipelines}) == 1, "what counts are the weights, not their origin"


def test_a_source_with_cheap_labels_reads_no_record_for_them(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow
    import pyarrow.parquet

    for name, count in (("cat", 1), ("dog", 3)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(count):
            (tmp_path / "images" / name / f"{number}.png").write_bytes(b"no image at all")
    folder = sources.image_folder(tmp_path / "images")
    monkeypatch.setattr(type(folder), "_read", lambda *_: pytest.fail("an image was read"))
    assert folder.column("label").tolist() == [0, 1, 1, 1]
    balanced = Pipeline(folder, sampling=sampling.balanced("label", samples=6))
    assert Counter(epoch(balanced)) == {0: 3, 1: 1, 2: 1, 3: 1}

    table = pyarrow.table({"image": [b"x" * 1000] * 6, "label": [0, 0, 1, 1, 1, 1]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    rows = sources.parquet(tmp_path / "t.parquet")
    decoded: list[Any] = []
    read_row_group = pyarrow.parquet.ParquetFile.read_row_group

    def watch(self: Any, *args: Any, columns: Any, **options: Any) -> Any:
        decoded.extend(columns)
        return read_row_group(self, *args, columns=columns, **options)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", watch)
    assert rows.column("label").tolist() == [0, 0, 1, 1, 1, 1] and set(decoded) == {"label"}
    assert rows.take(3).column("label").tolist() == [0, 0, 1]
    assert rows[0].keys() == {"image", "label"}, "the source is as it was"


def test_the_fingerprint_knows_weights_labels_and_the_number_of_positions() -> None:
    samplings: list[Any] = [None, *(sampling.balanced(FOUR, samples=n) for n in (None, 5))]
    samplings += [sampling.balanced([0, 0, 1, 1]), *(sampling.weighted([1, 1, 1, last]) for last in (1, 2))]
    samplings += [sampling.weighted([1, 1, 1, 2], samples=2)]
    pipelines = [Pipeline(source(4), sampling=made) for made in samplings]
    fingerprints = [pipeline.fingerprint for pipeline in pipelines]
    assert None not in fingerprints and len(set(fingerprints)) == len(pipelines)
    assert [name for name, _ in pipelines[1].parts() or ()] == ["source", "seed", "sampling", "on_error"]
    again = Pipeline(source(4), sampling=sampling.balanced(["a", "b", "b", "b"]))
    assert again.fingerprint == fingerprints[1], "equal classes by other names give an equal order"
    difference = pipelines[1].find_difference(pipelines[3].describe_for_peers())
    assert difference is not None and "sampling" in difference.reason


def test_a_copy_in_another_process_draws_the_same() -> None:
    script = """if True:
        import pickle, sys
        for pipeline in pickle.load(sys.stdin.buffer):
            print(pipeline.order()(3, 0, len(pipeline)).tolist(), pipeline.fingerprint)
    """
    samplings = [sampling.weighted(np.arange(30.0)), sampling.balanced("label", samples=41)]
    samplings += [sampling.bucketed("label"), sampling.consecutive(4)]
    pipelines = [Pipeline(source(30, label=np.arange(30) % 4), seed=2, sampling=made) for made in samplings]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", script]
    printed = subprocess.check_output(command, input=pickle.dumps(pipelines), env=environment).decode()
    assert printed.splitlines() == [f"{epoch(pipeline, 3)} {pipeline.fingerprint}" for pipeline in pipelines]


LENGTHS = np.random.default_rng(0).lognormal(4, 0.7, 3000).astype(np.int64) + 1


@given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 5), st.integers(0, 3), st.data())
@settings(deadline=None)
def test_by_length_each_record_comes_once_whatever_the_pieces(
    n: int, bucket: int, window: int, epoch: int, data: st.DataObject
) -> None:
    records = sources.arrays(length=LENGTHS[:n])
    order = Pipeline(records, seed=7, sampling=sampling.bucketed("length", bucket=bucket, window=window)).sampling
    assert order is not None
    whole = order(epoch, 0, n)
    assert sorted(whole.tolist()) == list(range(n))
    cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=4))})
    pieces = [order(epoch, start, stop) for start, stop in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize("batch", [8, 32, 64, 256])
def test_by_length_little_of_a_batch_is_padding_and_neighbours_change(batch: int) -> None:
    order = Pipeline(sources.arrays(length=LENGTHS), sampling=sampling.bucketed("length")).sampling
    assert order is not None
    epochs = [order(epoch, 0, len(LENGTHS)) for epoch in (0, 1)]
    for indices in epochs:
        batches = [LENGTHS[indices[at : at + batch]] for at in range(0, len(LENGTHS), batch)]
        padded = sum(len(each) * each.max() for each in batches) / LENGTHS.sum()
        assert padded < 1.4
        longest = np.array([each.max() for each in batches[:-1]])
        assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.9, "short ones do not all come first"
    first, second = (indices[:batch].tolist() for indices in epochs)
    assert set(first) != set(second) and first != sorted(first, key=lambda i: LENGTHS[i])


def test_lengths_are_those_of_texts_of_arrays_or_as_a_function_says() -> None:
    texts = ["a" * int(length) for length in LENGTHS[:200]]
    records = sources.arrays(text=np.array(texts, object), number=LENGTHS[:200])
    made = [
        Pipeline(records, sampling=sampling.bucketed(given, bucket=8))
        for given in ("text", "number", LENGTHS[:200], lambda record: len(record["text"]))
    ]
    assert len({pipe.fingerprint for pipe in made}) == 1
    assert Pipeline(records, sampling=sampling.bucketed("text", bucket=9)).fingerprint != made[0].fingerprint


@given(n=st.integers(1, 60), data=st.data())
def test_consecutive_epochs_go_through_all_records_in_turn(n: int, data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, n))
    order = Pipeline(source(n), seed=1, sampling=sampling.consecutive(samples)).sampling
    assert order is not None
    for number in range(4):
        drawn = order(number, 0, samples).tolist()
        assert sorted(drawn) == sorted((number * samples + place) % n for place in range(samples))
        assert order(number, samples // 2, samples).tolist() == drawn[samples // 2 :]
