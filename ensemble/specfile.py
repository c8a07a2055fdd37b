"""Spec files: a Python file that defines `spec(**options) -> Ensemble`; `--set name=value` fills the options."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ensemble.spec import Ensemble, SpecError, unknown_name

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def load_spec(path: str | Path, settings: Sequence[str] = ()) -> Ensemble:
    """The ensemble that a spec file declares.

    Args:
        settings: `name=value` each; a value is read as the type of the option's default.

    Raises:
        SpecError: no such file, no function `spec` in it, an unknown option, a value of the wrong type.
    """
    return call_spec(_spec_of(import_file(Path(path)), str(path)), settings)


def import_file(path: Path) -> ModuleType:
    """The module of a Python file, under the file's name; files beside it can be imported by it."""
    if not path.is_file():
        raise SpecError(f"there is no spec file {str(path)!r}")
    made = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if made is None or made.loader is None:
        raise SpecError(f"{path} is no Python file: a spec file defines spec(**options) -> Ensemble")
    module = importlib.util.module_from_spec(made)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[path.stem] = module
    try:
        made.loader.exec_module(module)
    except SyntaxError as error:
        raise SpecError(f"{path}, line {error.lineno}: {error.msg}") from None
    except ModuleNotFoundError as error:
        raise SpecError(f"{path}: {error}") from None
    return module


def _spec_of(module: ModuleType, path: str) -> Callable[..., Ensemble]:
    function = getattr(module, "spec", None)
    if not callable(function):
        raise SpecError(f"{path} defines no function spec(**options) -> Ensemble")
    return function  # type: ignore[no-any-return]


def call_spec(function: Callable[..., Ensemble], settings: Sequence[str]) -> Ensemble:
    """Call a spec function with the options that `name=value` settings give."""
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    options: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise SpecError(f"--set takes name=value, got {setting!r}")
        parameter = parameters.get(name)
        if parameter is None and not anything:
            known = [p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
            raise SpecError(unknown_name("the spec has no option", name, known))
        options[name] = _value(name, text, parameter.default if parameter else None)
    missing = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in options
    ]
    if missing:
        raise SpecError(f"the spec needs {', '.join(f'--set {name}=...' for name in missing)}")
    made = function(**options)
    if not isinstance(made, Ensemble):
        raise SpecError(f"spec() returned {type(made).__name__}, not an Ensemble")
    return made


def _value(name: str, text: str, default: Any) -> Any:
    """A setting's text as the type of the option's default; without one, as it looks."""
    if isinstance(default, bool):
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise SpecError(f"--set {name} takes true or false, got {text!r}")
    if isinstance(default, str):
        return text
    kinds = (type(default),) if isinstance(default, int | float) else (int, float)
    for kind in kinds:
        try:
            return kind(text)
        except ValueError:
            continue
    if isinstance(default, int | float):
        wanted = "an integer" if isinstance(default, int) else "a number"
        raise SpecError(f"--set {name} takes {wanted}, got {text!r}")
    return text
