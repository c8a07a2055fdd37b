"""plain.py as an ensemble whose members read one pipeline. Needs peft 0.21.2 and transformers 5.23.0 (PyPI).

ensemble run examples/ports/lora/port.py [--set members=6] [--set epochs=2]
"""

from plain import BATCH, RANKS, build, count_right, make_arguments, make_texts

from ensemble import Ensemble, Member, Recipe
from ensemble.integrations.transformers import MemberTrainer
from pipelines import Pipeline, sources


def model(params):
    return build(params["rank"])


def predict(model, batch):
    return model(input_ids=batch["input_ids"]).logits.softmax(-1)


def train(member):
    args = make_arguments(None, member.identity.epochs)
    fields = ("input_ids", "labels")
    trainer = MemberTrainer(member, model(member.params), args, fields=fields, compute_metrics=count_right)
    trainer.train()
    member.predict_all()


def spec(members: int = 6, epochs: int = 2):
    train_part, valid_part = (sources.arrays(input_ids=words, labels=labels) for words, labels in make_texts())
    functions = {"model": model, "train": train, "predict": predict}
    return Ensemble(
        name="lora",
        recipe=Recipe(**functions, target="labels", objective="eval_accuracy", mode="max"),
        members=[Member({"rank": rank}) for rank in RANKS[:members]],
        train=Pipeline(train_part, seed=0),
        valid=Pipeline(valid_part),
        epochs=epochs,
        batch_size=BATCH,
    )
