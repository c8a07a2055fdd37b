"""Global settings of libraries that change what is computed, so that all processes compute the same.

Code of the user may set them when it is imported (`torch.set_default_dtype`). Other processes do not import it:
functions travel by value. So settings that differ from the library's default are read where a pipeline or run is
declared, and travel with it. Processes of the run apply them before they unpickle it (`memory_pickle`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pipelines.errors import PipelineError
from pipelines.fingerprint.ours import describe_ours, known_as

CallableT = TypeVar("CallableT", bound=Callable[..., Any])

_SINGLE = "ieee"  # what "none" comes to, which torch has until something is set

_lock = threading.Lock()
_open = 0  # contexts of `keep_settings`
_original: Mapping[str, Any] = {}  # the settings before the first of them


@dataclass(frozen=True)
class _Setting:
    """A setting: of a module, an attribute, or a pair of functions that read and write it.

    Attributes:
        default: of the library.
        changes_samples: whether what a pipeline prepares may depend on it.
    """

    module: str
    read: str
    write: str | None
    default: Any
    changes_samples: bool = False

    @property
    def name(self) -> str:
        """What the user calls or assigns to set it."""
        return f"{self.module}.{self.write or self.read}"

    def find(self, module: Any) -> Any:
        """Its value; the default where this version of the library does not have it, or not unambiguously."""
        try:
            value = operator.attrgetter(self.read)(module)
            value = value() if self.write else value
        except (AttributeError, RuntimeError):  # torch has two sets of names for TF32, which exclude each other
            return self.default
        if value == "none" and self.read.endswith("fp32_precision"):
            return _SINGLE
        return value if isinstance(value, bool | int | str | None) else str(value)

    def apply(self, module: Any, value: Any) -> None:
        """Set it to a value that `find` has found."""
        if isinstance(value, str) and value.startswith("torch."):
            value = getattr(module, value.removeprefix("torch."))
        if self.write:
            operator.attrgetter(self.write)(module)(value)
        else:
            *path, last = self.read.split(".")
            setattr(operator.attrgetter(".".join(path))(module) if path else module, last, value)


#: In the order in which they are applied: what stands for several comes first.
_SETTINGS = (
    _Setting("torch", "get_default_dtype", "set_default_dtype", "torch.float32", True),
    _Setting("torch", "get_float32_matmul_precision", "set_float32_matmul_precision", "highest", True),
    _Setting("torch", "backends.fp32_precision", None, _SINGLE, True),
    _Setting("torch", "backends.mkldnn.fp32_precision", None, _SINGLE, True),
    _Setting("torch", "backends.mkldnn.matmul.fp32_precision", None, _SINGLE, True),
    _Setting("torch", "backends.cuda.matmul.fp32_precision", None, _SINGLE),
    _Setting("torch", "backends.cudnn.fp32_precision", None, _SINGLE),
    _Setting("torch", "backends.cudnn.conv.fp32_precision", None, "tf32"),
    _Setting("torch", "backends.cudnn.rnn.fp32_precision", None, "tf32"),
    _Setting("torch", "backends.cudnn.allow_tf32", None, True),
    _Setting("torch", "backends.cudnn.benchmark", None, False),
    _Setting("torch", "backends.cudnn.deterministic", None, False),
    _Setting("torch", "backends.cuda.matmul.allow_fp16_reduced_precision_reduction", None, True),
    _Setting("torch", "backends.cuda.matmul.allow_bf16_reduced_precision_reduction", None, True),
    _Setting("torch", "get_deterministic_debug_mode", "set_deterministic_debug_mode", 0),
    _Setting("torch", "is_anomaly_enabled", "autograd.set_detect_anomaly", False),
    _Setting("torchvision", "get_image_backend", "set_image_backend", "PIL", True),
    _Setting("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES", None, False, True),
    _Setting("PIL.Image", "MAX_IMAGE_PIXELS", None, 2**28 // 3, True),
    _Setting("cv2", "useOptimized", "setUseOptimized", True, True),
    _Setting("pipelines.stages._batched", "auto_device", None, None),
)


def find_settings(*, only_of_samples: bool = False, only_of_user: bool = False) -> dict[str, Any]:
    """The settings of this process that differ from the libraries' defaults, by name, as JSON values.

    Args:
        only_of_samples: leave out those on which no sample depends.
        only_of_user: leave out what this package has decided for all processes of a run.
    """
    settings = {}
    for setting in _SETTINGS:
        module = sys.modules.get(setting.module)
        if only_of_user and setting.module.startswith("pipelines."):
            continue
        if module is not None and (setting.changes_samples or not only_of_samples):
            value = setting.find(module)
            if value != setting.default:
                settings[setting.name] = value
    return settings


def apply_settings(settings: Mapping[str, Any]) -> None:
    """Set in this process what `find_settings` has found in another: what it does not name has its default.

    Libraries that it names are imported.
    """
    for setting in _SETTINGS:  # all: one of torch's stands for several, which may be set otherwise
        if setting.name in settings:
            importlib.import_module(setting.module)
    for setting in (*_SETTINGS, *_SETTINGS):  # twice: some can be read only when others have been set
        module = sys.modules.get(setting.module)
        value = settings.get(setting.name, setting.default)
        if module is not None and setting.find(module) != value:
            setting.apply(module, value)


@contextlib.contextmanager
def keep_settings() -> Iterator[None]:
    """Within the context settings of a run may be applied; afterwards this process has those of before.

    Contexts of several threads change the settings of each other; when the last has ended, those are there again
    that were there before the first.
    """
    global _open, _original
    with _lock:
        before = find_settings()
        if not _open:
            _original = before
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            apply_settings(before if _open else _original)


def keeps_settings(function: CallableT) -> CallableT:
    """Decorates a function of ours that users call: `keep_settings` while it runs."""

    @known_as(describe_ours(function)[1])
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with keep_settings():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def check_default_device() -> None:
    """Refuse a default device of torch: members have the one on which they are placed, feeders have none.

    Raises:
        PipelineError: `torch.set_default_device` was called.
    """
    torch = sys.modules.get("torch")
    device = "cpu" if torch is None else str(torch.get_default_device())
    if device != "cpu":
        raise PipelineError(
            f"torch's default device is {device}, but the run chooses the devices of its members and feeders: "
            "remove torch.set_default_device, and use member.device or the device of the batch"
        )
