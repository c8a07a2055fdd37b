"""A collator of transformers as a `collate=` function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from core_pipes import leaves_nothing  # noqa: F401

from pipelines import Pipeline, from_samples, sources, stages

TEXTS = [f"{'a good film ' * (n % 4)}or bad number {n}" for n in range(12)]
NAMES = ("input_ids", "attention_mask")


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The library. It imports torch._dynamo, which makes a folder where TMPDIR then points."""
    import torch._dynamo  # noqa: F401

    return pytest.importorskip("transformers")


@pytest.mark.more  # tests/pipelines/test_samples_collate.py has a collate_fn like theirs
def test_a_padding_collator_pads_to_the_longest_as_it_does_for_a_data_loader(transformers: Any) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    pad = transformers.DataCollatorWithPadding(tokenizer)

    def encode(sample: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer(TEXTS[int(sample["label"])])
        return {"label": sample["label"], **{name: np.array(encoded[name]) for name in NAMES}}

    pipeline = Pipeline(sources.arrays(label=np.arange(len(TEXTS))), seed=2).map(encode, id="encode")
    for name in NAMES:
        pipeline = pipeline.map(stages.ragged(name, most=16))
    for batch in pipeline.loader(5, 1, collate=from_samples(pad)):
        features = [{**tokenizer(TEXTS[int(i)]), "label": int(i)} for i in batch["index"]]
        expected = pad([{name: one[name] for name in (*NAMES, "label")} for one in features])
        assert batch.keys() == {*expected, "index"}
        assert all(torch.equal(batch[name], expected[name]) for name in expected)
