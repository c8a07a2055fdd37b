"""Film reviews by a loop with accelerate, as its tutorial has it: the original of accelerate_member.py.

python examples/frameworks/accelerate_plain.py DATA [--seed 0] [--epochs 3] [--samples 4000]
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup
from transformers_plain import build, read


def main(data, seed, epochs, samples):
    set_seed(seed)
    parts, collator = read(data, samples)
    batches = DataLoader(parts["train"], batch_size=32, shuffle=True, collate_fn=collator)
    validation = DataLoader(parts["test"], batch_size=32, collate_fn=collator)
    accelerator = Accelerator(cpu=True)
    model = build({"width": 64})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 20, epochs * len(batches))
    model, optimizer, batches, validation, schedule = accelerator.prepare(
        model, optimizer, batches, validation, schedule
    )
    for _ in range(epochs):
        model.train()
        for batch in batches:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        right = []
        for batch in validation:
            with torch.no_grad():
                found = model(**batch).logits.argmax(-1)
            found, label = accelerator.gather_for_metrics((found, batch["labels"]))
            right.append((found == label).float())
    print(f"accuracy {torch.cat(right).mean():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    for name, default in (("seed", 0), ("epochs", 3), ("samples", 4000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    main(**vars(parser.parse_args()))
