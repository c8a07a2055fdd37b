"""Film reviews by a loop with accelerate: accelerate_plain.py as an ensemble of eight seeds on one pipeline.

ensemble run examples/frameworks/accelerate_member.py --set data=DIR      (DIR holds imdb/train.parquet)
"""

from dataclasses import replace

import torch
import transformers_member
from transformers import get_linear_schedule_with_warmup
from transformers_member import FIELDS, build

from ensemble.integrations.accelerate import prepare


def train(member):
    model = build(member.params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 20, member.steps)
    accelerator, model, optimizer, batches, validation, schedule = prepare(
        member, model, optimizer, schedule, fields={name: name for name in FIELDS}
    )
    for _ in range(member.identity.epochs):
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
        member.report(accuracy=float(torch.cat(right).mean()))
    member.predict_all()


def spec(data: str = "data", seeds: int = 8, epochs: int = 3, samples: int = 4000):
    reviews = transformers_member.spec(data, seeds, epochs, samples)
    return replace(reviews, recipe=replace(reviews.recipe, train=train, objective="accuracy"))
