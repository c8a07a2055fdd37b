"""LoRA on a small BERT that is made here, not downloaded: six ranks, each a training of its own.

The form is that of https://github.com/huggingface/peft (peft 0.21.2, transformers 5.23.0 on PyPI).

python examples/ports/lora/plain.py [--members 6] [--epochs 2]
"""

import argparse
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

BATCH, LENGTH, WORDS = 32, 48, 64
RANKS = (2, 4, 8, 16, 24, 32)


def make_texts():
    """Rows of words; the class says which half of the words is the more frequent: 2,500 rows; 500 validate."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 2500)
    words = rng.integers(0, WORDS // 2, (2500, LENGTH))
    words += (WORDS // 2) * (rng.random(words.shape) < np.where(labels, 0.7, 0.3)[:, None])
    return (words[:2000], labels[:2000]), (words[2000:], labels[2000:])


class Texts(torch.utils.data.Dataset):
    def __init__(self, words, labels):
        self.words, self.labels = torch.from_numpy(words), torch.from_numpy(labels)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.words[i], "labels": self.labels[i]}


def build(rank):
    """The base is the same for all; its matrices are frozen, and the adapters are trained."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192}
        base = BertForSequenceClassification(BertConfig(vocab_size=WORDS, **sizes))
    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=rank, lora_alpha=2 * rank, target_modules=["query", "value"])
    return get_peft_model(base, config)


def count_right(found):
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def make_arguments(folder, epochs):
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        num_train_epochs=epochs,
        learning_rate=5e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )


def train(seed, rank, epochs):
    torch.set_num_threads(1)
    set_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        options = {"args": make_arguments(folder, epochs), "compute_metrics": count_right}
        trainer = Trainer(build(rank), train_dataset=Texts(*DATA[0]), eval_dataset=Texts(*DATA[1]), **options)
        trainer.train()
    return trainer.state.log_history[-2]["eval_accuracy"]


def main():
    global DATA
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    DATA = make_texts()  # before the processes are forked
    count = options.members
    with ProcessPoolExecutor(2) as pool:
        print(json.dumps(list(pool.map(train, range(count), RANKS[:count], [options.epochs] * count))))


if __name__ == "__main__":
    main()
