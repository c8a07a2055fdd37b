"""What a description cannot cover: code that reads from where no fingerprint reaches.

A stage that reads the environment, a file or a module by a computed name makes other samples when that changes,
although its code and all that is bound to it stay. Readers of installed libraries (`np.load`, `cv2.imread`) are
not listed: with them, the file is what the user says it is.
"""

from __future__ import annotations

import builtins
import glob
import importlib
import io
import os
import pathlib
import socket
import subprocess
import sys
import types
from typing import Any

_ENVIRONMENT = "the environment of the process"
_FILES = "files"
_NAMES = "names that only a run shows"
_PROGRAMS = "other programs"

_READ: list[tuple[str, tuple[Any, ...]]] = [
    (
        _ENVIRONMENT,
        (
            os.environ,
            os.environb,
            os.getenv,
            os.getenvb,
            os.getcwd,
            os.getcwdb,
            sys.argv,
            socket.gethostname,
            os.uname,
            os.path.expandvars,
            os.path.expanduser,
        ),
    ),
    (_FILES, (builtins.open, io.open, io.FileIO, os.open, os.listdir, os.scandir, os.walk, glob.glob, glob.iglob)),
    (
        _NAMES,
        (
            *(builtins.eval, builtins.exec, builtins.compile, builtins.globals, builtins.__import__),
            *(importlib.import_module, importlib.reload, importlib.__import__, sys.modules),
        ),
    ),
    (_PROGRAMS, (builtins.input, os.system, os.popen, subprocess.run, subprocess.Popen, subprocess.check_output)),
]
_BY_ID = {id(each): what for what, found in _READ for each in found}
# By name, as their modules are seldom imported.
_BY_NAME = {
    **dict.fromkeys([(m, "open") for m in ("codecs", "gzip", "bz2", "lzma")], _FILES),
    **dict.fromkeys([("urllib.request", "urlopen"), ("sqlite3", "connect"), ("_sqlite3", "connect")], _FILES),
    **dict.fromkeys([("runpy", "run_path"), ("runpy", "run_module"), ("pkgutil", "get_data")], _NAMES),
}
# Of paths: methods, which no name resolves to.
_OF_PATHS = frozenset(("read_text", "read_bytes", "iterdir"))
# Attributes that lead to what no description has.
_INNER = frozenset((
    "__globals__", "__builtins__", "__code__", "__closure__", "__subclasses__", "__annotations__", "__doc__",
    "get_type_hints", "_getframe", "currentframe", "f_globals", "f_locals", "f_back",
))  # fmt: skip


def find_unseen(value: Any) -> str | None:
    """What is read through a value that a name resolves to; None for what a description covers."""
    if (found := _BY_ID.get(id(value))) is not None:
        return found
    if not isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return None
    module = str(getattr(value, "__module__", None))
    return _NAMES if module.partition(".")[0] == "importlib" else _BY_NAME.get((module, value.__qualname__))


def find_unseen_names(names: frozenset[str]) -> str | None:
    """What is read through attributes of these names, whatever they are taken of; None where it is nothing."""
    if found := sorted(names & _OF_PATHS):
        return f"{_FILES} ({found[0]})"
    if found := sorted(names & _INNER):
        return f"{_NAMES} ({found[0]})"
    return None


def opens_paths(names: frozenset[str], bound: Any) -> bool:
    """Whether code with these names may open a path that is bound to it, or the class of paths."""
    return "open" in names and any(
        isinstance(each, pathlib.PurePath) or (isinstance(each, type) and issubclass(each, pathlib.PurePath))
        for each in bound
    )
