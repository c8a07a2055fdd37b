"""Records of any length: time series of several channels, and texts, shared and alone."""

from __future__ import annotations

from pathlib import Path

import core_pipes as pipes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from core_pipes import Feeder, leaves_nothing  # noqa: F401 - a fixture
from ragged_data import CHANNELS, LABELS, LONGEST, jitter, series

from pipelines import Pipeline, sources, stages


def test_series_of_any_length_have_the_same_bits_shared_and_alone(tmp_path: Path) -> None:
    x = pa.array([s.tolist() for s in series()], pa.list_(pa.list_(pa.float32())))
    pq.write_table(pa.table({"x": x, "label": LABELS}), tmp_path / "series.parquet", row_group_size=16)
    pad = stages.pad("x", LONGEST, 0, "steps", mask="own", axis=-1)
    pipe = Pipeline(sources.parquet(tmp_path / "series.parquet"), seed=4).map(jitter).map(pad)
    assert pipe.fields["x"] == ((CHANNELS, LONGEST), "float32")
    pipes.check_shared(pipe, 3, workers=2)


def test_batches_hold_each_series_and_its_length() -> None:
    whole = series()
    pipe = Pipeline(sources.arrays(x=whole), seed=1).map(stages.pad("x", LONGEST, -9, "steps", axis=1))
    for batch in pipe.loader(7):
        for x, steps, index in zip(batch["x"], batch["steps"], batch["index"], strict=True):
            np.testing.assert_array_equal(x[:, :steps].numpy(), whole[index])
            assert (x[:, steps:] == -9).all()
