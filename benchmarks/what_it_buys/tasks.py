"""The tasks of the study of what a CPU-second buys: arrays, networks and search spaces, the same for all methods.

All are classifications. A task's arrays are in memory, decoded and tokenized: what is compared is what methods do
with CPU-seconds, not how they read. Each seed draws its own samples and its own split of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import models
from ensemble.spec import SpecError

if TYPE_CHECKING:
    import optuna
    from torch import nn

    from pipelines import Pipeline

CIFAR10, IMDB = models.CIFAR10, models.IMDB
TABLES = (models.DIGITS, "cancer", "wine")
MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.244, 0.262)  # of CIFAR-10's training images
PADDING = 2  # pixels about an image of which a crop is taken
_PIXELS, _WORDS, _LENGTH = 16, 5000, 64
_LARGE = {"train": 3500, "valid": 1000, "test": 2000}
Arrays = dict[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned, and how one model of it is trained.

    Attributes:
        name: also of its data set.
        epochs, batch_size: of each model, whatever the method.
        budgets: CPU-seconds of work that a method gets in turn.
        member_cpu_s: that a model takes, by which the size of a population is chosen.
        suggest: `suggest(trial) -> hyperparameters` of an Optuna trial: the space, and what `build` needs.
        has_augmentation: whether images are cropped and flipped at random.
    """

    name: str
    epochs: int
    batch_size: int
    budgets: tuple[float, ...]
    member_cpu_s: float
    suggest: Callable[[optuna.trial.Trial], dict[str, Any]]
    has_augmentation: bool = False


def _suggest_training(trial: optuna.trial.Trial) -> dict[str, Any]:
    lr = trial.suggest_float("lr", 3e-4, 3e-2, log=True)
    return {"lr": lr, "weight_decay": trial.suggest_float("weight_decay", 1e-5, 1e-1, log=True)}


def _suggest_mlp(trial: optuna.trial.Trial, features: int, classes: int) -> dict[str, Any]:
    width = trial.suggest_categorical("width", [16, 32, 64, 128])
    more = {"dropout": trial.suggest_float("dropout", 0.0, 0.5), "width": width}
    return {"net": "mlp", "features": features, "classes": classes, **_suggest_training(trial), **more}


def suggest_digits(trial: optuna.trial.Trial) -> dict[str, Any]:
    """A perceptron of 64 pixels."""
    return _suggest_mlp(trial, 64, 10)


def suggest_cancer(trial: optuna.trial.Trial) -> dict[str, Any]:
    """A perceptron of 30 columns."""
    return _suggest_mlp(trial, 30, 2)


def suggest_wine(trial: optuna.trial.Trial) -> dict[str, Any]:
    """A perceptron of 13 columns."""
    return _suggest_mlp(trial, 13, 3)


def suggest_cifar10(trial: optuna.trial.Trial) -> dict[str, Any]:
    """A ResNet of 9 layers."""
    fixed = {"net": models.RESNET, "channels": 3, "classes": 10, "blocks": 1}
    return {**fixed, **_suggest_training(trial), "width": trial.suggest_categorical("width", [4, 6, 8])}


def suggest_imdb(trial: optuna.trial.Trial) -> dict[str, Any]:
    """An LSTM of one layer."""
    fixed = {"net": models.LSTM, "classes": 2, "words": _WORDS, "embed": 32, "layers": 1}
    return {**fixed, **_suggest_training(trial), "hidden": trial.suggest_categorical("hidden", [16, 32, 64])}


#: By name, the cheap ones first.
TASKS = {
    task.name: task
    for task in (
        Task(name="wine", epochs=30, batch_size=16, budgets=(3, 9), member_cpu_s=0.4, suggest=suggest_wine),
        Task(name="cancer", epochs=30, batch_size=32, budgets=(3, 9), member_cpu_s=0.5, suggest=suggest_cancer),
        Task(name="digits", epochs=20, batch_size=32, budgets=(5, 15), member_cpu_s=0.9, suggest=suggest_digits),
        Task(name="imdb", epochs=4, batch_size=64, budgets=(15, 45), member_cpu_s=2.3, suggest=suggest_imdb),
        Task(
            name="cifar10",
            epochs=4,
            batch_size=64,
            budgets=(20, 60),
            member_cpu_s=3,
            suggest=suggest_cifar10,
            has_augmentation=True,
        ),
    )
}
#: What decides the shape of a network.
SHAPE = {CIFAR10: "width", IMDB: "hidden", **dict.fromkeys(TABLES, "width")}


def build(params: dict[str, Any]) -> nn.Module:
    """The network of these hyperparameters."""
    from torch import nn

    if params["net"] != "mlp":
        return models.model(params)
    width, layers = params["width"], list[nn.Module]()
    for inputs in (params["features"], width):
        layers += [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(params["dropout"])]
    return nn.Sequential(*layers, nn.Linear(width, params["classes"]))


# --- data ------------------------------------------------------------------------------------------------------


def read_pool(task: Task, data: str | None) -> tuple[np.ndarray, np.ndarray]:
    """All samples from which the seeds draw: inputs, and int64 labels.

    Inputs are float32 columns, uint8 images [n, 3, h, w], or int64 words [n, length] with 0 for padding. Those of
    CIFAR-10 and IMDB are the beginning of the data set's training part.

    Args:
        data: holds cifar10/ and imdb/, each with train.parquet.

    Raises:
        SpecError: the task needs it.
    """
    if task.name in TABLES:
        from sklearn import datasets

        load = {"cancer": datasets.load_breast_cancer, "wine": datasets.load_wine}.get(
            task.name, datasets.load_digits
        )
        x, label = load(return_X_y=True)
        if task.name == models.DIGITS:  # some pixels have one value in most parts
            x = x / 16
        return x.astype(np.float32), label.astype(np.int64)
    if data is None:
        raise SpecError(f"the task {task.name} needs --data, a directory with {task.name}/train.parquet")
    from pipelines import Pipeline, sources, stages

    field = "image" if task.name == CIFAR10 else "text"
    file = str(Path(data) / task.name / "train.parquet")
    wanted = 2 * sum(_LARGE.values())
    whole = sources.parquet(file, columns=(field, "label"))
    source = whole.take(min(wanted, len(whole)))
    pipe = Pipeline(source)
    if task.name == CIFAR10:
        resize = stages.resize("image", size=(_PIXELS, _PIXELS), interpolation="area")
        pipe = pipe.map(stages.decode_jpeg("image")).map(resize)
    else:  # labels are not looked at
        vocabulary = stages.build_vocabulary((record["text"] for record in source), size=_WORDS - 2)
        pipe = pipe.map(stages.tokenize("text", vocabulary=vocabulary))
        pipe = pipe.map(stages.pad("text", length=_LENGTH, truncate="start"))
    batches = [(batch[field].numpy(), batch["label"].numpy()) for batch in pipe.loader(1000)]
    x, label = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return x, label.astype(np.int64)


def split(task: Task, pool: tuple[np.ndarray, np.ndarray], seed: int) -> Arrays:
    """A seed's samples to learn from, to choose by and to measure by; of tables 60, 20 and 20 %.

    Columns of wine and cancer are scaled by the mean and deviation of the samples to learn from.
    """
    x, label = pool
    order = np.random.default_rng(seed).permutation(len(label))
    if task.name in TABLES:
        sizes = [round(0.6 * len(order)), round(0.2 * len(order)), len(order)]
    else:
        sizes = list(_LARGE.values())
    parts = np.split(order, np.cumsum(sizes))[: len(_LARGE)]
    made = {name: (x[part], label[part]) for name, part in zip(_LARGE, parts, strict=True)}
    if task.name in TABLES and task.name != models.DIGITS:
        learned = made["train"][0]
        mean, std = learned.mean(0), learned.std(0)
        made = {name: (((own - mean) / std).astype(np.float32), label) for name, (own, label) in made.items()}
    return made


def make_pipelines(task: Task, arrays: Arrays, seed: int = 0) -> dict[str, Pipeline]:
    """The pipelines of the splits, by name."""
    from pipelines import Pipeline, sources, stages

    made = {}
    for name, (x, label) in arrays.items():
        pipe = Pipeline(sources.arrays(x=x, label=label), seed=seed)
        if task.has_augmentation:
            if name == "train":
                crop = stages.random_crop("x", size=_PIXELS, padding=PADDING)
                pipe = pipe.map(crop).map(stages.random_flip("x"))
            pipe = pipe.map(stages.scale("x", mean=MEAN, std=STD))
        made[name] = pipe
    return made
