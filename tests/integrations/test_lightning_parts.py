"""Each callback and each Trainer option of Lightning is used by our adapter, or refused before training."""

from __future__ import annotations

import functools
import importlib
import inspect
from pathlib import Path
from typing import Any

import ports
import pytest
import torch
from kit.event_dicts import read_events
from kit.once import is_first
from kit.tv import import_torchvision

import ensemble
from ensemble import Member, Recipe
from ensemble.integrations.lightning import CALLBACKS, OPTIONS
from ensemble.train.job import TrainingError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

LOGGED = {"DeviceStatsMonitor", "LearningRateMonitor", "ThroughputMonitor"}
ACTING = {"BackboneFinetuning", "EarlyStopping", "GradientAccumulationScheduler", "LambdaCallback"}
ACTING |= {"ModelCheckpoint", "OnExceptionCheckpoint", "SpikeDetection", "Timer"}
SEEN = {"BackboneFinetuning", "LambdaCallback", "SpikeDetection"}
#: Bases of others, and what only shows.
SHOWN = {"BaseFinetuning", "Callback", "Checkpoint", "ProgressBar"}
SHOWN |= {"ModelSummary", "RichModelSummary", "RichProgressBar", "TQDMProgressBar"}
REFUSED = {name for table, names, _ in CALLBACKS.rows if table == "refused" for name in names}
REFUSED_VALUES: dict[str, Any] = {"max_steps": 5, "min_steps": 5, "overfit_batches": 2, "max_time": "00:00:10:00"}
REFUSED_VALUES |= dict.fromkeys(("limit_train_batches", "limit_test_batches", "limit_predict_batches"), 1)
REFUSED_VALUES |= {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 9, "num_nodes": 2, "devices": 2}
REFUSED_VALUES |= {"precision": "bf16-mixed", "accelerator": "gpu", "strategy": "ddp"}
REFUSED_VALUES |= {"fast_dev_run": True, "barebones": True}
#: Options with a Trainer's own effect, and what each needs beside it.
SAME: dict[str, Any] = {"accumulate_grad_batches": 2, "benchmark": True}
SAME |= {"callbacks": ["EarlyStopping", "GradientAccumulationScheduler"], "check_val_every_n_epoch": 3}
SAME |= {"default_root_dir": "here", "detect_anomaly": True, "deterministic": True}
SAME |= {"enable_autolog_hparams": False, "enable_checkpointing": True, "enable_model_summary": True}
SAME |= {"enable_progress_bar": True, "gradient_clip_algorithm": "value", "gradient_clip_val": 0.05}
SAME |= {"inference_mode": False, "limit_val_batches": 1, "log_every_n_steps": 1, "logger": True, "min_epochs": 1}
SAME |= {"model_registry": "named", "num_sanity_val_steps": 0, "plugins": [], "profiler": "simple"}
SAME |= {"val_check_interval": 2}
#: What an option of them needs beside it.
BESIDE: dict[str, Any] = {"gradient_clip_algorithm": {"gradient_clip_val": 0.01}}
VOID = {"sync_batchnorm": True, "use_distributed_sampler": False}


@pytest.fixture(autouse=True)
def lightning(monkeypatch: pytest.MonkeyPatch) -> Any:
    import_torchvision(monkeypatch)
    return pytest.importorskip("lightning.pytorch")


def make_module(params: Any = None) -> Any:
    return ports.lightning_module({"width": 8, "lr": 0.01})


def fit(path: Path, callbacks: Any = list, **options: Any) -> tuple[str | None, dict[str, float]]:
    of_ensemble = {name: options.pop(name) for name in ("averaging",) if name in options}
    members = [Member({"width": 8, "lr": 0.01}, callbacks=options.pop("own", None))]
    declared = ports.lightning(callbacks, members=members, epochs=2, fit=options, **of_ensemble)
    ensemble.submit(declared, path, "inline").wait()
    ends = [event for event in read_events(path / "events.jsonl") if event["type"] in ("finished", "failed")]
    assert len(ends) == 1, "what is refused is not tried again"
    return ends[0].get("error"), ends[0].get("metrics", {})


def test_every_callback_and_option_of_lightning_is_placed(lightning: Any) -> None:
    package = lightning.__name__.partition(".")[0]
    kinds = ports.subclasses(lightning.Callback)
    ours = {kind.__name__ for kind in kinds if kind.__module__.startswith(f"{package}.")}
    for table, expected in ((CALLBACKS, {name for name in ours if not name.startswith("_")}), (OPTIONS, None)):
        expected = expected or set(inspect.signature(lightning.Trainer.__init__).parameters) - {"self"}
        assert set().union(*ports.list_names(table).values()) == expected
    assert set(CALLBACKS.same.split()) == SHOWN | LOGGED | ACTING
    parts = {"same effect": set(SAME), "refused": set(REFUSED_VALUES), "no meaning here": set(VOID)}
    assert ports.list_names(OPTIONS) == parts


@pytest.mark.more
def test_options_have_the_effect_that_they_have_in_a_plain_trainer(lightning: Any, tmp_path: Path) -> None:
    options = {name: {**BESIDE.get(name, {}), name: value} for name, value in SAME.items()}
    options["no meaning"] = VOID
    trained: dict[str, Any] = {}

    class Seeds(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            torch.manual_seed(trainer.global_step)  # of dropout

    def make(name: str, side: str) -> dict[str, Any]:
        given = {**options[name]}
        kinds = {"EarlyStopping": {"monitor": "val_loss", "min_delta": 9.0, "patience": 1}}
        kinds["GradientAccumulationScheduler"] = {"scheduling": {1: 2}}
        more = [getattr(lightning.callbacks, kind)(**kinds[kind]) for kind in given.pop("callbacks", ())]
        if "default_root_dir" in given or name in ("logger", "profiler", "enable_checkpointing"):
            given["default_root_dir"] = tmp_path / side / name
        return {**given, "callbacks": [Seeds(), *more]}

    def train(member: Any) -> None:
        from ensemble.integrations.lightning import fit

        name = member.params["option"]
        torch.manual_seed(3)
        module = make_module()
        trainer = fit(member, module, fields=("x", "label"), **make(name, "ours"))
        trained[name] = trainer, ports.copy_weights(module)

    parts, datasets = ports.few_points()
    recipe = Recipe(model=make_module, train=train, objective="accuracy")
    members = [Member({"option": name}) for name in options]
    declared = ports.declare(recipe, parts, members=members, epochs=2, batch_size=16)
    ensemble.submit(declared, tmp_path / "run", "inline").wait()
    assert ports.list_errors(tmp_path / "run") == [] and len(trained) == len(options)
    differences: dict[str, Any] = {}
    for name in options:
        torch.manual_seed(3)
        module = make_module()
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        quiet |= {"enable_model_summary": False, "default_root_dir": tmp_path / "plain" / name}
        plain = lightning.Trainer(**{**quiet, "accelerator": "cpu", "max_epochs": 2, **make(name, "theirs")})
        plain.fit(module, *ports.load_plainly(datasets, declared))
        ours, weights = trained[name]
        if ports.differs(module, weights):
            differences[name] = "weights"
        shown = [{k: float(v) for k, v in each.callback_metrics.items()} for each in (ours, plain)]
        if name != "check_val_every_n_epoch" and shown[0] != shown[1]:  # it is validated at the end
            differences[f"{name}: figures"] = shown
        steps = [(each.global_step, each.current_epoch, each.should_stop) for each in (ours, plain)]
        if steps[0] != steps[1]:
            differences[f"{name}: steps"] = steps
    assert differences == {}


@pytest.mark.parametrize("name", ["StochasticWeightAveraging", pytest.param("rest", marks=pytest.mark.more)])
def test_a_callback_without_effect_is_refused_by_name(lightning: Any, name: str, tmp_path: Path) -> None:
    class Writer(lightning.callbacks.BasePredictionWriter):  # type: ignore[misc]
        pass

    own = {
        "StochasticWeightAveraging": lambda kinds: kinds.StochasticWeightAveraging(swa_lrs=0.1),
        "BasePredictionWriter": lambda kinds: Writer("epoch"),
        "ModelPruning": lambda kinds: kinds.ModelPruning("l1_unstructured", amount=0.5),
    }
    for kind in (name,) if name != "rest" else sorted(REFUSED - {"StochasticWeightAveraging"}):
        make = own.get(kind, lambda kinds, kind=kind: getattr(kinds, kind)())
        error, _ = fit(tmp_path / kind, lambda make=make: [make(lightning.callbacks)])
        assert error is not None and f"Lightning's {kind} does" in error and "member's loop: " in error


@pytest.mark.parametrize("name", ["fast_dev_run", pytest.param("rest", marks=pytest.mark.more)])
def test_an_option_without_effect_is_refused_by_name(name: str, tmp_path: Path) -> None:
    for option in (name,) if name != "rest" else sorted(set(REFUSED_VALUES) - {"fast_dev_run"}):
        value = REFUSED_VALUES[option]
        error, _ = fit(tmp_path / option, **{option: value})
        assert error is not None and f"the Trainer has {option}={value!r}: " in error
    if name == "fast_dev_run":
        assert "--dry-run" in str(error)


@pytest.mark.more
def test_what_cannot_end_with_an_epoch_or_fit_averages_is_refused(lightning: Any, tmp_path: Path) -> None:
    kinds = lightning.callbacks
    error, _ = fit(tmp_path / "timer", lambda: [kinds.Timer("00:00:00:01")])
    assert error is not None and "Timer(interval='epoch')" in error
    error, _ = fit(tmp_path / "only measures", lambda: [kinds.Timer()])
    assert error is None
    own = [ports.HalvedWeights()]
    refused = [({"averaging": "ema"}, "averaging= has not evaluated"), ({"own": own}, "weights of its own")]
    for options, words in refused:
        error, _ = fit(tmp_path / words, lambda: [kinds.ModelCheckpoint(tmp_path, monitor="val_loss")], **options)
        assert error is not None and words in error
    _, plain = fit(tmp_path / "plain")
    for name, options in (("averaged", {"averaging": "ema"}), ("halved", {"own": own})):
        error, other = fit(tmp_path / name, **options)
        assert error is None and other["train_loss"] == plain["train_loss"]
        assert other["val_loss"] != plain["val_loss"]


@pytest.mark.parametrize("epoch", [2, 3], ids=["where it is unfrozen", "later"])
def test_a_member_that_fails_goes_on_with_the_backbone_and_the_objects_that_it_had(
    lightning: Any, epoch: int, tmp_path: Path
) -> None:
    class Scaler:
        def __init__(self) -> None:
            self.mean, self.epochs = torch.ones(3), 0

    class Partly(type(make_module())):  # type: ignore[misc]
        def __init__(self, width: int, lr: float) -> None:
            super().__init__(width, lr)
            self.backbone, self.scaler = self.net[0], Scaler()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(
                [each for each in self.parameters() if each.requires_grad], lr=self.hparams["lr"]
            )

        def on_train_epoch_end(self) -> None:
            self.scaler.epochs += 1

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["scaler"] = self.scaler

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.scaler = checkpoint["scaler"]

        def on_train_end(self) -> None:
            assert type(self.scaler) is Scaler and (self.scaler.epochs, float(self.scaler.mean.sum())) == (5, 3)

    class Failing(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            if (trainer.current_epoch, number) == (epoch, 1) and failing and is_first(tmp_path / "failed"):
                raise OSError("once")

    def train(member: Any) -> None:
        from ensemble.integrations.lightning import fit

        unfreezing = lightning.callbacks.BackboneFinetuning(2, backbone_initial_lr=0.05, verbose=False)
        fit(member, Partly(**member.params), fields=("x", "label"), callbacks=[unfreezing, Failing()])

    build = functools.partial(Partly, 8, 0.01)
    recipe = Recipe(model=lambda params: build(), train=train, objective="accuracy")
    ends = []
    options: dict[str, Any] = {"epochs": 5, "batch_size": 16, "checkpoint_every": 1}
    for failing in (False, True):
        made = ports.declare(recipe, ports.few_points()[0], members=[{"width": 8, "lr": 0.01}], **options)
        ensemble.submit(made, tmp_path / str(failing), "inline").wait()
        events = read_events(tmp_path / str(failing) / "events.jsonl")
        ends += [event for event in events if event["type"] == "finished"]
    assert [event["epoch"] for event in events if event["type"] == "started"] == [0, epoch]
    assert [end["attempt"] for end in ends] == [0, 1] and ends[0]["weights_sha256"] == ends[1]["weights_sha256"]
    assert ends[0]["metrics"] == ends[1]["metrics"]


@pytest.mark.more
@pytest.mark.parametrize("name", [*sorted(LOGGED | SEEN), "Timer"])
def test_a_callback_that_is_taken_acts(lightning: Any, name: str, tmp_path: Path) -> None:
    """Others: test_options_have_the_effect..., test_killed_members_end_with_the_bits_of_undisturbed_ones."""
    seen: list[Any] = []
    kinds = lightning.callbacks

    class Spikes(kinds.SpikeDetection):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            seen.append("spike")

    class Frozen(kinds.BackboneFinetuning):  # type: ignore[misc]
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            vars(module)["backbone"] = module.net[0]
            super().setup(trainer, module, stage)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            seen.append([each.requires_grad for each in module.net.parameters()])

    make = {
        "BackboneFinetuning": Frozen,
        "LambdaCallback": lambda: kinds.LambdaCallback(on_train_start=lambda *_: seen.append("lambda")),
        "SpikeDetection": Spikes,
        "ThroughputMonitor": lambda: kinds.ThroughputMonitor(batch_size_fn=len),
        "Timer": lambda: kinds.Timer({"milliseconds": 1}, interval="epoch"),
    }.get(name, lambda: getattr(kinds, name)())
    others = [kinds.OnExceptionCheckpoint(tmp_path)] if name == "Timer" else []
    logger = importlib.import_module(f"{lightning.__name__}.loggers").CSVLogger(tmp_path / "logged")
    options = {"logger": logger, "log_every_n_steps": 1} if name in LOGGED else {}
    error, _ = fit(tmp_path / "run", lambda: [make(), *others], **options)
    assert error is None
    epochs = [event for event in read_events(tmp_path / "run/events.jsonl") if event["type"] == "epoch"]
    assert len(epochs) == (1 if name == "Timer" else 2)
    assert bool(seen) == (name in SEEN)
    if name == "BackboneFinetuning":
        assert seen == [[False, False, True, True]]
    if name in LOGGED:
        text = next((tmp_path / "logged").rglob("metrics.csv")).read_text()
        shown = {"DeviceStatsMonitor": "DeviceStats", "LearningRateMonitor": "lr-Adam"}
        assert shown.get(name, "train/samples") in text


@pytest.mark.more
def test_a_trainer_of_ones_own_is_checked_by_what_it_shows(lightning: Any, tmp_path: Path) -> None:
    from ensemble.integrations.lightning import fit as fit_member

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    given = {"max_epochs": 9, "limit_train_batches": 1, "overfit_batches": 2, "fast_dev_run": True}
    refused: list[str] = []

    def train(member: Any) -> None:
        for name, value in given.items():
            trainer = lightning.Trainer(**{**quiet, "max_epochs": 2, name: value})
            try:
                fit_member(member, make_module(), trainer, fields=("x", "label"))
            except TrainingError as error:
                if f"the Trainer has {name}={value!r}: " in str(error):
                    refused.append(name)
        trainer = lightning.Trainer(**quiet, max_epochs=2)
        fit_member(member, make_module(), trainer, fields=("x", "label"))

    recipe = Recipe(model=make_module, train=train, objective="accuracy")
    declared = ports.declare(recipe, ports.points(), members=[Member({"width": 8})], epochs=2)
    result = ensemble.submit(declared, tmp_path / "run", "inline").wait()
    assert [row["state"] for row in result.members] == ["finished"] and refused == list(given)
