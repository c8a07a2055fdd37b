"""Film reviews with the Trainer of Hugging Face, as people write it: the original of transformers_member.py.

python examples/frameworks/transformers_plain.py DATA [--seed 0] [--epochs 3] [--samples 4000]
"""

import argparse

import pyarrow.dataset
from datasets import Dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)


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


def main(data, seed, epochs, samples):
    set_seed(seed)
    parts, collator = read(data, samples)
    args = TrainingArguments(
        output_dir="trainer",
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        report_to="none",
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=32,
        seed=seed,
        use_cpu=True,
    )
    trainer = Trainer(
        build({"width": 64}),
        args,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        data_collator=collator,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    print(f"accuracy {trainer.evaluate()['eval_accuracy']:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    for name, default in (("seed", 0), ("epochs", 3), ("samples", 4000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    main(**vars(parser.parse_args()))
