"""Each argument and callback of transformers has a Trainer's effect to the bit, is refused, or has no meaning."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import ports
import pytest
import torch
from kit.finished_runs import of_kind
from kit.tv import import_torchvision

import ensemble
from ensemble import Member, Recipe
from ensemble.store import RunDir, load_predictions
from ensemble.train.job import TrainingError
from pipelines import sources

pytestmark = [pytest.mark.more, pytest.mark.filterwarnings("ignore")]

EPOCHS, BATCH = 2, 16
#: What all runs have, unless the option at hand says otherwise; and what an option needs beside it.
BASE = {"learning_rate": 0.01, "logging_steps": 1, "eval_strategy": "epoch", "save_strategy": "no"}
BASE |= {"report_to": "none", "lr_scheduler_type": "cosine"}
BEST = {"save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
SAME: dict[str, Any] = {"learning_rate": 0.02, "lr_scheduler_type": "polynomial"}
SAME |= {"lr_scheduler_kwargs": {"num_cycles": 2}, "warmup_steps": 3, "optim": "adafactor"}
SAME |= {"optim_args": "alpha=0.5", "optim_target_modules": ["attention"], "weight_decay": 0.1, "adam_beta1": 0.5}
SAME |= {"adam_beta2": 0.9, "adam_epsilon": 0.01, "max_grad_norm": 0.05, "gradient_accumulation_steps": 2}
SAME |= {"label_smoothing_factor": 0.3, "label_names": ["labels"], "neftune_noise_alpha": 5.0, "use_cache": True}
SAME |= {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
SAME |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
SAME |= {"torch_empty_cache_steps": 1, "full_determinism": True, "tf32": False, "debug": "underflow_overflow"}
SAME |= {"skip_memory_metrics": False, "include_num_input_tokens_seen": "all", "log_level": "error"}
SAME |= {"logging_strategy": "epoch", "logging_steps": 3, "logging_first_step": True}
SAME |= {"logging_nan_inf_filter": False, "report_to": ["tensorboard"], "run_name": "named", "project": "ours"}
SAME |= {"trackio_space_id": "space", "trackio_bucket_id": "bucket", "trackio_static_space_id": "static"}
SAME |= {"eval_strategy": "no", "eval_steps": 20, "eval_delay": 2, "eval_on_start": True}
SAME |= {"prediction_loss_only": True, "eval_do_concat_batches": False, "eval_use_gather_object": True}
SAME |= {"eval_accumulation_steps": 1, "include_for_metrics": ["inputs", "loss"], "batch_eval_metrics": True}
SAME |= {"save_strategy": "epoch", "save_steps": 4, "save_total_limit": 1, "save_only_model": True}
SAME |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
#: What an option of them needs beside it.
BESIDE: dict[str, Any] = {"lr_scheduler_kwargs": {"lr_scheduler_type": "cosine_with_restarts"}}
BESIDE |= {"optim_args": {"optim": "rmsprop"}}
BESIDE |= {"activation_checkpointing_kwargs": {"activation_checkpointing": True}}
BESIDE |= {"gradient_checkpointing_kwargs": {"gradient_checkpointing": True}}
BESIDE |= {"logging_first_step": {"logging_steps": 4}, "eval_steps": {"eval_strategy": "steps"}}
BESIDE |= {"save_steps": {"save_strategy": "steps"}, "save_total_limit": {"save_strategy": "epoch"}}
BESIDE |= {"save_only_model": {"save_strategy": "epoch"}, "load_best_model_at_end": BEST}
BESIDE |= {"metric_for_best_model": BEST, "greater_is_better": BEST}
#: Those that change no weights and no figures here are set in one run.
TOGETHER = {"label_names", "use_cache", "torch_empty_cache_steps", "tf32", "log_level", "run_name", "project"}
TOGETHER |= {"trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "optim_target_modules"}
REFUSED: dict[str, Any] = {"num_train_epochs": 7, "max_steps": 5, "per_device_train_batch_size": 4}
REFUSED |= {"per_device_eval_batch_size": 4, "auto_find_batch_size": True, "seed": 7, "data_seed": 1}
REFUSED |= {"dataloader_drop_last": True, "dataloader_num_workers": 2, "dataloader_persistent_workers": True}
REFUSED |= {"dataloader_prefetch_factor": 2, "dataloader_multiprocessing_context": "fork"}
REFUSED |= {"dataloader_in_order": False, "train_sampling_strategy": "sequential", "length_column_name": "size"}
REFUSED |= {"accelerator_config": {"split_batches": True}, "bf16": True, "bf16_full_eval": True}
REFUSED |= {"fp16_full_eval": True, "torch_compile": True, "torch_compile_mode": "default"}
REFUSED |= {"torch_compile_backend": "eager", "liger_kernel_config": {"rope": True}, "enable_jit_checkpoint": True}
REFUSED |= {"push_to_hub": True, "hub_token": "secret", "hub_private_repo": True, "hub_model_id": "ours/model"}
REFUSED |= {"hub_strategy": "end", "hub_always_push": True, "hub_revision": "main"}
#: What an option of them needs beside it.
BESIDE_REFUSED: dict[str, Any] = {"dataloader_prefetch_factor": {"dataloader_num_workers": 1}}
BESIDE_REFUSED |= {"bf16": {"use_cpu": True}, "bf16_full_eval": {"use_cpu": True}}
BESIDE_REFUSED |= {"fp16_full_eval": {"use_cpu": True}}
#: Refused by their names; transformers wants packages, a GPU or several processes to let them be set.
NEEDS_MORE = {"fp16", "use_cpu", "use_liger_kernel", "fsdp", "fsdp_config", "deepspeed"}
NEEDS_MORE |= {"parallelism_config", "ddp_backend"}
VOID = {"output_dir": "elsewhere", "disable_tqdm": True, "remove_unused_columns": False}
VOID |= {"dataloader_pin_memory": False, "ignore_data_skip": True, "restore_callback_states_from_checkpoint": True}
VOID |= {"resume_from_checkpoint": "there", "do_train": True, "do_eval": True, "do_predict": True, "local_rank": 0}
VOID |= {"ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 10, "ddp_broadcast_buffers": True}
VOID |= {"ddp_static_graph": True, "ddp_timeout": 60, "average_tokens_across_devices": False}
VOID |= {"save_on_each_node": True, "log_on_each_node": False, "log_level_replica": "error"}
TIMES = ("_runtime", "_per_second", "_preparation_time", "_delta")


@pytest.fixture(autouse=True)
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    import_torchvision(monkeypatch)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # full_determinism sets it, and more
    package = pytest.importorskip("transformers")
    yield package
    torch.use_deterministic_algorithms(False)
    package.utils.logging.set_verbosity_warning()


def test_every_argument_and_callback_of_transformers_is_placed_once(transformers: Any) -> None:
    from ensemble.integrations.transformers import ARGUMENTS, CALLBACKS

    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    tables = ports.list_names(ARGUMENTS)
    assert set().union(*tables.values()) == fields
    assert tables["same effect"] == set(SAME) and tables["no meaning here"] == set(VOID)
    assert tables["refused"] == set(REFUSED) | NEEDS_MORE
    for name in ("integrations", "trainer_jit_checkpoint", "utils.notebook"):
        importlib.import_module(f"transformers.{name}")
    kinds = ports.subclasses(transformers.TrainerCallback) - {transformers.TrainerCallback}
    ours = {kind.__name__ for kind in kinds if kind.__module__.startswith("transformers.")} - {"CallbackHandler"}
    assert set().union(*ports.list_names(CALLBACKS).values()) == ours


def make_data() -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(0)
    ids = rng.integers(5, 50, (92, 6))
    label = (np.isin(ids, range(7, 20)).sum(axis=1) > 1).astype(np.int64)
    columns = {"input_ids": ids, "attention_mask": np.ones_like(ids), "label": label}
    return tuple({name: values[part] for name, values in columns.items()} for part in (slice(72), slice(72, 92)))


def list_rows(columns: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def compute_metrics(found: Any, compute_result: bool = True) -> dict[str, float]:
    """Also of batches, and of a batch at a time."""
    predictions, labels = found.predictions, found.label_ids
    if isinstance(predictions, list):
        predictions, labels = np.concatenate(predictions), np.concatenate(labels)
    right = (torch.as_tensor(predictions).argmax(-1) == torch.as_tensor(labels)).float().mean()
    shown = {} if found.inputs is None else {"words": float(np.asarray(found.inputs).mean())}
    return {"accuracy": float(right), **shown, **({} if found.losses is None else {"most": found.losses.max()})}


def read_figures(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    shown = [{k: v for k, v in each.items() if not k.endswith(TIMES) and "_mem_" not in k} for each in history]
    return [{k: str(v) if v != v else v for k, v in each.items()} for each in shown]


def list_files(folder: str) -> set[str]:
    return {str(file.relative_to(folder)) for file in Path(folder).glob("checkpoint-*/*")}


def run(path: Path, train: Any, members: list[Any], **options: Any) -> Any:
    train_columns, valid_columns = make_data()
    recipe = Recipe(model=ports.bert, train=train, predict=ports.predict, objective="eval_loss", mode="min")
    parts = [sources.arrays(**train_columns), sources.arrays(**valid_columns)]
    declared = ports.declare(recipe, parts, members=members, **{"epochs": EPOCHS, "batch_size": BATCH, **options})
    result = ensemble.submit(declared, path, "inline").wait()
    return declared, result


def train_plain(transformers: Any, declared: Any, seed: int, folder: Path, options: dict[str, Any]) -> Any:
    """A plain Trainer with Datasets of its own, the same order of the samples, and the same seeds."""

    order = ports.InOrder(ports.order_of(declared))
    train_part, valid_part = map(list_rows, make_data())

    class Plain(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            loader = torch.utils.data.DataLoader(train_part, batch_sampler=order, collate_fn=self.data_collator)
            return self.accelerator.prepare(loader)

    sizes = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH, "use_cpu": True}
    given = {"num_train_epochs": declared.epochs, "seed": seed, **options}
    callbacks = given.pop("callbacks", list)()
    args = transformers.TrainingArguments(**{"output_dir": str(folder), **sizes, **given})
    about = {"model": build(), "args": args, "train_dataset": train_part, "eval_dataset": valid_part}
    about |= {"compute_metrics": compute_metrics, "callbacks": [make_seeds(transformers), *callbacks]}
    trainer = Plain(**about)
    trainer.train()
    return trainer


def build() -> Any:
    torch.manual_seed(3)
    return ports.bert({"width": 8})


def make_trainer(member: Any, args: Any = None, model: Any = None, **options: Any) -> Any:
    """Of the member, with TrainingArguments, or a dict of what is unlike the BASE of all."""
    from transformers import TrainingArguments

    from ensemble.integrations.transformers import MemberTrainer

    args = args if isinstance(args, TrainingArguments) else TrainingArguments(**{**BASE, **(args or {})})
    model = [build()] if model is None else model
    return MemberTrainer(member, *model, args=args, fields=ports.TEXT_FIELDS, **options)


def make_seeds(transformers: Any) -> Any:
    class Seeds(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            torch.manual_seed(state.global_step)  # of dropout and noise

    return Seeds()


def compare(path: Path, transformers: Any, options: Any, epochs: int = EPOCHS) -> dict[str, Any]:
    """What differs between a member with options and a plain Trainer with them, by their names."""
    trained: dict[str, Any] = {}

    def train(member: Any) -> None:
        name = member.params["option"]
        given = {**options[name]}
        callbacks = [make_seeds(transformers), *given.pop("callbacks", list)()]
        trainer = make_trainer(member, given, compute_metrics=compute_metrics, callbacks=callbacks)
        trainer.train()
        trained[name] = trainer, ports.copy_weights(trainer.model)
        member.predict_all()

    declared, _ = run(path / "run", train, [Member({"option": name}) for name in options], epochs=epochs)
    assert ports.list_errors(path / "run") == [] and len(trained) == len(options)
    differences: dict[str, Any] = {}
    for name, given in options.items():
        ours, weights = trained[name]
        given = {k: v for k, v in given.items() if k not in VOID}
        theirs = train_plain(transformers, declared, ours.args.seed, path / name, {**BASE, **given})
        if ports.differs(theirs.model, weights):
            differences[name] = "weights"
        history = read_figures(ours.state.log_history)
        expected = read_figures(theirs.state.log_history)
        if history[: len(expected)] != expected:  # a member that was never evaluated is so at the end
            differences[f"{name}: figures"] = history, expected
        if list_files(ours.args.output_dir) != list_files(theirs.args.output_dir):
            differences[f"{name}: files"] = list_files(ours.args.output_dir), list_files(theirs.args.output_dir)
        given.pop("callbacks", None)
        if other := [k for k in given if getattr(ours.args, k) != getattr(theirs.args, k)]:
            differences[f"{name}: arguments"] = other
    return differences


def test_arguments_have_the_effect_that_they_have_in_a_plain_trainer(transformers: Any, tmp_path: Path) -> None:
    options = {name: {**BESIDE.get(name, {}), name: SAME[name]} for name in SAME if name not in TOGETHER}
    options["together"] = {name: SAME[name] for name in TOGETHER}
    assert compare(tmp_path, transformers, options) == {}


def test_early_stopping_ends_a_member_where_it_ends_a_plain_trainer(transformers: Any, tmp_path: Path) -> None:
    def stop() -> list[Any]:
        return [transformers.EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=9.0)]

    options = {"epoch": {**BEST, "callbacks": stop}}
    options["steps"] = {**BEST, "eval_strategy": "steps", "save_strategy": "steps", "callbacks": stop}
    options["steps"] |= {"eval_steps": 5, "save_steps": 5}
    assert compare(tmp_path, transformers, options, epochs=4) == {}
    assert [event["epoch"] for event in of_kind(tmp_path / "run", "finished")] == [2, 2]


def test_early_stopping_within_an_epoch_is_refused_before_training(transformers: Any, tmp_path: Path) -> None:
    def train(member: Any) -> None:
        beside = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 3, "save_steps": 3}
        make_trainer(member, {**BEST, **beside}, callbacks=[transformers.EarlyStoppingCallback()]).train()

    run(tmp_path / "run", train, [Member({"width": 8})])
    (error,) = ports.list_errors(tmp_path / "run")
    assert "EarlyStoppingCallback with eval_steps=3" in error and "multiple of 5" in error


def test_trials_that_were_never_evaluated_are_so_at_their_end(transformers: Any, tmp_path: Path) -> None:
    search = ensemble.Search({"lr": ensemble.loguniform(1e-4, 1e-2), "width": 8}, trials=2, pruner="median")
    declared = ports.transformers(args={"eval_strategy": "no"}, search=search, epochs=1)
    result = ensemble.submit(declared, tmp_path / "run", "inline").wait()
    assert [row["state"] for row in result.members] == ["finished"] * 2
    assert result.best is not None and result.best["metric"] == max(row["metric"] for row in result.members) > 0


def test_arguments_without_meaning_change_nothing(transformers: Any, tmp_path: Path) -> None:
    assert compare(tmp_path, transformers, {"all": dict(VOID)}) == {}
    log = (tmp_path / "run" / "members" / "member-0" / "log.txt").read_text()
    assert [name for name in VOID if f"{name}=" not in log] == []


def test_arguments_without_their_effect_are_refused_by_name(transformers: Any, tmp_path: Path) -> None:
    from ensemble.integrations.transformers import ARGUMENTS

    taken: list[str] = []

    def train(member: Any) -> None:
        for name, value in REFUSED.items():
            beside = BESIDE_REFUSED.get(name, {})
            args = transformers.TrainingArguments(**beside, **{name: value})
            try:
                make_trainer(member, args)
            except TrainingError as error:
                if f"{name}=" in str(error) and "secret" not in str(error):
                    continue
            taken.append(name)
        parsed = transformers.HfArgumentParser(transformers.TrainingArguments).parse_args_into_dataclasses([])[0]
        parsed = dataclasses.replace(parsed, report_to="none", learning_rate=0.02)
        assert (parsed.per_device_train_batch_size, parsed.num_train_epochs) == (8, 3.0)
        args = make_trainer(member, parsed).args
        assert (args.per_device_train_batch_size, args.num_train_epochs, args.learning_rate) == (BATCH, 2, 0.02)
        raise TrainingError("all are tried")

    run(tmp_path / "run", train, [Member({"width": 8})])
    (error,) = ports.list_errors(tmp_path / "run")
    assert "all are tried" in error and taken == []
    (remark,) = of_kind(tmp_path / "run", "remark")
    assert remark["text"].endswith("follow the Ensemble: num_train_epochs=2, per_device_train_batch_size=16")
    for name in NEEDS_MORE:
        with pytest.raises(TrainingError, match=f"TrainingArguments has {name}="):
            ARGUMENTS.check(print, {name: "set"}, {})


def test_averages_are_what_is_evaluated(transformers: Any, tmp_path: Path) -> None:
    def train(member: Any) -> None:
        make_trainer(member, refused.get(member.params.get("kind"), {})).train()
        member.predict_all()

    refused = {"best": BEST, "within": {"eval_strategy": "steps", "eval_steps": 3}}
    losses = {}
    own = {"callbacks": [ports.HalvedWeights()]}
    for name, options in (("plain", {}), ("averaged", {"averaging": "ema"}), ("own", own)):
        run(tmp_path / name, train, [Member({"width": 8})], **options)
        (end,) = of_kind(tmp_path / name, "finished")
        saved = load_predictions(RunDir(tmp_path / name).predictions("member-0"), "valid")
        nll = -np.log(saved.values[np.arange(len(saved.target)), saved.target]).mean()
        assert end["metrics"]["eval_loss"] == pytest.approx(nll, rel=1e-4)
        losses[name] = nll
    assert len(set(losses.values())) == 3
    run(tmp_path / "refused", train, [Member({"width": 8, "kind": kind}) for kind in refused], averaging="ema")
    errors = ports.list_errors(tmp_path / "refused")
    assert "load_best_model_at_end=True keeps weights that averaging= has not evaluated" in errors[0]
    assert "averaging= with eval_steps=3" in errors[1]


def test_a_model_init_makes_the_model_once(transformers: Any, tmp_path: Path) -> None:
    made: list[Any] = []

    def init() -> Any:
        made.append(ports.bert({"width": 8}))
        return made[-1]

    def train(member: Any) -> None:
        trainer = make_trainer(member, model=[], model_init=init)
        torch.manual_seed(trainer.args.seed)
        first = ports.bert({"width": 8})
        assert all(map(torch.equal, first.state_dict().values(), trainer.model.state_dict().values()))
        trainer.train()
        assert trainer.model is made[0]
        member.predict_all()

    _, result = run(tmp_path / "run", train, [Member({"width": 8})])
    assert [row["state"] for row in result.members] == ["finished"] and len(made) == 1


def test_evaluations_and_predictions_of_datasets_are_those_of_a_trainer(transformers: Any, tmp_path: Path) -> None:
    rows = list_rows(make_data()[1])[:7]
    found: list[Any] = []

    def train(member: Any) -> None:
        trainer = make_trainer(member, compute_metrics=compute_metrics)
        trainer.train()
        args = transformers.TrainingArguments(str(tmp_path / "plain"), use_cpu=True, report_to="none")
        plain = transformers.Trainer(trainer.model, args, compute_metrics=compute_metrics)
        found.append((trainer.evaluate(rows), plain.evaluate(rows)))
        found.append((trainer.predict(rows).metrics, plain.predict(rows).metrics))
        found.append((trainer.evaluate(), trainer.predict("valid", metric_key_prefix="eval").metrics))
        member.predict_all()

    _, result = run(tmp_path / "run", train, [Member({"width": 8})])
    assert [row["state"] for row in result.members] == ["finished"] and len(found) == 3
    for pair in found:
        one, other = read_figures(list(pair))
        one.pop("epoch", None)
        assert one == {name: value for name, value in other.items() if name != "epoch"} and one
