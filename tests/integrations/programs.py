"""Small programs for MONAI and pytorch-forecasting as their users write them, and the same programs as members.

`python tests/integrations/programs.py` measures both: CPU-seconds and the metric, medians of three.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ports import InOrder, die_once

import ensemble  # noqa: F401 - of the commands below
from ensemble import Ensemble, Member, Recipe
from pipelines import Pipeline, from_samples, sources, stages

Order = list[list[list[int]]]  # of each epoch its batches
BATCH = 16
MEMBERS = [{"seed": seed} for seed in range(4)]


def loader(data: Any, order: Order | None, **options: Any) -> Any:
    chosen = {"batch_size": BATCH, "shuffle": True} if order is None else {"batch_sampler": InOrder(order)}
    return torch.utils.data.DataLoader(data, **chosen, **options)


def declare(recipe: Recipe, parts: list[Pipeline], params: Sequence[dict[str, Any]], **options: Any) -> Ensemble:
    about = {"name": "ported", "train": parts[0], "valid": parts[1], "batch_size": BATCH, **options}
    return Ensemble(recipe=recipe, members=[Member(hyperparameters) for hyperparameters in params], **about)


BOTH, MONAI_EPOCHS = ("image", "label"), 4


def discs(count: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:40, :40]
    drawn = rng.uniform((12, 12, 5), (28, 28, 9), (count, 3))
    label = np.stack([(y - row) ** 2 + (x - column) ** 2 < radius**2 for row, column, radius in drawn])
    return {"image": (label + rng.normal(0, 1, label.shape)).astype(np.float32), "label": label.astype(np.int64)}


def transforms(draws: bool) -> tuple[Any, Any]:
    from monai import transforms as T

    first = [T.EnsureChannelFirstd(BOTH, channel_dim="no_channel"), T.ScaleIntensityd("image")]
    crop = T.RandCropByPosNegLabeld(BOTH, "label", (32, 32), num_samples=1)
    drawn = [crop, T.RandFlipd(BOTH, prob=0.5, spatial_axis=0)]
    return T.Compose([*first, *(drawn if draws else [])]), T.Compose(first)


def unet(params: dict[str, Any]) -> Any:
    from monai.networks.nets import UNet

    torch.manual_seed(params["seed"])
    return UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(8, 16), strides=(2,), num_res_units=1)


def segment(
    model: Any, batches: Any, validation: Any, epochs: int, report: Callable[..., Any], steps: int = 0
) -> None:
    from monai.losses import DiceCELoss
    from monai.metrics import DiceMetric

    loss_function = DiceCELoss(to_onehot_y=True, softmax=True)
    optimizer = model.optimizer
    metric = DiceMetric(include_background=False, num_classes=2)
    for _ in range(epochs):
        model.train()
        for image, label in batches:
            optimizer.zero_grad()
            loss_function(model(image), label).backward()
            optimizer.step()
            die_once(steps := steps + 1)
        model.eval()
        with torch.no_grad():
            for image, label in validation:
                metric(model(image).argmax(1, keepdim=True), label)
        report(dice=metric.aggregate().item())
        metric.reset()


def with_adam(model: Any) -> Any:
    vars(model)["optimizer"] = torch.optim.Adam(model.parameters(), 0.005)
    return model


def monai_plain(params: dict[str, Any], order: Order | None = None, draws: bool = True) -> tuple[Any, float]:
    from monai.data import Dataset, list_data_collate

    reported: list[float] = []
    parts = [
        Dataset([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)], transform)
        for columns, transform in zip((discs(160, 0), discs(40, 1)), transforms(draws), strict=True)
    ]
    parts[0].transform.set_random_state(params["seed"])
    model = with_adam(unet(params))

    def collate(samples: Any) -> Any:
        batch = list_data_collate(samples)
        return batch["image"].as_tensor(), batch["label"].as_tensor()

    train = loader(parts[0], order, collate_fn=collate)
    validation = torch.utils.data.DataLoader(parts[1], batch_size=BATCH, collate_fn=collate)
    segment(model, train, validation, MONAI_EPOCHS, lambda dice: reported.append(dice))
    return model, reported[-1]


def take_one(samples: Any) -> dict[str, Any]:
    sample = samples[0] if isinstance(samples, list) else samples
    return {**sample, "target": sample["label"][0]}


def monai_members(params: Sequence[dict[str, Any]], draws: bool = True) -> Ensemble:
    def train(member: Any) -> None:
        model = with_adam(unet(member.params))
        member.prepare(model, model.optimizer)
        batches, validation = (member.dataloader(split, fields=BOTH) for split in ("train", "valid"))
        steps = member.position["epoch"] * len(batches)
        segment(model, batches, validation, MONAI_EPOCHS, member.report, steps)
        member.predict_all()

    def predict(model: Any, batch: Any) -> Any:
        return model(batch["image"]).softmax(1).movedim(1, -1)

    parts = [
        Pipeline(sources.arrays(**discs(count, seed)), seed=0).map(transform, id=f"{seed} of MONAI").map(take_one)
        for count, seed, transform in zip((160, 40), (0, 1), transforms(draws), strict=True)
    ]
    about = {"task": "classification", "target": "target", "objective": "dice"}
    return declare(Recipe(model=unet, train=train, predict=predict, **about), parts, params, epochs=MONAI_EPOCHS)


FORECAST_EPOCHS = 3


def series() -> tuple[Any, Any]:
    """The TimeSeriesDataSets of training and of validation: six waves of unlike height."""
    import pandas
    from pytorch_forecasting import TimeSeriesDataSet
    from pytorch_forecasting.data import GroupNormalizer

    rng, time = np.random.default_rng(0), np.arange(60)
    waves = [(1 + number) * (2 + np.sin(time / 5 + number)) + rng.normal(0, 0.1, len(time)) for number in range(6)]
    rows = {"series": np.repeat(list("012345"), len(time)), "time": np.tile(time, 6)}
    table = pandas.DataFrame({**rows, "value": np.concatenate(waves).astype(np.float32)})
    about = {"time_idx": "time", "target": "value", "group_ids": ["series"], "max_encoder_length": 12}
    about |= {"max_prediction_length": 4, "static_categoricals": ["series"], "time_varying_known_reals": ["time"]}
    about |= {"time_varying_unknown_reals": ["value"], "target_normalizer": GroupNormalizer(groups=["series"])}
    training = TimeSeriesDataSet(table[table.time < 48], **about)
    return training, TimeSeriesDataSet.from_dataset(training, table, min_prediction_idx=48)


def forecaster(params: dict[str, Any]) -> Any:
    from pytorch_forecasting import TemporalFusionTransformer
    from pytorch_forecasting.metrics import MAE, QuantileLoss

    torch.manual_seed(params["seed"])
    sizes = {"hidden_size": 8, "attention_head_size": 1, "hidden_continuous_size": 4, "dropout": 0.1}
    given = {"learning_rate": 0.03, "optimizer": "adam", "loss": QuantileLoss(), "logging_metrics": [MAE()]}
    return TemporalFusionTransformer.from_dataset(series()[0], **sizes, **given)


def make_callbacks() -> list[Any]:
    from lightning.pytorch import callbacks

    class Steps(callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            torch.manual_seed(trainer.global_step)  # of dropout

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            die_once(trainer.global_step)

    return [Steps(), callbacks.EarlyStopping("val_loss", patience=5)]


TRAINER = {"gradient_clip_val": 0.1, "num_sanity_val_steps": 0}


def forecast_plain(params: dict[str, Any], order: Order | None = None) -> tuple[Any, float]:
    import lightning

    training, validation = series()
    model = forecaster(params)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(
        max_epochs=FORECAST_EPOCHS, enable_model_summary=False, callbacks=make_callbacks(), **quiet, **TRAINER
    )
    train = loader(training, order, collate_fn=training._collate_fn)
    trainer.fit(model, train, validation.to_dataloader(train=False, batch_size=BATCH, num_workers=0))
    return model, float(trainer.callback_metrics["val_MAE"])


X_FIELDS = (
    "encoder_cat", "encoder_cont", "encoder_target", "encoder_lengths", "decoder_cat", "decoder_cont",
    "decoder_target", "decoder_lengths", "decoder_time_idx", "groups", "target_scale",
)  # fmt: skip
X = dict(zip(X_FIELDS, X_FIELDS, strict=True))


def split_target(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": sample["x"], "target": sample["y"][0]}


def forecast_members(params: Sequence[dict[str, Any]]) -> Ensemble:
    training, validation = series()

    def collate(samples: Any) -> Any:
        x, (target, _) = type(training)._collate_fn([(x, (target, None)) for x, target in samples])
        return {**x, "target": target}

    def build(params: dict[str, Any]) -> Any:
        model = forecaster(params)
        model.on_before_batch_transfer = lambda batch, index: (batch[0], (batch[1], None))  # weights
        return model

    def train(member: Any) -> None:
        from ensemble.integrations.lightning import fit

        fit(member, build(member.params), fields=(X, "target"), callbacks=make_callbacks(), **TRAINER)

    def predict(model: Any, batch: Any) -> Any:
        return model.to_prediction(model({name: batch[name] for name in X_FIELDS}))

    splits = {"train": training, "valid": validation}
    data = [sources.dataset(part, id=f"{name} of series", names=("x", "y")) for name, part in splits.items()]
    parts = [Pipeline(source, seed=0).map(split_target) for source in data]
    about = {"task": "regression", "target": "target", "objective": "val_MAE", "mode": "min"}
    about |= {"predict": predict, "collate": from_samples(collate, fields=("x", "target"))}
    return declare(Recipe(model=build, train=train, **about), parts, params, epochs=FORECAST_EPOCHS)


WORDS, TAGS, TOKEN_EPOCHS = 50, 3, 4
TOKEN_FIELDS = ("input_ids", "attention_mask", "labels")


def encode(sample: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(int(sample["at"]))
    ids = rng.integers(5, WORDS, int(rng.integers(4, 22)))
    tags = np.where(rng.random(len(ids)) < 0.1, rng.integers(0, TAGS, len(ids)), ids // 17)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": tags}


def collator() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForTokenClassification, PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, **{f"word{number}": number for number in range(2, WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    return DataCollatorForTokenClassification(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    )


def tagger(params: dict[str, Any]) -> Any:
    from transformers import BertConfig, BertForTokenClassification

    torch.manual_seed(params["seed"])
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    if "dropout" in params:
        sizes |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), params["dropout"])
    return BertForTokenClassification(BertConfig(vocab_size=WORDS, num_labels=TAGS, **sizes))


def tag_metrics(found: Any) -> dict[str, float]:
    known = found.label_ids != -100
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids)[known].mean())}


def tag_callbacks() -> list[Any]:
    from transformers import TrainerCallback

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            torch.manual_seed(state.global_step)  # of dropout

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            die_once(state.global_step)

    return [Steps()]


def tag_arguments(**more: Any) -> Any:
    from transformers import TrainingArguments

    given = {"learning_rate": 0.02, "eval_strategy": "epoch", "save_strategy": "no", "report_to": "none"}
    return TrainingArguments(**given, **more)


def tokens_plain(params: dict[str, Any], order: Order | None = None) -> tuple[Any, float]:
    from transformers import Trainer

    class Ordered(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            made = loader(self.train_dataset, order, collate_fn=self.data_collator)
            return super().get_train_dataloader() if order is None else self.accelerator.prepare(made)

    parts = [[encode({"at": at}) for at in range(*span)] for span in ((0, 160), (160, 240))]
    sizes = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH}
    with tempfile.TemporaryDirectory() as folder:
        more = {"output_dir": folder, "use_cpu": True, "num_train_epochs": TOKEN_EPOCHS, "disable_tqdm": True}
        args = tag_arguments(**sizes, **more)
        about = {"data_collator": collator(), "train_dataset": parts[0], "eval_dataset": parts[1]}
        about |= {"compute_metrics": tag_metrics, "callbacks": tag_callbacks()}
        trainer = Ordered(tagger(params), args, **about)
        trainer.train()
    evaluated = [each for each in trainer.state.log_history if "eval_accuracy" in each]
    return trainer.model, evaluated[-1]["eval_accuracy"]


def tokens_members(params: Sequence[dict[str, Any]], collate: Any = None, **options: Any) -> Ensemble:
    def train(member: Any) -> None:
        from ensemble.integrations.transformers import MemberTrainer

        about = {"fields": TOKEN_FIELDS, "compute_metrics": tag_metrics, "callbacks": tag_callbacks()}
        MemberTrainer(member, tagger(member.params), tag_arguments(), **about).train()
        member.predict_all()

    parts = [Pipeline(sources.arrays(at=np.arange(*span)), seed=0).map(encode) for span in ((0, 160), (160, 240))]
    for name in TOKEN_FIELDS:
        parts = [part.map(stages.ragged(name, most=24)) for part in parts]
    collate = collate or from_samples(collator())
    recipe = Recipe(model=tagger, train=train, target="labels", collate=collate, objective="eval_accuracy")
    return declare(recipe, parts, params, epochs=TOKEN_EPOCHS, **options)


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[..., Ensemble]]] = {
    "MONAI": (monai_plain, monai_members),
    "pytorch-forecasting": (forecast_plain, forecast_members),
    "Transformers": (tokens_plain, tokens_members),
}


def run_apart(command: str) -> tuple[float, float]:
    """The number that a command of Python prints last, and its CPU-seconds with those of its processes."""
    words = [sys.executable, "-W", "ignore", "-c", command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=Path(__file__).parent) as process:
        assert process.stdout is not None
        printed = process.stdout.read().decode()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, printed
    return float(printed.split()[-1]), used.ru_utime + used.ru_stime


def measure(name: str) -> str:
    rows: list[tuple[float, ...]] = []
    plain, members = (each.__name__ for each in PROGRAMS[name])
    before = "import torch; torch.set_num_threads(1); import programs as P; "
    for _ in range(3):
        scripts = [run_apart(f"{before}print(P.{plain}({params})[1])") for params in MEMBERS]
        with tempfile.TemporaryDirectory() as folder:
            submitted = f"P.ensemble.submit(P.{members}(P.MEMBERS), {folder + '/run'!r}, 'local').wait()"
            run = run_apart(f"{before}print(sum(row['metric'] for row in {submitted}.members) / {len(MEMBERS)})")
        rows.append((statistics.mean(metric for metric, _ in scripts), run[0], sum(s for _, s in scripts), run[1]))
    metrics, cpu_s = ([statistics.median(column) for column in zip(*rows, strict=True)][i : i + 2] for i in (0, 2))
    return f"| {name} | {metrics[0]:.3f} | {metrics[1]:.3f} | {cpu_s[0]:.0f} | {cpu_s[1]:.0f} |"


if __name__ == "__main__":
    for name in PROGRAMS:
        print(measure(name), flush=True)
