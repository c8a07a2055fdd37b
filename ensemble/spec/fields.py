"""What the fields of an `Ensemble`, a `Member` and `Resources` may be, each by itself."""

from __future__ import annotations

import functools
from typing import Any

from ensemble.spec.identity import PRECISIONS
from ensemble.spec.loops import LOOP_OPTIONS
from ensemble.spec.options import TRAINING_OPTIONS, Option, OptionTable, count, flag, number, one_of, resolve
from ensemble.spec.sample_weights import check_weighting
from ensemble.spec.validation import SpecError, check_choice, check_loss_scale, check_number
from pipelines.providers import Providers

#: Validation samples that a stack needs, which is fitted to parts of them.
STACKED_ROWS = 6
COMBINERS = ("average", "weighted", "greedy", "stack")

#: What a node is asked for.
NEEDS = {
    "cpus_per_worker": number(None, above=True),
    "gpus_per_worker": number(None),
    "threads": count(1),
    "memory_gb": number(None, above=True),
}


def _check_named(where: str, value: Any, *, table: OptionTable) -> None:
    if value is not None:
        resolve(where, value, table)


#: What each member may have its own value of.
MEMBER_FIELDS = {
    "seed": count(0, 0),
    "precision": one_of(*PRECISIONS),
    "epochs": count(1),
    "batch_size": count(32),
    "weights": Option("uniform", check_weighting),
    "loss_scale": Option("dynamic", check_loss_scale),
    "accumulate": count(1),
    **{
        name: Option(None, functools.partial(_check_named, table=table))
        for name, table in TRAINING_OPTIONS.items()
    },
    **LOOP_OPTIONS,
}


#: What calibrates a combined model: classes of `ensemble.combine.calibrators.Calibrator`.
CALIBRATORS = Providers(
    "calibrators",
    {
        "temperature": "ensemble.combine.calibrators:Temperature",
        "variance_scale": "ensemble.combine.variance_scale:VarianceScale",
    },
)


def _check_calibrate(where: str, value: Any) -> None:
    if not isinstance(value, bool) and (not isinstance(value, str) or CALIBRATORS.find(value) is None):
        names = ", ".join(map(repr, CALIBRATORS.names()))
        raise SpecError(f"{where} must be True, False or one of {names}, got {value!r}")


def _check_rehearsal(where: str, value: Any) -> None:
    if value is not None:
        check_choice(where, value, ("refuse", "say"))


def _check_combine(where: str, value: Any) -> None:
    if not callable(value):
        check_choice(where, value, COMBINERS)


#: Of an `Ensemble`.
ENSEMBLE_FIELDS = {
    **MEMBER_FIELDS,
    "prep_workers": count(1),
    **dict.fromkeys(("capacity", "cache_bytes", "cache_dir_bytes", "checkpoint_every"), count(None)),
    **dict.fromkeys(("allow_overlap", "drop_last", "elastic", "mps", "out_of_fold"), flag(False)),
    "stall_limit_s": number(60.0, above=True),
    "prepare_timeout_s": number(300.0, above=True),
    "hang_timeout_s": number(600.0, above=True),
    "retries": count(2, 0),
    "gate_timeout_s": number(120.0),
    "checkpoint_minutes": Option(30.0, functools.partial(check_number, low=0, above=True, optional=True)),
    "keep_checkpoints": one_of("all", "weights", "selected"),
    "keep_predictions_gb": number(1.0, above=True),
    "coverage": number(0.9, above=True, below=1),
    "thresholds": one_of("f1", "f1_macro", "balanced_accuracy"),
    "cache": one_of("memory", "disk"),
    "stall_policy": one_of("wait", "detach"),
    "devices": one_of("auto", "cpu", "cuda"),
    "rehearsal": Option("refuse", _check_rehearsal),
    "sharing": one_of("auto", "node", "single", "multi", "all", "independent"),
    "calibrate": Option(True, _check_calibrate),
    "combine": Option("greedy", _check_combine),
}
