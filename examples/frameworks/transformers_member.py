"""Film reviews with the Trainer of Hugging Face: transformers_plain.py as an ensemble of eight seeds.

ensemble run examples/frameworks/transformers_member.py --set data=DIR      (DIR holds imdb/train.parquet)
"""

import pyarrow.dataset
from datasets import Dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from ensemble import Ensemble, Member, Recipe
from ensemble.integrations.transformers import MemberTrainer
from pipelines import Pipeline, from_samples, sources, stages

INPUTS = ("input_ids", "attention_mask")
FIELDS = (*INPUTS, "labels")


def read(data, samples):
    """The reviews as tokens, and what pads them."""
    table = pyarrow.dataset.dataset(f"{data}/imdb/train.parquet").head(samples, columns=["text", "label"])
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordLevelTrainer(vocab_size=8000, special_tokens=["[PAD]", "[UNK]"])
    words.train_from_iterator(table["text"].to_pylist(), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", model_max_length=128)
    columns = ["input_ids", "attention_mask", "label"]
    encoded = Dataset(table).map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)
    return encoded.select_columns(columns).train_test_split(0.2, seed=0), DataCollatorWithPadding(tokenizer)


def build(params):
    size = params["width"]
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 2 * size}
    return BertForSequenceClassification(BertConfig(vocab_size=8000, hidden_size=size, **sizes))


def compute_metrics(found):
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def predict(model, batch):
    return model(**{name: batch[name] for name in INPUTS}).logits.softmax(-1)


def train(member):
    args = TrainingArguments(
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        report_to="none",
    )
    trainer = MemberTrainer(member, build(member.params), args, fields=FIELDS, compute_metrics=compute_metrics)
    trainer.train()
    member.predict_all()


def spec(data: str = "data", seeds: int = 8, epochs: int = 3, samples: int = 4000):
    parts, collator = read(data, samples)
    train_part, valid_part = (Pipeline(sources.huggingface(parts[name])) for name in ("train", "test"))
    for name in INPUTS:
        train_part, valid_part = (part.map(stages.ragged(name, most=128)) for part in (train_part, valid_part))
    trained = {"model": build, "train": train, "predict": predict, "collate": from_samples(collator)}
    return Ensemble(
        name="reviews",
        recipe=Recipe(**trained, target="labels", objective="eval_accuracy", mode="max"),
        members=[Member({"width": 64}) for _ in range(seeds)],
        train=train_part,
        valid=valid_part,
        epochs=epochs,
        batch_size=32,
    )
