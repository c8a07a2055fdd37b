"""Records of any length, end to end: time series of several channels and texts, into small recurrent nets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import core_pipes as pipes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from core_pipes import Feeder, leaves_nothing  # noqa: F401 - a fixture
from ragged_data import CHANNELS, LABELS, LONGEST, N, SeriesDataset, jitter, series

torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo")  # optimizers import it, and it makes a folder where TMPDIR then points

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from pipelines import Pipeline, SampleError, attach, sources, stages  # noqa: E402


def records(kind: str, folder: Path) -> Any:
    if kind == "arrays":
        return sources.arrays(x=series(), label=LABELS)
    if kind == "dataset":
        return sources.dataset(SeriesDataset(), id="series")
    path = folder / "series.parquet"
    x = pa.array([s.tolist() for s in series()], pa.list_(pa.list_(pa.float32())))
    pq.write_table(pa.table({"x": x, "label": LABELS}), path, row_group_size=16)
    return sources.parquet(path)


def padded(source: Any, value: float = 0) -> Pipeline:
    return Pipeline(source, seed=4).map(jitter).map(stages.pad("x", LONGEST, value, "steps", mask="own", axis=-1))


class Recurrent(nn.Module):
    """The last state of each series, at its own end."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(CHANNELS, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, batch: Any) -> torch.Tensor:
        steps = nn.utils.rnn.pack_padded_sequence(
            batch["x"].transpose(1, 2), batch["steps"], batch_first=True, enforce_sorted=False
        )
        return self.out(self.gru(steps)[1][0])


class Convolutional(nn.Module):
    """The mean of the features over the steps that are the series' own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(CHANNELS, 8, 1), nn.Linear(8, 2)

    def forward(self, batch: Any) -> torch.Tensor:
        own = batch["own"].unsqueeze(1)
        features = torch.where(own, self.conv(batch["x"]).relu(), 0.0)
        return self.out(features.sum(2) / own.sum(2))


def trained(make: Callable[[], nn.Module], batches: Iterable[Any]) -> list[bytes]:
    """The weights, to the last bit, after a step on each batch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for batch in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(batch), batch["label"]).backward()
            optimizer.step()
    finally:
        torch.set_num_threads(threads)
    return [p.detach().numpy().tobytes() for p in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("parquet", Recurrent),
        pytest.param("arrays", Convolutional, marks=pytest.mark.more),
        pytest.param("dataset", Recurrent, marks=pytest.mark.more),
    ],
)
def test_series_of_any_length_train_to_the_same_bits_shared_and_alone(
    kind: str, make: Any, tmp_path: Path
) -> None:
    pipe = padded(records(kind, tmp_path))
    assert pipe.fields["x"] == ((CHANNELS, LONGEST), "float32")
    alone = trained(make, pipe.loader(8, epochs=3))
    with Feeder(pipe, workers=2, capacity=64, expect=1) as feeder:
        loader = attach(feeder.address, pipe, 8, epochs=range(3))
        assert trained(make, loader) == alone
        assert loader.stats()["private_batches"] == 0


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
    said = rf"sample 7 \(arrays\(x, label\):row 7\): Pad: field 'x' has {LONGEST} entries, more than length="
    with pytest.raises(SampleError, match=said):
        list(Pipeline(source, shuffle=False).map(longer).loader(60))

    pipe = Pipeline(source, on_error="skip", max_skipped=1.0).map(longer)
    with pytest.warns(UserWarning, match="left out: sample"):
        alone = [pipes.record(batch) for batch in pipe.loader(8)]
    with Feeder(pipe, capacity=64, expect=1) as feeder:
        shared = [pipes.record(batch) for batch in attach(feeder.address, pipe, 8, epochs=range(1))]
        assert feeder.stats()["skipped"] == len(too_long)
    assert shared == alone
    assert {i for record in alone for i in record[3]} == set(range(N)) - too_long


class Reader(nn.Module):
    """Texts that are padded in front: the last state of an LSTM is at their end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 6, padding_idx=0)
        self.lstm, self.out = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.out(self.lstm(self.embed(batch["text"]))[1][0][0])


def test_texts_of_any_length_train_to_the_same_bits_shared_and_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    words = [f"w{i}" for i in range(30)]
    texts = [" ".join(rng.choice(words, n)) for n in rng.integers(0, 50, N)]
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": texts, "label": LABELS}), path, row_group_size=16)
    pipe = (
        Pipeline(sources.parquet(path), seed=2, shuffle="blocks", shuffle_window=2)
        .map(stages.tokenize("text", words))
        .map(stages.pad("text", 24, lengths="words", side="start", truncate="end"))
    )
    alone = trained(Reader, pipe.loader(8, epochs=2))
    with Feeder(pipe, capacity=64, expect=1) as feeder:
        loader = attach(feeder.address, pipe, 8, epochs=range(2))
        assert trained(Reader, loader) == alone
        assert loader.stats()["private_batches"] == 0
    lengths = {i: int(n) for b in pipe.loader(8) for i, n in zip(b["index"].tolist(), b["words"], strict=True)}
    assert lengths == {i: min(24, len(text.split())) for i, text in enumerate(texts)}
