"""Imports of user code: without `__pycache__`, and from a folder whose files hide no module of Python."""

from __future__ import annotations

import contextlib
import sys
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
    """Raise SpecError for a file in a folder that hides a module of Python: all processes look there first, and
    without it neither the folder's own modules nor torch can be imported.
    """
    packages = {file.parent.name: file.parent for file in folder.glob("*/__init__.py")}
    for name, file in sorted({**packages, **{file.stem: file for file in folder.glob("*.py")}}.items()):
        if name in sys.stdlib_module_names:
            raise SpecError(
                f"{file} has the name of Python's own module {name!r}, which it hides from all processes of the "
                "run: rename it"
            )
