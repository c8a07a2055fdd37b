"""What a description cannot cover: code that reads from where no fingerprint reaches.

A stage that reads the environment, a file or a module by a computed name makes other samples when that changes.
Readers of installed libraries (`np.load`) are not listed: with them, the file is what the user says it is.
"""

from __future__ import annotations

import builtins
import enum
import importlib
import io
import os
import sys
import types
from collections.abc import Set
from typing import Any

_ENVIRONMENT = "the environment of the process"
_FILES = "files"
_NAMES = "names that only a run shows"
_PROGRAMS = "other programs"
_SYSTEM = "the state of the system"

_BY_ID = {
    id(value): reads
    for reads, values in {
        _ENVIRONMENT: (os.environ, os.environb, os.getenv, os.getenvb, os.getcwd, os.getcwdb, sys.argv),
        _FILES: (builtins.open, io.FileIO, io.open_code, os.open, os.listdir, os.scandir, os.walk),
        _NAMES: (
            *(builtins.eval, builtins.exec, builtins.compile, builtins.globals, builtins.__import__),
            *(importlib.import_module, importlib.reload, importlib.__import__, sys.modules),
        ),
        _PROGRAMS: (builtins.input, os.system, os.popen),
    }.items()
    for value in values
}
#: Modules of Python's, as their functions name them: all in them reads, but what is in `_PURE`.
_BY_MODULE = {
    name: reads
    for reads, names in {
        _SYSTEM: "os posix posixpath genericpath socket _socket platform getpass pwd",
        _FILES: "glob shutil tempfile zipfile tarfile configparser mmap sqlite3 _sqlite3 dbm shelve fileinput "
        "linecache filecmp urllib.request http.client",
        _PROGRAMS: "subprocess _posixsubprocess pty",
        _NAMES: "importlib runpy pkgutil",
    }.items()
    for name in names.split()
}
# fmt: off
_PURE = frozenset((
    "fspath", "fsencode", "fsdecode", "PathLike", "DirEntry", "stat_result", "strerror", "close", "join", "split",
    "splitext", "splitdrive", "splitroot", "basename", "dirname", "normpath", "normcase", "isabs", "commonpath",
    "commonprefix", "escape", "list2cmdline", "TarInfo", "ZipInfo", "htons", "htonl", "ntohs", "ntohl",
    "inet_aton", "inet_ntoa", "inet_pton", "inet_ntop",
))
# fmt: on
_OPENERS = ("codecs", "gzip", "bz2", "lzma")  # modules of which only `open` reads
#: Attributes that read, whatever they are taken of.
_ATTRIBUTES = {
    name: reads
    for reads, names in {
        _FILES: "read_text read_bytes iterdir",
        _NAMES: "__globals__ __builtins__ __code__ __closure__ __subclasses__ __annotations__ __doc__ "
        "get_type_hints _getframe currentframe f_globals f_locals f_back",
    }.items()
    for name in names.split()
}
#: Methods by which paths read, and whose names others have, too.
# fmt: off
PATH_METHODS = frozenset((
    "open", "glob", "rglob", "walk", "exists", "is_file", "is_dir", "is_symlink", "is_mount", "stat", "lstat",
    "cwd", "home", "resolve", "absolute", "expanduser", "samefile", "readlink",
))
# fmt: on


def find_unseen(value: Any) -> str | None:
    """What is read through a value that a name resolves to; None for what a description covers."""
    if (reads := _BY_ID.get(id(value))) is not None:
        return reads
    if isinstance(value, types.ModuleType):
        return _BY_MODULE.get(value.__name__)
    if isinstance(value, type):
        if issubclass(value, BaseException | enum.Enum):
            return None
    elif not isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return None
    module, name = str(getattr(value, "__module__", None)), value.__name__
    if module in _OPENERS and name == "open":
        return _FILES
    return None if name in _PURE else _BY_MODULE.get(module) or _BY_MODULE.get(module.partition(".")[0])


def find_unseen_of(module: types.ModuleType, names: Set[str]) -> str | None:
    """What code with these names may read through a module that it uses in any way."""
    for name in sorted(names & vars(module).keys()):
        value = vars(module)[name]
        if isinstance(value, types.ModuleType):
            unseen = find_unseen_of(value, names - {name})
        elif (unseen := find_unseen(value)) is not None:
            unseen = f"{unseen} ({module.__name__}.{name})"
        if unseen is not None:
            return unseen
    return None


def find_unseen_name(names: Set[str]) -> str | None:
    """What is read through attributes of these names, whatever they are taken of; None where it is nothing."""
    name = min(names & _ATTRIBUTES.keys(), default=None)
    return None if name is None else f"{_ATTRIBUTES[name]} ({name})"
