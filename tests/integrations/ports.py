"""Members that are trained by the loops of frameworks: for tests. Each dies once, where it is told to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kit.finished_runs import of_kind
from kit.once import is_first
from torch import nn
from torch.nn import functional as F

from ensemble import Ensemble, Member, MemberCallback, Recipe, Resources
from pipelines import Pipeline, sources

DIES = "TEST_MEMBER_DIES"  # a file: the first member that takes step 35 makes it, and is gone
EPOCHS, BATCH = 6, 32
INPUTS = ("input_ids", "attention_mask")
TEXT_FIELDS = {"input_ids": "input_ids", "attention_mask": "attention_mask", "labels": "label"}


class HalvedWeights(MemberCallback):
    @contextlib.contextmanager
    def _halved(self, model: nn.Module) -> Iterator[None]:
        trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        halved = {name: tensor / 2 if tensor.is_floating_point() else tensor for name, tensor in trained.items()}
        model.load_state_dict(halved)
        try:
            yield
        finally:
            model.load_state_dict(trained)

    def other_weights(self, member: Any) -> contextlib.AbstractContextManager[None]:
        return self._halved(member.model)


def die_once(steps: int) -> None:
    file = os.environ.get(DIES)
    if file is not None and steps == 35 and is_first(Path(file)):
        os.kill(os.getpid(), 9)


def points() -> list[Any]:
    x = np.random.default_rng(0).normal(size=(600, 8)).astype(np.float32)
    return sources.arrays(x=x, label=(x[:, :3].sum(axis=1) > 0).astype(np.int64)).split(0.8, seed=0)


def texts() -> list[Any]:
    ids = np.random.default_rng(0).integers(5, 50, (600, 12))
    label = (np.isin(ids, range(7, 13)).sum(axis=1) > 1).astype(np.int64)
    return sources.arrays(input_ids=ids, attention_mask=np.ones_like(ids), label=label).split(0.8, seed=0)


def declare(recipe: Recipe, parts: list[Any], **options: Any) -> Ensemble:
    train, valid = parts
    given: dict[str, Any] = {"epochs": EPOCHS, "batch_size": BATCH, **options}
    if "search" not in given:
        given.setdefault("members", [Member({"width": width, "lr": 0.01}) for width in (8, 16)])
    return Ensemble(name="ported", recipe=recipe, train=Pipeline(train, seed=0), valid=Pipeline(valid), **given)


class InOrder:
    def __init__(self, order: list[list[list[int]]]) -> None:
        self._epochs, self._batches = iter(order), len(order[0])

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(next(self._epochs))


def order_of(declared: Ensemble) -> list[list[list[int]]]:
    epochs = [range(epoch, epoch + 1) for epoch in range(declared.epochs)]
    loaders = [declared.train.loader(declared.batch_size, epochs=epoch) for epoch in epochs]
    return [[batch["index"].tolist() for batch in loader] for loader in loaders]


def few_points() -> tuple[list[Any], list[Any]]:
    x = np.random.default_rng(0).normal(size=(92, 8)).astype(np.float32)
    label = (x[:, :3].sum(axis=1) > 0).astype(np.int64)
    parts = [(x[rows], label[rows]) for rows in (slice(72), slice(72, 92))]
    datasets = [torch.utils.data.TensorDataset(*map(torch.tensor, part)) for part in parts]
    return [sources.arrays(x=x, label=label) for x, label in parts], datasets


def load_plainly(datasets: list[Any], declared: Ensemble) -> list[Any]:
    return [
        torch.utils.data.DataLoader(datasets[0], batch_sampler=InOrder(order_of(declared))),
        torch.utils.data.DataLoader(datasets[1], batch_size=declared.batch_size),
    ]


def differs(model: nn.Module, weights: dict[str, Any]) -> bool:
    return any(not torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def copy_weights(model: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def list_names(table: Any) -> dict[str, set[str]]:
    """The names in each part of a table, where each is once."""
    placed = [name for _, names, _ in table.rows for name in names]
    assert len(placed) == len(set(placed))
    return {part: {n for p, names, _ in table.rows if p == part for n in names} for part, _, _ in table.rows}


def subclasses(kind: type) -> set[type]:
    return {kind, *(below for child in kind.__subclasses__() for below in subclasses(child))}


def list_errors(folder: Path) -> list[str]:
    return [event["error"] for event in of_kind(folder, "failed")]


def lightning_module(params: dict[str, Any]) -> Any:
    import lightning as L

    class Points(L.LightningModule):  # type: ignore[misc]
        def __init__(self, width: int, lr: float) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            die_once(self.trainer.global_step)

        def validation_step(self, batch: Any, index: int) -> None:
            scores = self(batch[0])
            self.log("val_loss", F.cross_entropy(scores, batch[1]))
            self.log("accuracy", (scores.argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    return Points(**params)


def lightning(callbacks: Any = list, fit: Any = None, **options: Any) -> Ensemble:
    def train(member: Any) -> None:
        from ensemble.integrations import lightning as adapter

        given = {"fields": ("x", "label"), "callbacks": callbacks(), **(fit or {})}
        adapter.fit(member, lightning_module(member.params), **given)

    return declare(Recipe(model=lightning_module, train=train, objective="accuracy"), points(), **options)


def bert(params: dict[str, Any]) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    size = params["width"]
    sizes = {"hidden_size": size, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=2, **sizes))


def predict(model: Any, batch: Any) -> Any:
    return model(**{name: batch[name] for name in INPUTS}).logits.softmax(-1)


def transformers(callbacks: Callable[[], list[Any]] = list, args: Any = None, **options: Any) -> Ensemble:
    def train(member: Any) -> None:
        from transformers import TrainerCallback, TrainingArguments

        from ensemble.integrations.transformers import MemberTrainer

        class Dying(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                die_once(state.global_step)

        def compute_metrics(found: Any) -> dict[str, float]:
            return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

        given = {"learning_rate": member.params["lr"], "eval_strategy": "epoch", "save_strategy": "no"}
        given |= {"report_to": "none", "lr_scheduler_type": "cosine", **(args or {})}
        more = {"compute_metrics": compute_metrics, "callbacks": [Dying(), *callbacks()], "fields": TEXT_FIELDS}
        trainer = MemberTrainer(member, bert(member.params), TrainingArguments(**given), **more)
        trainer.train()
        member.predict_all()

    recipe = Recipe(model=bert, train=train, predict=predict, objective="eval_accuracy", mode="max")
    return declare(recipe, texts(), **options)


def accelerate(**options: Any) -> Ensemble:
    def train(member: Any) -> None:
        from ensemble.integrations.accelerate import prepare

        model = bert(member.params)
        optimizer = torch.optim.AdamW(model.parameters(), lr=member.params["lr"])
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, member.params["lr"], member.steps)
        accelerator, model, optimizer, batches, validation, schedule = prepare(
            member, model, optimizer, schedule, fields=TEXT_FIELDS
        )
        steps = member.position["epoch"] * len(batches)
        for _ in range(member.identity.epochs):
            model.train()
            for batch in batches:
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                die_once(steps := steps + 1)
            model.eval()
            right = []
            for batch in validation:
                with torch.no_grad():
                    scores = model(**batch).logits
                found, label = accelerator.gather_for_metrics((scores.argmax(-1), batch["labels"]))
                right.append((found == label).float())
            member.report(accuracy=float(torch.cat(right).mean()))
        member.predict_all()

    return declare(Recipe(model=bert, train=train, predict=predict, objective="accuracy"), texts(), **options)


def build(params: dict[str, Any]) -> Any:
    return nn.Sequential(nn.Linear(8, params["width"]), nn.ReLU(), nn.Linear(params["width"], 2))


def predict_points(model: Any, batch: Any) -> Any:
    return model(batch["x"]).softmax(1)


def torchrun(wraps: bool = True, **options: Any) -> Ensemble:
    """A script for torchrun, whose ranks are the member's workers."""

    def train(member: Any) -> None:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        assert (dist.get_rank(), dist.get_world_size()) == (member.rank, 2)
        model = build(member.params)
        optimizer = torch.optim.AdamW(model.parameters(), lr=member.params["lr"])
        model, optimizer = member.prepare(model, optimizer)
        trained = DistributedDataParallel(model) if wraps else model
        batches, validation = (member.dataloader(split, fields=("x", "label")) for split in ("train", "valid"))
        steps = member.position["epoch"] * len(batches)
        for _ in range(EPOCHS):
            for x, label in batches:
                F.cross_entropy(trained(x), label).backward()
                optimizer.step()
                optimizer.zero_grad()
                die_once(steps := steps + 1)
            with torch.no_grad():
                right = [(model(x).argmax(1) == label).float() for x, label in validation]
            found = torch.stack([torch.cat(right).sum(), torch.tensor(float(sum(map(len, right))))])
            dist.all_reduce(found)
            member.report(accuracy=float(found[0] / found[1]))
        member.predict_all(predict_points)

    recipe = Recipe(model=build, train=train, predict=predict_points, objective="accuracy")
    return declare(recipe, points(), resources=Resources(workers=2, cpus_per_worker=0.5), **options)
