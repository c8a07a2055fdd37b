"""The extensions that CONTRIBUTING.md lists: their seam and their files, and who imports them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("ensemble", "pipelines")


@dataclass(frozen=True)
class Extension:
    """Files that plug into the core.

    Attributes:
        name: in the table.
        seam: by which it plugs in.
        paths: files and folders, relative to the repository's root.
        needs: names of the extensions that it imports.
    """

    name: str
    seam: str
    paths: tuple[str, ...]
    needs: tuple[str, ...] = ()

    def has(self, file: str) -> bool:
        """Whether a file of the repository is part of it."""
        return any(file == path or file.startswith(path.rstrip("/") + "/") for path in self.paths)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules and packages that its files are."""
        return tuple(path.rstrip("/").removesuffix(".py").replace("/", ".") for path in self.paths)

    def count_lines(self) -> int:
        return sum(len(text.splitlines()) for file, text in read_packages().items() if self.has(file))


def read_extensions() -> dict[str, Extension]:
    """The rows of CONTRIBUTING.md's table of extensions, by name."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("\n| extension | seam | files | needs |\n")[2].partition("\n\n")[0]
    extensions = {}
    for row in table.splitlines()[1:]:
        name, seam, files, needs = (cell.strip() for cell in row.strip("|").split("|"))
        paths = tuple(file.strip("` ") for file in files.split(","))
        extensions[name] = Extension(
            name, seam, paths, tuple(need.strip() for need in needs.split(",") if need.strip())
        )
    assert extensions, "CONTRIBUTING.md has no table of extensions"
    return extensions


@functools.cache
def read_packages() -> dict[str, str]:
    """The text of each file of the packages, by its path."""
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


@functools.cache
def imported_modules(file: str) -> frozenset[str]:
    """All names that a file imports, in full, also those inside functions and for types.

    The `__init__.py` of a package may name for type checkers what it loads from a table when it is first used.
    """
    names, tree = set[str](), ast.parse(read_packages()[file])
    if file.endswith("/__init__.py"):
        tree.body = [
            node
            for node in tree.body
            if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            names |= {str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    return frozenset(names)


def importers(extension: Extension) -> Iterator[str]:
    """Files that import something of an extension and belong neither to it nor to one that needs it."""
    others = [other for other in read_extensions().values() if extension.name in other.needs]
    for file in read_packages():
        if extension.has(file) or any(other.has(file) for other in others):
            continue
        for name in imported_modules(file):
            if any(name == module or name.startswith(module + ".") for module in extension.modules):
                yield file
                break
