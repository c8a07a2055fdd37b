"""Each callback and each Trainer option of Lightning is used by our adapter, or refused before training."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import ports
from event_dicts import read_events
from tv import import_torchvision

import ensemble
from ensemble import Member
from ensemble.integrations.lightning import REFUSED_CALLBACKS, REFUSED_OPTIONS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

#: Bases of others, and what a new version adds is neither used nor refused until it is entered here or there.
BASES = {"BaseFinetuning", "Checkpoint", "ProgressBar", "Callback"}
REFUSED = {*REFUSED_CALLBACKS, "EMAWeightAveraging"}  # a WeightAveraging
SHOWN = {"ModelSummary", "RichModelSummary", "RichProgressBar", "TQDMProgressBar"}
LOGGED = {"DeviceStatsMonitor", "LearningRateMonitor", "ThroughputMonitor"}
ACTING = {
    "BackboneFinetuning",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "ModelCheckpoint",
    "OnExceptionCheckpoint",
    "SpikeDetection",
    "Timer",
}
#: The member says them: `fit` refuses another value.
FIXED = {"accelerator", "devices", "max_epochs", "num_nodes", "precision", "strategy"}
USED = {"accumulate_grad_batches", "benchmark", "callbacks", "check_val_every_n_epoch", "default_root_dir"}
USED |= {
    "detect_anomaly",
    "deterministic",
    "enable_autolog_hparams",
    "enable_checkpointing",
    "enable_progress_bar",
}
USED |= {
    "enable_model_summary",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "inference_mode",
    "limit_val_batches",
}
USED |= {
    "log_every_n_steps",
    "logger",
    "max_time",
    "min_epochs",
    "model_registry",
    "num_sanity_val_steps",
    "plugins",
}
USED |= {"profiler", "val_check_interval"}
#: Of several workers; here there is one, for which they say nothing.
OF_SEVERAL = {"sync_batchnorm", "use_distributed_sampler"}


@pytest.fixture(autouse=True)
def lightning(monkeypatch: pytest.MonkeyPatch) -> Any:
    import_torchvision(monkeypatch)
    return pytest.importorskip("lightning.pytorch")


def fit(path: Path, callbacks: Any = list, **options: Any) -> tuple[str | None, dict[str, float]]:
    """Why a member failed, and its metrics."""
    of_ensemble = {name: options.pop(name) for name in ("averaging",) if name in options}
    members = [Member({"width": 8, "lr": 0.01})]
    declared = ports.lightning(callbacks, members=members, epochs=2, fit=options, **of_ensemble)
    ensemble.submit(declared, path, "inline").wait()
    ends = [event for event in read_events(path / "events.jsonl") if event["type"] in ("finished", "failed")]
    assert len(ends) == 1, "what is refused is not tried again"
    return ends[0].get("error"), ends[0].get("metrics", {})


def subclasses(kind: type) -> set[type]:
    return {kind, *(each for one in kind.__subclasses__() for each in subclasses(one))}


def test_every_callback_and_option_of_lightning_is_placed(lightning: Any) -> None:
    package = lightning.__name__.partition(".")[0]
    ours = {each.__name__ for each in subclasses(lightning.Callback) if each.__module__.startswith(f"{package}.")}
    assert {name for name in ours if not name.startswith("_")} == BASES | REFUSED | SHOWN | LOGGED | ACTING
    options = set(inspect.signature(lightning.Trainer.__init__).parameters) - {"self"}
    assert options == FIXED | USED | OF_SEVERAL | set(REFUSED_OPTIONS)


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
        assert error is not None and kind.removeprefix("EMA") in error and "member's loop: " in error


@pytest.mark.parametrize("name", ["fast_dev_run", pytest.param("rest", marks=pytest.mark.more)])
def test_an_option_without_effect_is_refused_by_name(name: str, tmp_path: Path) -> None:
    values = {"max_steps": 5, "min_steps": 5, "overfit_batches": 2, "reload_dataloaders_every_n_epochs": 1}
    limits = dict.fromkeys(("limit_train_batches", "limit_test_batches", "limit_predict_batches"), 1)
    for option in (name,) if name != "rest" else sorted(set(REFUSED_OPTIONS) - {"fast_dev_run"}):
        value = {**values, **limits}.get(option, True)
        error, _ = fit(tmp_path / option, **{option: value})
        assert error is not None and f"the Trainer has {option}={value}: " in error
    if name == "fast_dev_run":
        assert "--dry-run" in str(error)


@pytest.mark.more
def test_averages_are_what_is_validated(tmp_path: Path) -> None:
    _, plain = fit(tmp_path / "plain")
    _, averaged = fit(tmp_path / "averaged", averaging="ema")
    assert averaged["train_loss"] == plain["train_loss"] and averaged["val_loss"] != plain["val_loss"]


@pytest.mark.more
@pytest.mark.parametrize("name", sorted(ACTING | LOGGED))
def test_a_callback_that_is_taken_acts(lightning: Any, name: str, tmp_path: Path) -> None:
    seen: list[Any] = []
    kinds = lightning.callbacks

    class Counter(lightning.Callback):  # type: ignore[misc]
        def on_train_end(self, trainer: Any, module: Any) -> None:
            seen.append((trainer.global_step, trainer.current_epoch, trainer.should_stop))

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
        "EarlyStopping": lambda: kinds.EarlyStopping("val_loss", stopping_threshold=9.0),
        "GradientAccumulationScheduler": lambda: kinds.GradientAccumulationScheduler({0: 3}),
        "LambdaCallback": lambda: kinds.LambdaCallback(on_train_start=lambda *_: seen.append("lambda")),
        "ModelCheckpoint": lambda: kinds.ModelCheckpoint(tmp_path / "kept", monitor="val_loss"),
        "OnExceptionCheckpoint": lambda: kinds.OnExceptionCheckpoint(tmp_path),
        "SpikeDetection": Spikes,
        "ThroughputMonitor": lambda: kinds.ThroughputMonitor(batch_size_fn=len),
        "Timer": lambda: kinds.Timer({"milliseconds": 1}, interval="epoch"),
    }.get(name, lambda: getattr(kinds, name)())
    logger = importlib.import_module(f"{lightning.__name__}.loggers").CSVLogger(tmp_path / "logged")
    options = {"logger": logger, "log_every_n_steps": 1} if name in LOGGED else {}
    error, _ = fit(tmp_path / "run", lambda: [make(), Counter()], **options)
    assert error is None
    steps, epochs, stopped = seen[-1]
    assert (steps == 10) == (name == "GradientAccumulationScheduler")
    assert stopped == (name in ("EarlyStopping", "Timer")) and (epochs == 2 or stopped)
    if name in ("LambdaCallback", "SpikeDetection"):
        assert len(seen) > 1
    if name == "BackboneFinetuning":
        assert [False, False, True, True] in seen
    if name == "ModelCheckpoint":
        assert list((tmp_path / "kept").glob("*.ckpt"))
    if name in LOGGED:
        text = next((tmp_path / "logged").rglob("metrics.csv")).read_text()
        assert {"DeviceStatsMonitor": "DeviceStats", "LearningRateMonitor": "lr-Adam"}.get(
            name, "train/samples"
        ) in text
