"""Imports of user code: without `__pycache__`, and from a folder whose files hide no module of Python."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from ensemble.spec.validation import SpecError
from pipelines.fingerprint import OURS
from pipelines.fingerprint.modules import is_foreign


@contextlib.contextmanager
def without_bytecode() -> Iterator[None]:
    """Within, an import writes no `__pycache__` beside the module, whose directory may be another user's."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def find_import_folder(folder: Path) -> Path:
    """The folder from which files in a folder are imported: outside of the packages that it lies in."""
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        folder = folder.parent
    return folder


def check_hidden_modules(folder: Path) -> None:
    """Raise SpecError for a file in a folder that hides a module of Python, or one that ray-ensemble may import.

    All processes look in that folder first.
    """
    packages = {file.parent.name: file.parent for file in folder.glob("*/__init__.py")}
    for name, file in sorted({**packages, **{file.stem: file for file in folder.glob("*.py")}}.items()):
        if name in sys.stdlib_module_names:
            owner = "Python's own module"
        elif _is_installed_elsewhere(name, folder) and (distribution := _find_needed(name)) is not None:
            owner = f"the module of {distribution}"
        else:
            continue
        raise SpecError(
            f"{file} has the name of {owner} {name!r}, which it hides from all processes of the run: rename it"
        )


def _is_installed_elsewhere(name: str, folder: Path) -> bool:
    """Whether a module of that name is outside of a folder too; nothing is imported."""
    if name in OURS:
        return not Path(__file__).is_relative_to(folder.resolve())
    path = [entry for entry in sys.path if Path(entry).resolve() != folder.resolve()]
    found = importlib.machinery.PathFinder.find_spec(name, path)
    return found is not None and found.origin is not None and is_foreign(name, found.origin)


@functools.cache
def _find_needed(name: str) -> str | None:
    """The distribution with a module, if ray-ensemble or what it requires, extras included, needs it."""
    if name in OURS:
        return "ray-ensemble"
    owners = {_normalize(owner): owner for owner in metadata.packages_distributions().get(name, ())}
    waiting, seen = [("ray-ensemble", True)], set[str]()
    while waiting:
        distribution, with_extras = waiting.pop()
        with contextlib.suppress(metadata.PackageNotFoundError):
            for requirement in metadata.requires(distribution) or ():
                required = _normalize(re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0])
                if required not in seen and (with_extras or "extra ==" not in requirement):
                    seen.add(required)
                    waiting.append((required, False))
    return next((owner for key, owner in owners.items() if key in seen), None)


def _normalize(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
