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
# Of paths: methods, which no name resolves to.
_OF_PATHS = frozenset(("read_text", "read_bytes", "iterdir"))
_INNER = frozenset(("__globals__", "__builtins__", "__code__", "__closure__"))


def find_unseen(value: Any) -> str | None:
    """What is read through a value that a name resolves to; None for what a description covers."""
    return _BY_ID.get(id(value))


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
