"""Spec files: a Python file that defines `spec(**options) -> Ensemble`; `--set name=value` fills the options."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from ensemble.interrupts import Terminated, repeat_lost_signals
from ensemble.spec.ensemble import Ensemble
from ensemble.spec.option_types import read_option
from ensemble.spec.settings import Setting, read_setting, split_setting
from ensemble.spec.user_imports import check_hidden_modules, find_import_folder, without_bytecode
from ensemble.spec.validation import SpecError, unknown_name
from pipelines.errors import PipelineError

#: Parts of error messages, and what to do about them.
_REMEDIES = {
    "EOF when reading a line": (
        "nobody answers input() in a run: make it an option, as in spec(epochs=5), and give it by --set epochs=5"
    ),
    "attempted relative import with no known parent package": (
        "put an empty __init__.py into the folder, which makes it a package, or import the file without the dot"
    ),
}
_loaded: set[str] = set()  # names of the modules that are spec files


def load_spec(path: str | Path, settings: Sequence[str] = ()) -> Ensemble:
    """The ensemble that a spec file declares.

    Args:
        path: of the file.
        settings: `name=value` or `name=@file` each. A value is converted to the type of the option's annotation,
            or of its default (`ensemble.spec.option_types`); the elements of a list are separated by commas.

    Raises:
        SpecError: there is no such file, or no function `spec` in it, or no such option; a value has the wrong
            type; or the file raised an error, which the message quotes with its line.
    """
    file = Path(path).expanduser()
    function = getattr(import_file(file), "spec", None)
    if not callable(function):
        raise SpecError(f"{path} defines no function spec(**options) -> Ensemble")
    return call_spec(function, settings, file)


def import_file(path: Path) -> ModuleType:
    """Import a Python file as a module of its name, in a package as `python -m` does.

    It can import the files in its directory.

    Raises:
        SpecError: there is no such file, it cannot be imported, or another module has its name.
    """
    if not path.is_file():
        beside = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, beside, n=1)
        near = f"{path.name}.py" if f"{path.name}.py" in beside else close[0] if close else None
        hint = "" if near is None else f"; did you mean {str(path.with_name(near))!r}?"
        raise SpecError(f"there is no spec file {str(path)!r}{hint}")
    name, root = _name_module(path)
    module_spec = importlib.util.spec_from_file_location(name, path.resolve())
    if module_spec is None or module_spec.loader is None:
        raise SpecError(f"{path} is not a Python file: a spec file defines spec(**options) -> Ensemble")
    if _shadows_module(name, path):
        raise SpecError(f"{path} has the name of another Python module, which it would hide: rename it")
    check_hidden_modules(path.resolve().parent)
    module = importlib.util.module_from_spec(module_spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if str(root) not in sys.path:
        sys.path.append(str(root))
    _loaded.add(name)
    with _spec_errors(path), repeat_lost_signals(), without_bytecode(), _without_command_line():
        if module_spec.parent and str(root) != folder:
            importlib.import_module(module_spec.parent)
        sys.modules[name] = module
        module_spec.loader.exec_module(module)
    return module


def _name_module(path: Path) -> tuple[str, Path]:
    """The name of a file's module, with the packages around it, and the folder of the outermost one."""
    file, folder = path.resolve(), find_import_folder(path.resolve().parent)
    if "." in path.stem:  # no module of a package can have such a name
        return path.stem, file.parent
    name = ".".join(file.relative_to(folder).with_suffix("").parts)
    package = folder / name.partition(".")[0] / "__init__.py"
    if package.is_file() and _shadows_module(package.parent.name, package):  # then it is alone
        return path.stem, file.parent
    return name, folder


def _shadows_module(name: str, path: Path) -> bool:
    """Whether another module, which is no spec file, has the name of this file's."""
    if name in _loaded or "." in name:
        return False
    try:
        module_spec = importlib.util.find_spec(name)
    except ValueError:  # __main__ has no module spec
        return True
    except ImportError:  # the name contains a dot
        return False
    origin = module_spec.origin if module_spec is not None else None  # None: a folder of data, a namespace package
    return origin is not None and Path(origin).resolve() != path.resolve()


@contextmanager
def _without_command_line() -> Iterator[None]:
    """Within, `parse_args()` raises SpecError: the command line is that of `ensemble`."""
    usual = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        if args is None:
            raise SpecError(
                "parse_args() would read the command line of `ensemble`: make it an option, as in spec(epochs=5), "
                "and give it by --set epochs=5; parse_args([]) gives the defaults"
            )
        return usual(self, args, namespace)

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_known_args = usual  # type: ignore[method-assign]


@contextmanager
def _spec_errors(path: Path | None, settings: Sequence[Setting] = ()) -> Iterator[None]:
    """Turn what the user's file raises into a SpecError of one line that names the file and the line.

    Args:
        path: of the file; None raises the error unchanged.
        settings: settings, to redact those that were read from files.
    """
    try:
        yield
    except Terminated:
        raise  # by a signal, not by the file
    except (Exception, SystemExit) as error:
        if path is None:
            raise
        message = " ".join(str(error).split())
        if isinstance(error, SystemExit):
            detail = f": {message}" if isinstance(error.code, str) else " (sys.exit)"
            message = f"it ended the program{detail}"
        elif isinstance(error, SyntaxError):
            message = error.msg
        elif not isinstance(error, (SpecError, PipelineError)):
            remedy = next((f"; {remedy}" for part, remedy in _REMEDIES.items() if part in message), "")
            message = f"{type(error).__name__}: {message}{remedy}"
        for setting in settings:
            message = setting.redact(message)
        is_secret = any(setting.file is not None for setting in settings)  # the cause would be shown
        raise SpecError(f"{_locate(error, path)}: {message}") from None if is_secret else error


def _locate(error: BaseException, path: Path) -> str:
    """`FILE, line N`: the innermost line of a traceback in the spec file or in a file of its directory."""
    folder = path.resolve().parent
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        frames = [(error.filename, error.lineno)]
    else:
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    for name, line in reversed(frames):
        file = Path(name)
        if file == path.resolve():
            return f"{path}, line {line}"
        if file.parent == folder and not file.is_relative_to(Path(__file__).parent):
            return f"{file}, line {line}"
    return str(path)  # the file could not be read at all


def call_spec(
    function: Callable[..., Ensemble], settings: Sequence[str] = (), path: Path | None = None
) -> Ensemble:
    """Call a spec function with options from settings.

    Args:
        function: `spec(**options) -> Ensemble`.
        settings: as in `load_spec`.
        path: the file that defines the function, for error messages.

    Raises:
        SpecError: as `load_spec`.
    """
    declared = inspect.signature(function).parameters.values()
    parameters = {p.name: p for p in declared if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in declared)
    options: dict[str, Any] = {}
    for name, _ in map(split_setting, settings):  # before any file is read
        if name not in parameters and not takes_any:
            raise SpecError(unknown_name("the spec has no option", name, list(parameters)))
    values = [read_setting(setting) for setting in settings]
    for setting in values:
        options[setting.name] = _read_value(setting, parameters.get(setting.name), function)
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in options]
    if missing:
        raise SpecError(f"the spec needs {' '.join(f'--set {name}=...' for name in missing)}")
    with _spec_errors(path, values), repeat_lost_signals(), without_bytecode(), _without_command_line():
        ensemble = function(**options)
    if not isinstance(ensemble, Ensemble):
        raise SpecError(f"{path or 'the spec'}: spec() returned {type(ensemble).__name__}, not an Ensemble")
    return ensemble


def _read_value(setting: Setting, parameter: inspect.Parameter | None, function: Callable[..., Any]) -> Any:
    """The value of a setting; None for a parameter is one of `**options`."""
    hint = default = None
    if parameter is not None:
        default = None if parameter.default is parameter.empty else parameter.default
        hint = None if parameter.annotation is parameter.empty else parameter.annotation
    with suppress(Exception):  # it may name what is imported only under TYPE_CHECKING
        while isinstance(hint, str):
            text, hint = hint, None
            hint = eval(text, getattr(inspect.unwrap(function), "__globals__", {}))
    try:
        return read_option(setting.text, hint, default)
    except TypeError as error:
        raise SpecError(f"--set {setting.name}: {error}") from None
    except ValueError as error:
        shown = repr(setting.text) if setting.file is None else f"what is in {setting.file}"
        raise SpecError(f"--set {setting.name} takes {error}, got {shown}") from None
