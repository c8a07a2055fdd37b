"""Token classification by a Trainer of transformers, whose collator pads each batch to its longest text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from event_dicts import fold, read_events  # noqa: E402
from finished_runs import of_kind  # noqa: E402
from tv import import_torchvision  # noqa: E402

import ensemble  # noqa: E402
from ensemble import Ensemble, Member, Recipe, Resources  # noqa: E402
from ensemble.store import RunDir, load_predictions  # noqa: E402
from pipelines import Pipeline, sources, stages  # noqa: E402

pytestmark = [pytest.mark.more, pytest.mark.filterwarnings("ignore")]
MAX, TAGS = 24, 3
FIELDS = ("input_ids", "attention_mask", "labels")


def encode(sample: dict[str, Any]) -> dict[str, Any]:
    """A text of 4 to 21 words, each with a tag."""
    rng = np.random.default_rng(int(sample["at"]))
    ids = rng.integers(5, 50, int(rng.integers(4, 22)))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids // 17}


def pad(samples: Any, length: int) -> dict[str, Any]:
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {name: samples[name].padded(value, length) for name, value in fill.items()}


def pad_to_longest(batch: Any) -> dict[str, Any]:
    return pad(batch, int(batch["input_ids"].lengths.max()))


def pad_to_max(batch: Any) -> dict[str, Any]:
    return pad(batch, MAX)


def build(params: dict[str, Any]) -> Any:
    from transformers import BertConfig, BertForTokenClassification

    sizes = {"hidden_size": params["width"], "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForTokenClassification(
        BertConfig(
            vocab_size=50, num_labels=TAGS, intermediate_size=32, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, **sizes,
        )
    )  # fmt: skip


def train(member: Any) -> None:
    from transformers import TrainingArguments

    from ensemble.integrations.transformers import MemberTrainer

    def compute_metrics(found: Any) -> dict[str, float]:
        known = found.label_ids != -100
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids)[known].mean())}

    args = TrainingArguments(
        learning_rate=0.02,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        lr_scheduler_type="constant",
    )
    trainer = MemberTrainer(member, build(member.params), args, fields=FIELDS, compute_metrics=compute_metrics)
    trainer.train()
    member.predict_all()


def texts() -> list[Any]:
    return [sources.arrays(at=np.arange(first, last)) for first, last in ((0, 60), (60, 90))]


def declare(collate: Any) -> Ensemble:
    train_data, valid = (Pipeline(part, seed=0).map(encode) for part in texts())
    for name in FIELDS:
        train_data, valid = (each.map(stages.ragged(name, most=MAX)) for each in (train_data, valid))
    return Ensemble(
        name="tokens",
        recipe=Recipe(model=build, train=train, target="labels", collate=collate, objective="eval_accuracy"),
        train=train_data,
        valid=valid,
        members=[Member({"width": width}) for width in (8, 16)],
        epochs=3,
        batch_size=8,
        resources=Resources(cpus_per_worker=0.5),
    )


@pytest.mark.parametrize("executor", ["inline", "local"])
def test_texts_padded_to_the_longest_of_a_batch_have_the_figures_of_texts_padded_to_one_length(
    tmp_path: Path, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_torchvision(monkeypatch)
    pytest.importorskip("transformers")
    results, epochs = [], []
    for name, collate in (("longest", pad_to_longest), ("max", pad_to_max)):
        results.append(ensemble.submit(declare(collate), tmp_path / name, executor).wait())
        assert not [each["error"] for each in of_kind(tmp_path / name, "failed")]
        members = fold(read_events(tmp_path / name / "events.jsonl")).members.values()
        assert [(each.state, each.remarks) for each in members] == [("finished", [])] * 2
        epochs.append({(e["member"], e["epoch"]): e["metrics"] for e in of_kind(tmp_path / name, "epoch")})
    for key, metrics in epochs[0].items():
        assert metrics == pytest.approx(epochs[1][key], rel=1e-3)
    saved = [
        load_predictions(RunDir(tmp_path / name).predictions("member-1"), "valid") for name in ("longest", "max")
    ]
    assert [each.values.shape[2] for each in saved] == [TAGS] * 2
    assert saved[0].values.shape[1] < MAX == saved[1].values.shape[1]
    values = [each.values[each.target != -100] for each in saved]
    np.testing.assert_allclose(values[0], values[1], atol=1e-3)
    for of, metrics in results[1].combined.metrics.items():
        assert results[0].combined.metrics[of] == pytest.approx(metrics, rel=0.01, nan_ok=True)
