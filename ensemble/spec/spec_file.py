"""Spec files: a Python file that defines `spec(**options) -> Ensemble`; `--set name=value` fills the options."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ensemble.spec.ensemble import Ensemble, SpecError, unknown_name
from ensemble.spec.settings import Setting, parse, read
from ensemble.user_code.bytecode import without_bytecode
from pipelines.errors import PipelineError

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
#: What a setting's text can become, tried in this order, and how an error calls it.
_KINDS: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_loaded: set[str] = set()  # names of modules that are spec files


def load_spec(path: str | Path, settings: Sequence[str] = ()) -> Ensemble:
    """The ensemble that a spec file declares.

    Args:
        settings: `name=value` or `name=@file` each; a value is read as the type that the option is annotated
            with, or that its default has; a list by its elements, parted by commas.

    Raises:
        SpecError: no such file, no function `spec` in it, an unknown option, a value of the wrong type, or
            whatever the file itself raises, with the line of it that did.
    """
    file = Path(path).expanduser()
    return call_spec(_spec_of(import_file(file), str(path)), settings, file)


def import_file(path: Path) -> ModuleType:
    """The module of a Python file, under the file's name; files beside it can be imported by it.

    Raises:
        SpecError: there is no such file, it cannot be imported, or its name is that of another module.
    """
    if not path.is_file():
        raise SpecError(f"there is no spec file {str(path)!r}")
    made = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if made is None or made.loader is None:
        raise SpecError(f"{path} is no Python file: a spec file defines spec(**options) -> Ensemble")
    if _hides(path):
        raise SpecError(f"{path} has the name of another Python module, which it would hide: rename it")
    module = importlib.util.module_from_spec(made)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[path.stem] = module
    _loaded.add(path.stem)
    with _errors_of(path), without_bytecode():
        made.loader.exec_module(module)
    return module


def _hides(path: Path) -> bool:
    """Whether a module that is no spec file has this file's name."""
    if path.stem in _loaded:
        return False
    try:
        found = importlib.util.find_spec(path.stem)
    except ValueError:  # it has none: __main__
        return True
    except ImportError:  # a name with a dot
        return False
    origin = found.origin if found is not None else None  # None: a folder of data counts as a package
    return origin is not None and Path(origin).resolve() != path.resolve()


@contextmanager
def _errors_of(path: Path | None, given: Sequence[Setting] = ()) -> Iterator[None]:
    """Within, what the user's file raises becomes a SpecError of one line that names the line of that file.

    Args:
        given: of which those that were read from files are not to be said.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if path is None:
            raise
        said = " ".join(str(error).split())
        if isinstance(error, SystemExit):
            said = (
                f"it ended the program: {said}"
                if isinstance(error.code, str)
                else "it ended the program (sys.exit)"
            )
        elif isinstance(error, SyntaxError):
            said = error.msg
        elif not isinstance(error, (SpecError, PipelineError)):
            said = f"{type(error).__name__}: {said}"
        for setting in given:
            said = setting.hidden_in(said)
        secret = any(setting.file is not None for setting in given)  # what is raised would be shown with its cause
        raise SpecError(f"{_line_of(error, path)}: {said}") from None if secret else error


def _line_of(error: BaseException, path: Path) -> str:
    """`FILE, line N` of the innermost line of the spec file, or of one beside it, that an error came by."""
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
    return str(path)  # it could not be read at all


def _spec_of(module: ModuleType, path: str) -> Callable[..., Ensemble]:
    function = getattr(module, "spec", None)
    if not callable(function):
        raise SpecError(f"{path} defines no function spec(**options) -> Ensemble")
    return function  # type: ignore[no-any-return]


def call_spec(
    function: Callable[..., Ensemble], settings: Sequence[str] = (), path: Path | None = None
) -> Ensemble:
    """Call a spec function with the options that `name=value` settings give.

    Args:
        path: the file that defines it, for what to say of an error in it.

    Raises:
        SpecError: as `load_spec`.
    """
    known = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    anything = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    hints = _hints(function)
    options: dict[str, Any] = {}
    for name, _ in map(parse, settings):  # before a file is read for nothing
        if name not in known and not anything:
            raise SpecError(unknown_name("the spec has no option", name, list(known)))
    given = [read(setting) for setting in settings]
    for setting in given:
        default = known[setting.name].default if setting.name in known else None
        options[setting.name] = _value(setting, setting.text, hints.get(setting.name), default)
    missing = [name for name, p in known.items() if p.default is p.empty and name not in options]
    if missing:
        raise SpecError(f"the spec needs {' '.join(f'--set {name}=...' for name in missing)}")
    with _errors_of(path, given), without_bytecode():
        made = function(**options)
    if not isinstance(made, Ensemble):
        raise SpecError(f"{path or 'the spec'}: spec() returned {type(made).__name__}, not an Ensemble")
    return made


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception:  # annotations may name what exists only while types are checked
        return {}


def _value(setting: Setting, text: str, hint: Any, default: Any) -> Any:
    """A setting's text, or a part of it, as the type of the option; where there is none, as what it looks like."""
    valid = set(typing.get_args(hint)) or {hint}
    kinds = [kind for kind in _KINDS if kind in valid] or [kind for kind in _KINDS if type(default) is kind]
    if not kinds and isinstance(default, (list, tuple)):
        example = default[0] if default else None
        return type(default)(_value(setting, part.strip(), None, example) for part in text.split(","))
    if type(None) in valid and text.lower() == "none":
        return None
    for kind in kinds or _KINDS:
        try:
            return _flag(text, short=bool(kinds)) if kind is bool else kind(text)
        except ValueError:
            continue
    shown = repr(text) if setting.file is None else f"what is in {setting.file}"
    valid_kinds = " or ".join(_KINDS[kind] for kind in kinds)
    raise SpecError(f"--set {setting.name} takes {valid_kinds}, got {shown}")


def _flag(text: str, *, short: bool) -> bool:
    """True or false in words; `short`: also 1, yes, on and their opposites."""
    for value, words in ((True, _TRUE), (False, _FALSE)):
        if text.lower() in (words if short else words[:1]):
            return value
    raise ValueError(f"neither true nor false: {text!r}")
