"""What else a run is logged to: TensorBoard, MLflow, Weights & Biases or a logger of another distribution.

A logger is no part of a member's identity, of the code or of the data: adding or removing one changes nothing that
is trained, and a run that was stopped can be resumed with other loggers.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ensemble.spec.validation import SpecError, as_json_value, check_choice, option_class, unknown_name
from pipelines.errors import PipelineError
from pipelines.providers import Providers

#: name -> class of an observer (`ensemble.reporting.loggers.base`), imported and made in the process of the
#: run's observers. One of another distribution is a `Logger`, and gets the options that the user gave.
LOGGERS = Providers(
    "loggers",
    {
        "tensorboard": "ensemble.reporting.loggers.tensorboard:TensorBoardLogger",
        "mlflow": "ensemble.reporting.loggers.mlflow:MLflowLogger",
        "wandb": "ensemble.reporting.loggers.wandb:WandBLogger",
        "webhook": "ensemble.reporting.loggers.webhook:WebhookLogger",
        "mirror": "ensemble.reporting.loggers.mirror:MirrorFollower",
    },
)
#: Those that an option of the run adds, and not `Ensemble.loggers`.
OF_RUN = {"webhook": "notify", "mirror": "mirror"}
WANDB_MODES = ("offline", "online")


@option_class
@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """Event files for TensorBoard, one folder a member, with the HParams view.

    Attributes:
        dir: where they are written, in a folder named after the run and its id, so that several runs may share
            it; `tensorboard` in the run directory unless given.
    """

    name: ClassVar[str] = "tensorboard"
    modules: ClassVar[tuple[str, ...]] = ("tensorboard",)
    dir: str | None = None

    def __post_init__(self) -> None:
        _check_text("TensorBoard.dir", self.dir)


@option_class
@dataclass(frozen=True, kw_only=True)
class MLflow:
    """A run of MLflow for the run, and one nested in it for each member.

    Attributes:
        uri: the address of the tracking server; unless given, an SQLite file in `mlflow` in the run directory.
        experiment: name of the experiment; the ensemble's unless given.
    """

    name: ClassVar[str] = "mlflow"
    uri: str | None = None
    experiment: str | None = None

    def __post_init__(self) -> None:
        _check_text("MLflow.uri", self.uri)
        _check_text("MLflow.experiment", self.experiment)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that it needs."""
        local = self.uri is None or not self.uri.startswith("http")
        return ("mlflow", "sqlalchemy", "alembic") if local else ("mlflow",)


@option_class
@dataclass(frozen=True, kw_only=True)
class WandB:
    """A run of Weights & Biases for each member, in one group; they are written when the run ends or is stopped.

    Attributes:
        project: name of the project; the ensemble's unless given.
        mode: "offline" writes files in `wandb` in the run directory, for `wandb sync`, and nothing is sent;
            "online" sends them to the server that wandb is configured for.
    """

    name: ClassVar[str] = "wandb"
    modules: ClassVar[tuple[str, ...]] = ("wandb",)
    project: str | None = None
    mode: Literal["offline", "online"] = "offline"

    def __post_init__(self) -> None:
        _check_text("WandB.project", self.project)
        check_choice("WandB.mode", self.mode, WANDB_MODES)


@dataclass(frozen=True)
class OtherLogger:
    """A logger of another distribution, with options that only its class knows.

    Attributes:
        name: in `LOGGERS`.
        options: what can be written as JSON.
    """

    name: str
    options: Mapping[str, Any]
    modules: ClassVar[tuple[str, ...]] = ()


LoggerOptions = TensorBoard | MLflow | WandB | OtherLogger
_OURS: dict[str, type[TensorBoard | MLflow | WandB]] = {kind.name: kind for kind in (TensorBoard, MLflow, WandB)}


def resolve_loggers(declared: Any) -> tuple[LoggerOptions, ...]:
    """The options of each logger that is named or given.

    Args:
        declared: names of `LOGGERS`, mappings of a `name` and options, or options of ours.

    Raises:
        SpecError: there is no such logger, one is given twice, or its options are wrong.
    """
    if isinstance(declared, str) or not isinstance(declared, Iterable):
        raise SpecError(f"Ensemble.loggers must be a list such as ['tensorboard'], got {declared!r:.60}")
    resolved: dict[str, LoggerOptions] = {}
    for logger in declared:
        if not isinstance(logger, LoggerOptions):
            options = dict(logger) if isinstance(logger, Mapping) else {"name": logger}
            logger = _resolve(options.pop("name", None), options)
        if logger.name in resolved:
            raise SpecError(f"Ensemble.loggers has {logger.name!r} twice: give it once")
        resolved[logger.name] = logger
    return tuple(resolved.values())


def _resolve(name: Any, options: dict[str, Any]) -> LoggerOptions:
    if name in _OURS:
        return _OURS[name](**options)
    if name in OF_RUN:
        raise SpecError(f"{name!r} is not a logger of Ensemble.loggers: give `submit` {OF_RUN[name]}=")
    if not isinstance(name, str) or LOGGERS.find(name) is None:
        valid = [other for other in LOGGERS.names() if other not in OF_RUN]
        raise SpecError(unknown_name("Ensemble.loggers has no logger", str(name), valid))
    return OtherLogger(name, as_json_value(f"Ensemble.loggers: the options of {name!r}", options))


def list_fields(logger: LoggerOptions) -> dict[str, Any]:
    """What the logger's class is made with."""
    return dict(logger.options) if isinstance(logger, OtherLogger) else dataclasses.asdict(logger)


def check_installed(loggers: Any) -> None:
    """Check that what `Ensemble.loggers` need is installed in this process's environment.

    Raises:
        SpecError: something is not; the message says which extra to install.
    """
    for logger in resolve_loggers(loggers):
        if isinstance(logger, OtherLogger):
            try:
                LOGGERS.load(logger.name)
            except PipelineError as error:
                raise SpecError(str(error)) from None
        missing = [name for name in logger.modules if importlib.util.find_spec(name) is None]
        if missing:
            raise SpecError(
                f"Ensemble.loggers has {logger.name!r}, but {' and '.join(missing)} cannot be imported: "
                f"pip install 'ray-ensemble[{logger.name}]'"
            )


def _check_text(where: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise SpecError(f"{where} must be a str that is not empty, got {value!r}")
