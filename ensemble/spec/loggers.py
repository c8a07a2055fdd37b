"""What else a run is logged to: TensorBoard, MLflow or Weights & Biases, each with its options.

A logger is no part of a member's identity, of the code or of the data: adding or removing one changes nothing that
is trained, and a run that was stopped can be resumed with other loggers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ensemble.spec.validation import SpecError, check_choice, option_class, unknown_name

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
        uri: of the tracking server; unless given, an SQLite file in `mlflow` in the run directory.
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


LoggerOptions = TensorBoard | MLflow | WandB
LOGGERS: dict[str, type[LoggerOptions]] = {each.name: each for each in (TensorBoard, MLflow, WandB)}


def resolve_loggers(given: Any) -> tuple[LoggerOptions, ...]:
    """The options of each logger that is named or given.

    Args:
        given: names of `LOGGERS`, or options.

    Raises:
        SpecError: there is no such logger, or one is given twice.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise SpecError(f"Ensemble.loggers must be a list such as ['tensorboard'], got {given!r:.60}")
    resolved: list[LoggerOptions] = []
    for each in given:
        if isinstance(each, str) and each in LOGGERS:
            each = LOGGERS[each]()
        if not isinstance(each, LoggerOptions):
            raise SpecError(unknown_name("Ensemble.loggers has no logger", str(each), list(LOGGERS)))
        if any(each.name == known.name for known in resolved):
            raise SpecError(f"Ensemble.loggers has {each.name!r} twice: give it once")
        resolved.append(each)
    return tuple(resolved)


def check_installed(loggers: Any) -> None:
    """Check that what `Ensemble.loggers` need is installed in this process's environment.

    Raises:
        SpecError: something is not; the message says which extra to install.
    """
    for logger in resolve_loggers(loggers):
        missing = [name for name in logger.modules if importlib.util.find_spec(name) is None]
        if missing:
            raise SpecError(
                f"Ensemble.loggers has {logger.name!r}, but {' and '.join(missing)} cannot be imported: "
                f"pip install 'ray-ensemble[{logger.name}]'"
            )


def _check_text(where: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise SpecError(f"{where} must be a str that is not empty, got {value!r}")
