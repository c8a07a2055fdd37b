"""Finds the user's own modules, and those that a function imports only when it runs."""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import importlib.machinery
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path

from ensemble.user_code.instructions import get_closure
from pipelines.fingerprint import OURS

_INSTALLED = frozenset(("site-packages", "dist-packages"))


def is_foreign(module: str | None, file: object) -> bool:
    """Whether a module belongs to ray-ensemble, Python or an installed package."""
    top = str(module or "").partition(".")[0]
    if top in OURS or top in sys.stdlib_module_names or top == "builtins":
        return True
    return isinstance(file, str) and _is_installed(file)


def wrapped_functions(function: types.FunctionType) -> list[types.FunctionType]:
    """The user's functions that a function of an installed package wraps, such as a decorator's result."""
    found: list[types.FunctionType] = []
    seen, pending = {id(function)}, [function]
    while pending:
        outer = pending.pop()
        for inner in (getattr(outer, "__wrapped__", None), *get_closure(outer).values()):
            inner = getattr(inner, "__func__", inner)  # of a bound method
            if not isinstance(inner, types.FunctionType) or id(inner) in seen:
                continue
            seen.add(id(inner))
            (pending if is_foreign(inner.__module__, inner.__code__.co_filename) else found).append(inner)
    return found


@functools.lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    path = Path(file)
    return not _INSTALLED.isdisjoint(path.parts) or path.is_relative_to(sysconfig.get_paths()["stdlib"])


def module_name(name: str | None, file: object) -> str:
    """A module's name; for a script the name of its file, as in modules that import it."""
    return Path(file).stem if name == "__main__" and isinstance(file, str) else str(name)


def folder_of(file: object) -> str:
    """The folder of a file; an empty string where there is no file."""
    return str(Path(file).parent) if isinstance(file, str) else ""


def file_of(cls: type) -> str | None:
    """The source file of a class, from its methods or from its module."""
    for item in vars(cls).values():
        function = getattr(item, "__func__", getattr(item, "fget", item))
        if isinstance(function, types.FunctionType) and function.__module__ == cls.__module__:
            return str(function.__globals__.get("__file__", function.__code__.co_filename))
    return getattr(sys.modules.get(cls.__module__), "__file__", None)


def users_modules(folder: Path) -> dict[str, types.ModuleType]:
    """The user's modules that were imported from below a folder, by name, without the running script."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        script = name in ("__main__", "__mp_main__") or getattr(module, "__name__", None) != name
        if script or not isinstance(file, str) or not file.endswith(".py"):
            continue
        if not is_foreign(name, file) and Path(file).resolve().is_relative_to(folder):
            found[name] = module
    return found


class Imports:
    """Files of the user's modules that some code uses.

    Attributes:
        files: module -> file, of those whose code was met.
        late: module -> file, of those that are imported when a function runs, and of what those import.
    """

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}
        self.late: dict[str, Path] = {}

    def keep(self, module: str, file: object) -> None:
        """Record a module that contains code in use."""
        if isinstance(file, str) and module not in self.files and file.endswith(".py") and Path(file).is_file():
            self.files[module] = Path(file)

    def late_in(self, code: types.CodeType, package: str) -> None:
        """Record what the instructions of a function import; `package` resolves relative imports."""
        # the argument of an EXTENDED_ARG, past 255 constants, is no part of what is imported
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for i, each in enumerate(steps):
            if each.opname == "IMPORT_NAME":
                level, names = (before.argval for before in steps[i - 2 : i])
                self._import(_absolute(each.argval, level, package), names or ())
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.late_in(constant, package)

    def _import(self, module: str, names: tuple[str, ...]) -> None:
        candidates = [module, *(f"{module}.{name}" for name in names if name != "*")]
        for name in candidates:
            path = _find(name)
            if path is not None and name not in self.late:
                self.late[name] = path
                self.files.setdefault(name, path)
                package = name if path.name == "__init__.py" else name.rpartition(".")[0]
                for other, others in _imports(path, package):
                    self._import(other, others)


def _absolute(name: str, level: int, package: str) -> str:
    if not level:
        return name
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*base, *([name] if name else [])])


def _imports(path: Path, package: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names) that a file imports anywhere."""
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield _absolute(node.module or "", node.level, package), tuple(alias.name for alias in node.names)


def _find(name: str) -> Path | None:
    """The file of a user's module, found without importing anything."""
    top = name.partition(".")[0]
    if not top or top in OURS or top in sys.stdlib_module_names:
        return None
    where: list[str] | None = None
    origin: str | None = None
    for part in range(name.count(".") + 1):
        found = importlib.machinery.PathFinder.find_spec(".".join(name.split(".")[: part + 1]), where)
        if found is None:
            return None
        where, origin = list(found.submodule_search_locations or ()), found.origin
    return None if origin is None or not origin.endswith(".py") or is_foreign(name, origin) else Path(origin)


def syntax_of(path: Path) -> str:
    """A digest of a source file's syntax tree: without comments, docstrings, layout."""
    tree = _parsed(path)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                value.value = ""
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # Python raises when it is imported
        return ast.Module(body=[], type_ignores=[])
