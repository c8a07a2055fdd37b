"""Mistakes in declarations: options of an ensemble, its loop, its nodes, loggers, data, weights and settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from kit.mistakes import Mistake

from ensemble import (
    SWA,
    Bootstrap,
    EarlyStopping,
    Ensemble,
    Folds,
    Member,
    MLflow,
    Recipe,
    Resources,
    Search,
    SpecError,
    TensorBoard,
    WandB,
    choice,
    integer,
    loguniform,
    uniform,
)
from ensemble.spec import Energy
from ensemble.spec.spec_file import call_spec
from pipelines import Pipeline, sources, stages

DATA = Pipeline(sources.arrays(x=np.zeros((100, 2), np.float32), label=np.zeros(100, np.int64)))
SMALL = Pipeline(sources.arrays(x=np.zeros((8, 2), np.float32)))
AUGMENTED = Pipeline(sources.arrays(x=np.zeros((8, 3, 4, 4), np.uint8))).map(stages.random_crop("x", 4, padding=1))
RECIPE = Recipe(model=len, loss=len, task="classification")
OWN_OPTIMIZER = Recipe(model=dict, loss=dict, task="classification", optimizer=dict)
OWN_SCHEDULE = Recipe(model=dict, loss=dict, task="classification", schedule=dict)
MOMENTUM: dict[str, Any] = {"members": None, "optimizer": "lars"}
LR = Search({"lr": choice(1, 2)})
H100 = {"gpu_type": "H100"}
LARGE = Member({}, nodes={"gpu_memory_gb": 8})
TYPE = "ray.io/accelerator-type"


def refused(
    of: str, make: Callable[..., Any], *table: tuple[Any, ...], arguments: int = 0, also: str = ""
) -> list[Mistake]:
    """Rows of options of `make`, or of so many arguments, each with words of the answer."""
    rows = []
    for row in table:
        given, words = row[: arguments or 1], row[arguments or 1 :]
        call = partial(make, *given) if arguments else partial(make, **given[0])
        what = re.sub(r" at 0x\w+|\s+", " ", f"{of}: {given!r:.120}: {words[0]}")
        rows.append(Mistake(what, call, SpecError, (*words, also)))
    return rows


def calls(of: str, *table: tuple[Any, ...]) -> list[Mistake]:
    """Rows of what is called, each with words of the answer in one line."""
    return [Mistake(f"{of}: {words[0]}", do, SpecError, tuple(words)) for do, *words in table]


def declare(**options: Any) -> Ensemble:
    """An ensemble of a train function and 8 samples, but for these options."""
    return Ensemble(**{"name": "spec", "recipe": len, "train": SMALL, "members": [{"lr": 0.1}], **options})


def declare_loop(**options: Any) -> Ensemble:
    """An ensemble of the built-in training loop with a validation split, but for these options."""
    return declare(**{"recipe": RECIPE, "train": DATA, "valid": DATA, **options})


def declare_nodes(nodes: Any, *members: Any, **options: Any) -> Ensemble:
    return declare(members=members or [{}], resources=Resources(nodes=nodes), **options)


def of_length(params: dict[str, Any]) -> Pipeline:
    return Pipeline(sources.arrays(x=np.zeros(params["n"])))


def nothing(params: dict[str, Any]) -> Any:
    return params["n"]


OF_FOUR: dict[str, Any] = {"train": of_length, "members": [{"n": 4}]}


def declare_data(train: Any, **options: Any) -> Ensemble:
    return declare(**{"train": train, "recipe": RECIPE, "members": [{"n": 8}, {"n": 8}, {"n": 9}], **options})


def options(  # type: ignore[no-untyped-def]
    number: int = 3, rate: float = 1, flag: bool = False, maybe: int | None = None, widths=(16, 32)
) -> Ensemble:
    return declare()


OF_MEMBERS = calls(
    "weights and intervals",
    (lambda: Folds(1), "Folds.k must be at least 2, got 1"),
    (lambda: Folds(3, held_out=3), "Folds.held_out must be below k, which is 3, got 3"),
    (lambda: Folds(3, seed=-1), "Folds.seed must be at least 0"),
    (lambda: Folds(), "Folds: missing 1 required positional argument: 'k'"),
    (lambda: Bootstrap(seed=0.5), "Bootstrap.seed must be an integer"),
    (lambda: Member(weights="folds"), "Member.weights cannot be 'folds'"),
    (lambda: loguniform(0, 1), "loguniform(0, 1): both ends must be above 0"),
    (lambda: integer(3, 2), "integer(3, 2): the first end must be at most the second"),
    (lambda: Member({}, compression="zip"), "Member.compression cannot be 'zip'"),
)
OF_OTHER_CLASSES = calls(
    "an option of another class",
    (lambda: declare_loop(workers=2), "resources=Resources(workers=...) or Member(workers=...) in members="),
    (lambda: declare_loop(split_metrics=["f1_macro"]), "give it as recipe=Recipe(split_metrics=...)"),
    (lambda: declare_loop(patience=3), "EarlyStopping(patience=...)"),
    (lambda: Search({"lr": choice(0.1, 0.2)}, epochs=3), "Search ", " 'epochs'; give it as Member(epochs=...)"),
)
LOGGERS = calls(
    "loggers",
    (lambda: declare(loggers=["tensorbord"]), "did you mean 'tensorboard'? (valid: tensorboard, mlflow, wandb)"),
    (lambda: declare(loggers="wandb"), "must be a list such as ['tensorboard'], got 'wandb'"),
    (lambda: declare(loggers=["mlflow", MLflow(uri="http://x")]), "has 'mlflow' twice"),
    (lambda: declare(loggers=[7]), "Ensemble.loggers has no logger '7'"),
    (lambda: declare(loggers=["webhook"]), "'webhook' is not a logger of Ensemble.loggers: give `submit` notify="),
    (lambda: declare(loggers=[{"name": "mlflow", "url": "x"}]), "MLflow has no option", "did you mean 'uri'?"),
    (lambda: WandB(mode="ofline"), "WandB.mode cannot be 'ofline'; did you mean 'offline'?"),
    (lambda: MLflow(url="x"), "MLflow has no option 'url'; did you mean 'uri'?"),
    (lambda: TensorBoard(dir=""), "TensorBoard.dir must be a str that is not empty"),
)
NODES = refused(
    "nodes",
    declare_nodes,
    (["H100"], "Resources.nodes must be a dict such as {'gpu_type': 'H100', 'spot': False}, got ['H100']"),
    ({"gpu_typ": "H100"}, "Resources.nodes has no 'gpu_typ'; did you mean 'gpu_type'?"),
    ({"gpu-type": "H100"}, "did you mean 'gpu_type'?"),
    ({"gpu_memory": 40}, "did you mean 'gpu_memory_gb'?"),
    ({"ray.io/accelerator_type": "H100"}, f"did you mean '{TYPE}'?"),
    ({"my label": "a"}, "has 'my label', which is neither one of gpu_type, spot, gpu_memory_gb nor"),
    ({5: "a"}, "has 5, which is neither"),
    ({"ray.io/node-id": "ab"}, "nodes cannot be chosen by ray.io/node-id, which changes whenever a node starts"),
    ({"gpu_type": "H100", TYPE: "T4"}, f"has '{TYPE}' and another name of the same property: give one of them"),
    ({"gpu_type": ["H100", "T4"]}, "nodes['gpu_type'] must be 'value', '!value', 'in(a,b)' or '!in(a,b)', got ['"),
    ({"team": "in(a,b"}, "nodes['team'] must be 'value', '!value', 'in(a,b)' or '!in(a,b)', got 'in(a,b'"),
    ({"team": ""}, "must be 'value'"),
    ({"team": "!!a"}, "must be 'value'"),
    ({"spot": "spot"}, "Resources.nodes['spot'] must be True or False, got 'spot'"),
    ({"gpu_memory_gb": 0}, "Resources.nodes['gpu_memory_gb'] must be above 0, got 0"),
    ({"gpu_type": "in(T4,L4)", "gpu_memory_gb": 40}, "gpu_type=in(T4,L4) (T4 has 16 GB, L4 has 24"),
    arguments=1,
) + calls(
    "no GPU",
    (
        lambda: declare_nodes({"gpu_type": "H100"}, Member({}, gpus_per_worker=0.0)),
        "members[0]",
        "(gpu_type=H100), but gpus_per_worker=0",
    ),
    (
        lambda: declare_nodes(None, {}, Member({}, nodes={"gpu_memory_gb": 8}), devices="cpu"),
        "members[1]",
        "asks for GPUs (gpu_memory_gb=8)",
        "devices='cpu'",
    ),
)
ROWS = [
    *OF_MEMBERS,
    *OF_OTHER_CLASSES,
    *LOGGERS,
    *NODES,
    *refused(
        "an ensemble",
        declare,
        ({"epoch": 3}, "no option 'epoch'; did you mean 'epochs'"),
        ({"optimiser": "sgd"}, "did you mean 'optimizer'? (help(ensemble.Ensemble) lists all "),
        ({"valid_every": 1}, "; did you mean 'validate_every' or 'valid'? (help(ensemble.Ensemble) lists all "),
        ({"qqqqq": 1}, "no option 'qqqqq' (help(ensemble.Ensemble) lists all "),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"epochs": 2.5}, "epochs must be an integer, got 2.5"),
        ({"epochs": True}, "epochs must be an integer"),
        ({"coverage": 0}, "coverage must be above 0, got 0"),
        ({"coverage": 1.0}, "coverage must be below 1, got 1.0"),
        ({"precision": "fp8"}, "(valid: fp32, bf16, fp16)"),
        ({"sharing": "none"}, "(valid: auto, node, single, multi, all, independent)"),
        ({"name": "a/b"}, "name must be a plain file name"),
        ({"name": " "}, "name must be a plain file name"),
        ({"name": 5}, "name must be a plain file name, got 5"),
        ({"members": 3}, "members must be a list of dicts or Members, got 3"),
        ({"members": []}, "members is empty"),
        ({"members": [{}, 7]}, "members[1] must be a dict of hyperparameters or a Member, got 7"),
        ({"members": [{}, Member({}, workers=0)]}, "members[1]: Resources.workers must be at least 1, got 0"),
        ({"members": None}, "exactly one of members= and search="),
        ({"search": Search({"lr": loguniform(0.1, 1.0)})}, "exactly one of members= and search="),
        ({"members": None, "search": {"lr": 1}}, "search must be Search("),
        ({"drop_last": "no"}, "drop_last must be True or False, got 'no'"),
        ({"drop_last": True, "batch_size": 9}, "an epoch of 8 samples has no whole batch of 9"),
        ({"train": None, "recipe": RECIPE}, "train is missing: ", "train=Pipeline(source)", "recipe=train"),
        *(
            ({"train": None, **options}, f"{name}", "pipeline")
            for name, options in {
                "Ensemble.out_of_fold": {"out_of_fold": True},
                "Ensemble.drop_last": {"drop_last": True},
                "Ensemble.elastic": {"elastic": True},
                "Ensemble.cache": {"cache": "memory"},
                "Ensemble.weights": {"members": [{}, Member({}, weights=Folds(2, stratify="label"))]},
                "members[0]: workers=": {"resources": Resources(workers=2)},
                "members[0]: accumulate=, mixup=, averaging=": {"mixup": 0.1, "accumulate": 2, "averaging": "ema"},
            }.items()
        ),
        ({"recipe": 1}, "recipe must be a Recipe or a function train(member), got 1"),
        ({"valid": AUGMENTED}, "Ensemble.valid draws random numbers in its stage RandomCrop, but"),
        ({"test": AUGMENTED}, "Ensemble.test draws random numbers in its stage RandomCrop"),
        ({"hang_timeout_s": 0}, "hang_timeout_s must be above 0, got 0"),
        ({"stall_limit_s": 0}, "stall_limit_s must be above 0, got 0"),
        ({"stall_policy": "detatch"}, "stall_policy cannot be 'detatch'; did you mean 'detach'"),
        ({"resources": {"workers": 2}}, "resources must be Resources(...)"),
        ({"resources": None}, "resources must be Resources(...), got None"),
        ({"energy": None}, "energy must be Energy(...), got None"),
        ({"energy": type("Energy", (), {})()}, "energy must be Energy(...), got <"),
        ({"weights": "bootstap"}, "weights cannot be 'bootstap'; did you mean 'bootstrap'"),
        ({"weights": 5}, "weights must be 'balanced', 'bootstrap', 'uniform', Bootstrap(...), Folds(...) or"),
        ({"weights": Folds(9)}, "members[0]: Folds.k must be at most the number of training samples, 8, got 9"),
        ({"members": None, "search": Search({"lr": 1}), "weights": Folds(9)}, "Folds.k must be at most"),
    ),
    *refused(
        "words of a loop",
        lambda **given: declare_loop(**{"valid": None, **given}),
        ({"optimizer": "lasr"}, "did you mean 'lars'? (valid: sgd, adam, adamw, lars)"),
        ({"optimizer": {"name": "lars", "beta": 1}}, "'lars' has no option 'beta'"),
        ({"optimizer": {"momentum": 0.9}}, "Ensemble.optimizer needs a 'name'"),
        ({"optimizer": {"name": "sgd", "momentum": 1.5}}, "Ensemble.optimizer['momentum'] must be below 1"),
        ({"optimizer": {"name": "adam", "betas": [0.9]}}, "must be a list of 2 numbers"),
        ({"compression": "qsgd5"}, "valid: none, fp16, bf16, qsgd2"),
        ({"compression": {"name": "qsgd4", "norm": "l1"}}, "Ensemble.compression['norm'] cannot be 'l1'"),
        ({"compression": {"name": "none", "bucket": 1}}, "'none' has no options, got 'bucket'"),
        ({"compression": {"name": "qsgd4", "bucket": 100}}, "must be a power of two from 32 to 65536, got 100"),
        ({"compression": 4}, "Ensemble.compression must be a name (none, fp16,"),
        ({"optimizer": len}, "a function goes into the Recipe"),
        ({"optimizer": "adamW"}, "did you mean 'adamw'?"),
        ({"schedule": "step", "members": [{"gamma": -1}]}, "members[0]: schedule['gamma'] must be above 0"),
        (
            {**MOMENTUM, "search": Search({"momentum": uniform(0.5, 2.0)})},
            "Search.space: ",
            "momentum'] must be below 1",
        ),
        ({**MOMENTUM, "search": Search({"momentum": uniform(0.5, 0.9)})}, "Search.space: ", "'lars' needs lr"),
        ({"members": [{"lr": "fast"}]}, "members[0]: optimizer['lr'] must be a number, got 'fast'"),
        ({"communicator": "mpi"}, "valid: torch, horovod, hierarchical, hybrid"),
        ({"communicator": {"name": "hybrid", "bucket_bytes": "auto"}}, "must be an integer"),
        ({"schedule": {"name": "cosine", "end": 2}}, "Ensemble.schedule['end'] must be below 1"),
        ({"loss_scale": 0}, "Ensemble.loss_scale must be above 0"),
        ({"loss_scale": "static"}, "Ensemble.loss_scale must be 'dynamic' or a number above 0"),
        ({"accumulate": 0}, "Ensemble.accumulate must be at least 1"),
        ({"optimizer": "sgd", "members": [{}]}, "members[0]: the optimizer 'sgd' needs lr"),
        ({"optimizer": {"name": "adam", "betas": [0.9, 1.5]}}, "Ensemble.optimizer['betas'][1] must be below 1"),
        ({"optimizer": {"name": "sgd", "nesterov": True}}, "nesterov=True needs a momentum"),
        ({"schedule": {"name": "step", "every_epochs": 2, "milestones": [3]}}, "not both"),
        ({"schedule": {"name": "cosine", "warmup_epochs": 3}, "epochs": 2}, "but the member trains for 2 epochs"),
        ({"precision": "fp32", "loss_scale": 128.0}, "not for fp32"),
        ({"compression": {"name": "qsgd4", "norm": "l2", "error_feedback": True}}, "grows without bound"),
        ({"members": [{"lr": 1}, Member({"lr": 1})], "optimizer": "sgd", "recipe": len}, "is for a Recipe"),
        ({"optimizer": "sgd", "recipe": OWN_OPTIMIZER}, "not both"),
        ({"members": None, "search": LR, "schedule": "step", "recipe": OWN_SCHEDULE}, "not both"),
    ),
    *refused(
        "a loop",
        declare_loop,
        ({"keep": "first"}, "keep cannot be 'first' (valid: last, best)"),
        ({"early_stopping": 3}, "early_stopping must be EarlyStopping(patience=...) or 'none', got 3"),
        ({"early_stopping": {"patiense": 3}}, "did you mean 'patience'"),
        ({"averaging": "emma"}, "did you mean 'ema'"),
        ({"averaging": {"name": "ema", "decay": 1.0}}, "averaging['decay'] must be below 1"),
        ({"compile": "fast"}, "compile cannot be 'fast'"),
        ({"compile": {"name": "default", "backend": 3}}, "must be the name of a backend of torch.compile, got 3"),
        ({"averaging": SWA(3), "epochs": 3}, "averaging begins after 3 epochs, and the member trains for 3"),
        ({"validate_every": 2.5}, "validate_every must be an integer"),
        ({"mixup": -1}, "mixup must be at least 0"),
        ({"keep": "best", "valid": None}, "members[0]: keep='best' needs a validation split: give Ensemble.valid"),
        ({"early_stopping": EarlyStopping(), "valid": None}, "early_stopping needs a validation split"),
        ({"validate_every": 5, "valid": None}, "validate_every needs a validation split"),
    ),
    *refused(
        "data",
        declare_data,
        ({"train": 7}, "must be a pipelines.Pipeline or a function train(params) of one, got 7"),
        ({"train": of_length}, "as many samples for every member, has [8, 9]"),
        ({"train": nothing}, "Ensemble.train({'n': 8}) must return a pipelines.Pipeline, got 8"),
        ({"train": of_length, "members": [{}]}, "Ensemble.train({}) raised KeyError: 'n'"),
        ({**OF_FOUR, "cache": "ram"}, "Ensemble.cache cannot be 'ram'"),
        ({**OF_FOUR, "cache_bytes": 0}, "Ensemble.cache_bytes must be at least 1"),
        ({**OF_FOUR, "cache": "disk"}, "Ensemble.cache_dir is needed with cache='disk'"),
        ({**OF_FOUR, "cache_dir": "x"}, "and only with that"),
        ({**OF_FOUR, "cache_bytes": 64}, "Ensemble.cache_bytes is given without a cache"),
        ({**OF_FOUR, "drop_last": True}, "an epoch of 4 samples has no whole batch of 32"),
    ),
    *refused(
        "settings",
        lambda setting: call_spec(options, [setting]),
        ("number=1.5", "--set number takes an integer, got '1.5'"),
        ("number=", "--set number takes an integer, got ''"),
        ("rate=fast", "--set rate takes a number, got 'fast'"),
        ("flag=2", "--set flag takes true or false, got '2'"),
        ("maybe=soon", "--set maybe takes None or an integer, got 'soon'"),
        ("widths=8,wide", "--set widths takes an integer, got '8,wide'"),
        ("numbr=1", "did you mean 'number'? (valid: number, rate, flag"),
        ("number", "--set takes name=value or name=@file, got 'number'"),
        ("=1", "--set takes name=value or name=@file, got '=...'"),
        arguments=1,
    ),
    *refused(
        "no option",
        lambda **given: Ensemble(**given),
        ({"nodes": {"spot": True}}, "give it as resources=Resources(nodes=...)"),
    ),
    *refused(
        "no option",
        lambda **given: Member(**given),
        ({"name": "wide"}, "Member has no option 'name': ", " {'name': 'wide'}"),
    ),
    *refused(
        "an objective of another task",
        lambda task, name: declare_loop(recipe=Recipe(model=len, loss=len, task=task, objective=name)),
        ("regression", "accuracy", "which a Recipe without metrics= did not report"),
        ("classification", "hamming_accuracy", "which a Recipe without metrics= did not report"),
        ("classification", "rmse", "'rmse' has no meaning for classification"),
        ("free", "mae", "'mae' has no meaning for free"),
        arguments=2,
    ),
    *refused(
        "energy",
        lambda **given: Energy(**given),
        ({"measure_idle_s": 1e9}, "at most 600"),
        ({"meter": "/m/node.csv"}, "no option 'meter'"),
    ),
    *refused(
        "patience",
        EarlyStopping,
        ({"patience": 0}, "patience must be at least 1"),
        ({"patience": 1.5}, "patience must be an integer"),
        ({"patience": 1, "min_delta": -1.0}, "min_delta must be at least 0"),
    ),
]
