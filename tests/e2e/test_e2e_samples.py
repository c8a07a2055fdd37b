"""Ensembles of samples of any form: ragged boxes in nested targets, and texts tokenized in the member."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from kit.finished_runs import finished_hashes, of_kind

import ensemble
from ensemble import Ensemble, Folds, Member, Recipe, Resources
from ensemble.artifact.layout import ArtifactError
from ensemble.artifact.predictor import predict
from ensemble.store import RunDir, load_predictions
from ensemble.user_code.fingerprint import code_of
from pipelines import Batch, Pipeline, from_samples, sampling, sources, stages

RECORDS, BATCH = 48, 8


def to_detection(sample: dict[str, Any]) -> dict[str, Any]:
    n = int(sample["at"]) % 4
    rng = np.random.default_rng(int(sample["at"]))
    image = rng.random((1, 8, 8), dtype=np.float32)
    return {"image": image, "target": {"boxes": rng.random((n, 4), dtype=np.float32), "size": (8, 8)}}


def flip(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "image": sample["image"][..., ::-1] if rng.random() < 0.5 else sample["image"]}


def die_once(batch: Any) -> None:
    """Kills the process in its second epoch, if the test says so."""
    marker = os.environ.get("KILL_ONCE")
    if marker and (batch.epoch, batch.step) == (1, 3):
        with contextlib.suppress(FileExistsError), open(marker, "x"):  # one of two that come at once
            os.kill(os.getpid(), signal.SIGKILL)


def box_model(params: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(64, params["width"]), nn.ReLU(), nn.Linear(params["width"], 4))


def box_loss(net: Any, batch: Any) -> Any:
    import torch

    die_once(batch)
    outputs = net(batch["image"])
    boxes = batch["target"]["boxes"]
    assert isinstance(boxes, list) and batch["target"]["size"][0].tolist() == [8] * len(boxes)
    means = torch.stack([row.mean(dim=0) if len(row) else row.new_zeros(4) for row in boxes])
    return (outputs - means).square().mean(dim=1)


def box_predict(net: Any, batch: Any) -> Any:
    return net(batch["image"])


def detection(**options: Any) -> Ensemble:
    data = Pipeline(sources.arrays(at=np.arange(RECORDS)), seed=3).map(to_detection)
    data = data.map(stages.ragged("target.boxes", most=4))
    return declare(
        Recipe(model=box_model, loss=box_loss, predict=box_predict, task="free"), data, data.map(flip), options
    )


TEXTS = ["good film", "bad film", "a good one", "bad", "good", "the bad and the bad"]


def words(sample: dict[str, Any]) -> dict[str, Any]:
    text = TEXTS[int(sample["at"]) % len(TEXTS)]
    return {"text": text, "label": np.int64("good" in text)}


def tokenize(batch: Batch, rng: np.random.Generator | None) -> dict[str, Any]:
    """Ids of words, padded to the longest text of the batch; in training a word may be masked."""
    import torch

    ids = [[sum(map(ord, word)) % 50 + 2 for word in text.split()] for text in batch["text"]]
    if rng is not None:
        ids = [[1 if rng.random() < 0.1 else each for each in row] for row in ids]
    longest = max(map(len, ids))
    return {"ids": torch.tensor([row + [0] * (longest - len(row)) for row in ids]), "label": batch["label"]}


def pad_all(samples: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    batch: Any = {"text": [each["text"] for each in samples], "label": torch.stack([e["label"] for e in samples])}
    return tokenize(batch, None)


def text_model(params: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(nn.EmbeddingBag(52, params["width"]), nn.Linear(params["width"], 2))


def text_loss(net: Any, batch: Any) -> Any:
    from torch.nn import functional

    die_once(batch)
    return functional.cross_entropy(net(batch["ids"]), batch["label"], reduction="none")


def texts(collate: Any = tokenize, **options: Any) -> Ensemble:
    data = Pipeline(sources.arrays(at=np.arange(RECORDS)), seed=3).map(words)
    data = data.map(stages.text("text", most_bytes=32))
    return declare(Recipe(model=text_model, loss=text_loss, collate=collate), data, data, options)


def balanced(**options: Any) -> Ensemble:
    """Of an order in which records repeat, and folds of them."""
    drawn = sampling.balanced(np.arange(RECORDS) % len(TEXTS) == 0, samples=70)
    train = Pipeline(sources.arrays(at=np.arange(RECORDS)), seed=3, sampling=drawn).map(words)
    return texts(train=train.map(stages.text("text", most_bytes=32)), weights=Folds(2), **options)


def declare(recipe: Recipe, data: Pipeline, train: Pipeline, options: dict[str, Any]) -> Ensemble:
    members = [Member({"width": 8 + i, "lr": 0.05}, batch_size=BATCH) for i in range(2)]
    usual: dict[str, Any] = {"recipe": recipe, "members": members, "train": train, "valid": data.take(20)}
    usual |= {"epochs": 2, "gate_timeout_s": 300.0, "resources": Resources(cpus_per_worker=0.1)}
    return Ensemble(name="samples", **{**usual, **options})


@pytest.mark.parametrize(
    ("make", "wide"),
    [(detection, False), *(pytest.param(x, True, marks=pytest.mark.more) for x in (detection, texts, balanced))],
)
def test_members_that_share_and_are_resumed_end_with_the_bits_of_members_alone(
    make: Any, wide: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the two that share, the one that comes first to a step of the second epoch is killed there."""
    members = [Member({"width": 8 + i, "lr": 0.05}, workers=1 + (i and wide), batch_size=BATCH) for i in range(2)]
    alone = make(members=members, sharing="independent")
    ensemble.submit(alone, tmp_path / "alone", executor="local" if wide else "inline").wait()
    monkeypatch.setenv("KILL_ONCE", str(tmp_path / "killed"))
    ensemble.submit(make(members=members), tmp_path / "shared", executor="local").wait()
    assert (tmp_path / "killed").exists() and len(of_kind(tmp_path / "shared", "failed")) == 1
    assert finished_hashes(tmp_path / "shared") == finished_hashes(tmp_path / "alone")
    assert any(event["shared_batches"] for event in of_kind(tmp_path / "shared", "epoch"))
    for number in (0, 1):
        saved = load_predictions(RunDir(tmp_path / "shared").predictions(f"member-{number}"), "valid")
        assert sorted(saved.index.tolist()) == list(range(20))


def test_a_run_with_a_collate_function_predicts_and_says_why_it_is_no_artifact(tmp_path: Path) -> None:
    alone = [Member({"width": 8, "lr": 0.05}, batch_size=BATCH)]
    ensemble.submit(texts(members=alone), tmp_path / "run", executor="inline").wait()
    with pytest.raises(ArtifactError, match=r"Recipe\.collate.*ensemble predict RUN DATA"):
        ensemble.export(tmp_path / "run", tmp_path / "artifact")
    predict(tmp_path / "run", out=tmp_path / "found.parquet", split="valid")
    table = pyarrow.parquet.read_table(tmp_path / "found.parquet")
    assert table["index"].to_pylist() == list(range(20))
    batch = next(iter(texts().valid.resident().loader(20)))  # type: ignore[union-attr]
    made = ensemble.load(tmp_path / "run")(tokenize(batch, None))
    assert made.argmax(dim=1).tolist() == table["class"].to_pylist()


def test_the_code_of_a_collate_function_is_known() -> None:
    def other(batch: Batch) -> dict[str, Any]:
        return {"ids": batch["label"][:, None], "label": batch["label"]}

    plain = code_of(texts())
    assert "Recipe.collate" in " ".join(code_of(texts(other)).changed(plain))
    adapted = code_of(texts(from_samples(pad_all)))
    assert adapted.fingerprint != plain.fingerprint != code_of(texts(None)).fingerprint
    assert adapted.changed(code_of(texts(from_samples(pad_all)))) == []
    assert adapted.changed(code_of(texts(from_samples(lambda samples: {}))))


def test_a_loss_of_other_rows_than_samples_is_refused_with_what_to_do(tmp_path: Path) -> None:
    packed = lambda net, batch: text_loss(net, batch).repeat(2)  # noqa: E731
    recipe = Recipe(model=text_model, loss=packed, task="classification", collate=tokenize)
    members = [Member({"width": 8, "lr": 0.1}, batch_size=BATCH)]
    ensemble.submit(texts(members=members, recipe=recipe), tmp_path, "inline").wait()
    (failed,) = of_kind(tmp_path, "failed")
    assert "one value per sample, [8], got a tensor of shape [16]" in failed["error"]
