"""Finds the user's own modules, and those that a function imports only when it runs."""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipelines.fingerprint import OURS
from pipelines.fingerprint.instructions import Use
from pipelines.fingerprint.modules import is_foreign


def users_modules(folder: Path) -> dict[str, types.ModuleType]:
    """The user's modules that were imported from below a folder, by name, without the running script."""
    modules = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        script = name in ("__main__", "__mp_main__") or getattr(module, "__name__", None) != name
        if script or not isinstance(file, str) or not file.endswith(".py"):
            continue
        if not is_foreign(name, file) and Path(file).resolve().is_relative_to(folder):
            modules[name] = module
    return modules


def find_late_imports(uses: Iterable[tuple[Use, str]]) -> dict[str, Path]:
    """Module -> file of the user's modules that functions import when they run, and of what those import.

    Args:
        uses: what each function uses, and its package, which resolves relative imports.
    """
    files: dict[str, Path] = {}
    imports = [
        (_resolve(module, level, package), names or ())
        for use, package in uses
        for module, level, names in sorted(use.imports, key=repr)
    ]
    for module, names in imports:  # which grow meanwhile
        for name in [module, *(f"{module}.{name}" for name in names if name != "*")]:
            path = _find_file(name)
            if path is not None and name not in files:
                files[name] = path
                package = name if path.name == "__init__.py" else name.rpartition(".")[0]
                imports += _read_imports(path, package)
    return files


def _resolve(name: str, level: int, package: str) -> str:
    if not level:
        return name
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*base, *([name] if name else [])])


def _read_imports(path: Path, package: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names) that a file imports anywhere."""
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield _resolve(node.module or "", node.level, package), tuple(alias.name for alias in node.names)


def _find_file(name: str) -> Path | None:
    """The file of a user's module, found without importing anything."""
    top = name.partition(".")[0]
    if not top or top in OURS or top in sys.stdlib_module_names:
        return None
    folders: list[str] | None = None
    origin: str | None = None
    names = name.split(".")
    for part, last in enumerate(names):
        spec = importlib.machinery.PathFinder.find_spec(".".join(names[: part + 1]), folders)
        if spec is None:
            return None
        if spec.loader is None:  # a namespace package, which finds its folders only when its parent is imported
            folders = [str(folder) for base in folders or sys.path if (folder := Path(base, last)).is_dir()]
        else:
            folders = list(spec.submodule_search_locations or ())
        origin = spec.origin
    return None if origin is None or not origin.endswith(".py") or is_foreign(name, origin) else Path(origin)


def digest_syntax(path: Path) -> str:
    """A digest of a source file's syntax tree: without comments, docstrings, layout."""
    tree = _parse(path)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                value.value = ""
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # Python raises when it is imported
        return ast.Module(body=[], type_ignores=[])
