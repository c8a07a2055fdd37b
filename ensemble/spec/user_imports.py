"""Imports of user code: without `__pycache__`, and from a folder whose files hide no other modules."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from ensemble.spec.validation import SpecError


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
    """Warn of the files in a folder that hide installed packages: processes of a run look for modules there first.

    Raises:
        SpecError: a file hides a module of Python, without which its own modules and torch cannot be imported.
    """
    elsewhere = [path for path in sys.path if path and Path(path).resolve() != folder]
    for name, file in sorted(_list_modules(folder)):
        if name in sys.stdlib_module_names:
            raise SpecError(
                f"{file} has the name of Python's own module {name!r}, which it hides from all processes of the "
                "run: rename it"
            )
        found = importlib.machinery.PathFinder.find_spec(name, elsewhere)
        locations = [] if found is None else [found.origin or "", *(found.submodule_search_locations or ())]
        if any("site-packages" in place or "dist-packages" in place for place in locations):
            warnings.warn(f"{file} hides the installed package {name!r}: rename it", stacklevel=3)


def _list_modules(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name, file or folder) of the modules and packages in a folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name.removesuffix(".py")
            is_file = name != entry.name
            if name.isidentifier() and (is_file or (entry.is_dir() and Path(entry.path, "__init__.py").is_file())):
                yield name, Path(entry.path)
