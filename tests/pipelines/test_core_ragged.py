"""Records of any length: time series of several channels, and texts, shared and alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import core_pipes as pipes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from core_pipes import Feeder, leaves_nothing  # noqa: F401 - a fixture
from ragged_data import CHANNELS, LABELS, LONGEST, N, SeriesDataset, jitter, series

from pipelines import Pipeline, SampleError, attach, sources, stages


def records(kind: str, folder: Path) -> Any:
    if kind == "arrays":
        return sources.arrays(x=series(), label=LABELS)
    if kind == "dataset":
        return sources.dataset(SeriesDataset(), id="series")
    path = folder / "series.parquet"
    x = pa.array([s.tolist() for s in series()], pa.list_(pa.list_(pa.float32())))
    pq.write_table(pa.table({"x": x, "label": LABELS}), path, row_group_size=16)
    return sources.parquet(path)


@pytest.mark.parametrize(
    "kind", ["parquet", *(pytest.param(kind, marks=pytest.mark.more) for kind in ("arrays", "dataset"))]
)
def test_series_of_any_length_have_the_same_bits_shared_and_alone(kind: str, tmp_path: Path) -> None:
    pad = stages.pad("x", LONGEST, 0, "steps", mask="own", axis=-1)
    pipe = Pipeline(records(kind, tmp_path), seed=4).map(jitter).map(pad)
    assert pipe.fields["x"] == ((CHANNELS, LONGEST), "float32")
    pipes.check_shared(pipe, 3, workers=2)


def test_batches_hold_each_series_and_its_length() -> None:
    whole = series()
    pipe = Pipeline(sources.arrays(x=whole), seed=1).map(stages.pad("x", LONGEST, -9, "steps", axis=1))
    for batch in pipe.loader(7):
        for x, steps, index in zip(batch["x"], batch["steps"], batch["index"], strict=True):
            np.testing.assert_array_equal(x[:, :steps].numpy(), whole[index])
            assert (x[:, steps:] == -9).all()


def test_a_series_longer_than_declared_is_named_or_skipped_for_all() -> None:
    source = sources.arrays(x=series(), label=LABELS)
    longer = stages.pad("x", LONGEST - 1, axis=-1)
    too_long = {i for i, x in enumerate(series()) if x.shape[1] == LONGEST}
    words = rf"sample 7 \(arrays\(x, label\):row 7\): Pad: field 'x' has {LONGEST} entries, more than length="
    with pytest.raises(SampleError, match=words):
        list(Pipeline(source, shuffle=False).map(longer).loader(60))
    pipe = Pipeline(source, on_error="skip", max_skipped=1.0).map(longer)
    with pytest.warns(UserWarning, match="left out: sample"):
        alone = [pipes.record(batch) for batch in pipe.loader(8)]
    with Feeder(pipe, capacity=64, expect=1) as feeder:
        assert [pipes.record(batch) for batch in attach(feeder.address, pipe, 8, epochs=range(1))] == alone
        assert feeder.stats()["skipped"] == len(too_long)
    assert {i for record in alone for i in record[3]} == set(range(N)) - too_long


def test_texts_of_any_length_have_the_same_bits_shared_and_alone(tmp_path: Path) -> None:
    rng, words = np.random.default_rng(1), [f"w{i}" for i in range(30)]
    texts = [" ".join(rng.choice(words, n)) for n in rng.integers(0, 50, N)]
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": texts, "label": LABELS}), path, row_group_size=16)
    pad = stages.pad("text", 24, lengths="words", side="start", truncate="end")
    pipe = Pipeline(sources.parquet(path), seed=2, shuffle="blocks", shuffle_window=2)
    pipe = pipe.map(stages.tokenize("text", words)).map(pad)
    pipes.check_shared(pipe)
    lengths = {i: int(n) for b in pipe.loader(8) for i, n in zip(b["index"].tolist(), b["words"], strict=True)}
    assert lengths == {i: min(24, len(text.split())) for i, text in enumerate(texts)}
