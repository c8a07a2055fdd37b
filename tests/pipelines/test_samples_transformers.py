"""Collators of transformers as `collate=` functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from core_pipes import leaves_nothing  # noqa: F401

from pipelines import Feeder, Pipeline, attach, from_samples, sources, stages

pytestmark = pytest.mark.more  # tests/pipelines/test_samples_collate.py has a collate_fn like theirs
TEXTS = [f"{'a good film ' * (n % 4)}or bad number {n}" for n in range(12)]
MOST = 16


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The library. It imports torch._dynamo, which makes a folder where TMPDIR then points."""
    import torch._dynamo  # noqa: F401

    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer(transformers: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    words.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=list(special.values())))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def encoded(tokenizer: Any) -> Pipeline:
    def encode(sample: dict[str, Any]) -> dict[str, Any]:
        found = tokenizer(TEXTS[int(sample["label"])])
        return {"label": sample["label"], **{name: np.array(found[name]) for name in NAMES}}

    pipeline = Pipeline(sources.arrays(label=np.arange(len(TEXTS))), seed=2).map(encode, id="encode")
    for name in NAMES:
        pipeline = pipeline.map(stages.ragged(name, most=MOST))
    return pipeline


NAMES = ("input_ids", "attention_mask")


def test_a_padding_collator_pads_to_the_longest_as_it_does_for_a_data_loader(
    transformers: Any, tokenizer: Any
) -> None:
    pad = transformers.DataCollatorWithPadding(tokenizer)
    pipeline = encoded(tokenizer)
    batches = [dict(batch) for batch in pipeline.loader(5, 1, collate=from_samples(pad))]
    for batch in batches:
        features = [{**tokenizer(TEXTS[int(i)]), "label": int(i)} for i in batch["index"]]
        expected = pad([{name: each[name] for name in (*NAMES, "label")} for each in features])
        assert batch.keys() == {*expected, "index"}
        assert all(torch.equal(batch[name], expected[name]) for name in expected)
    with Feeder(pipeline, capacity=10) as feeder:
        shared = attach(feeder.address, pipeline, 5, 1, collate=from_samples(pad))
        for batch, alone in zip(shared, batches, strict=True):
            assert all(torch.equal(batch[name], alone[name]) for name in alone)
