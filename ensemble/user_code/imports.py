"""Finds the user's own modules, and those that a function imports only when it runs."""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from pathlib import Path

from pipelines.fingerprint import OURS
from pipelines.fingerprint.bytecode import Use
from pipelines.fingerprint.modules import is_foreign


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

    def late_in(self, use: Use, package: str) -> None:
        """Record what a function imports when it runs; `package` resolves relative imports."""
        for module, level, names in sorted(use.imports, key=repr):
            self._import(_absolute(module, level, package), names or ())

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
    names = name.split(".")
    for part, last in enumerate(names):
        found = importlib.machinery.PathFinder.find_spec(".".join(names[: part + 1]), where)
        if found is None:
            return None
        if found.loader is None:  # a namespace package, which finds its folders only when its parent is imported
            where = [str(folder) for base in where or sys.path if (folder := Path(base, last)).is_dir()]
        else:
            where = list(found.submodule_search_locations or ())
        origin = found.origin
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
