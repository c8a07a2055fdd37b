"""Finds uses of third-party libraries' private API in a source: names with a leading underscore, not ours."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Collection, Iterator

OWN = ("ensemble", "pipelines")
NAMEDTUPLE = ("_asdict", "_field_defaults", "_fields", "_make", "_replace")  # public, says the standard library
BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "attrgetter")
LIBRARIES = ("aiohttp", "cloudpickle", "cv2", "horovod", "numba", "numpy", "optuna", "psutil", "pyarrow")
LIBRARIES += ("ray", "rich", "sklearn", "torch", "triton")
MODULE = re.compile(r"[A-Za-z]\w*(\.\w+)+")  # a whole string that is a dotted name


def is_private(name: str) -> bool:
    """Whether one component of a dotted name has a leading underscore and is no `__dunder__`."""
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def is_foreign(name: str | None) -> bool:
    package = (name or "").partition(".")[0]
    return bool(package) and package not in OWN and package not in sys.stdlib_module_names


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """A node and all below it; found once, as many laws look at them."""
    return tuple(ast.walk(tree))


@functools.cache
def own_privates(tree: ast.AST) -> frozenset[str]:
    """Private names that a source defines: functions, classes, variables, attributes of `self`, slots."""
    found: set[str] = set()
    for node in nodes(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                found |= {n.value for n in ast.walk(value) if isinstance(n, ast.Constant)}
    return frozenset(name for name in found if is_private(name))


def privates(tree: ast.Module, ours: Collection[str] = ()) -> Iterator[tuple[int, str]]:
    """Line and name of every use of a third-party library's private API in one file.

    An attribute of a name in `ours`, or of one that the file defines, is ours unless its object is a library's.
    """
    known = _imported(tree)
    foreign = {name for name, full in known.items() if is_foreign(full)} | _typed(tree, known)
    ours = {*ours, *own_privates(tree), *NAMEDTUPLE}
    yield from _inherited(tree, foreign)
    for node in nodes(tree):
        found: list[str] = []
        match node:
            case ast.Import(names=aliases):
                found = [alias.name for alias in aliases if is_foreign(alias.name)]
            case ast.ImportFrom(module=module, names=aliases, level=0) if is_foreign(module):
                found = [f"{module}.{alias.name}" for alias in aliases]
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass  # see `_inherited`
            case ast.Attribute(attr=attr) if is_private(attr):
                root = _root(node)
                if root in foreign or (root not in known and attr not in ours):
                    found = [ast.unparse(node).replace(str(root), known.get(str(root), str(root)), 1)]
            case ast.Call(func=function, args=arguments, keywords=keywords):
                if _root(function) in foreign:
                    found = [word.arg for word in keywords if word.arg]
                if getattr(function, "attr", getattr(function, "id", None)) in BY_NAME:
                    texts = [a.value for a in arguments if isinstance(a, ast.Constant)]
                    found += [text for text in texts if isinstance(text, str) and text not in ours]
            case ast.Constant(value=str(text)) if MODULE.fullmatch(text) and text.partition(".")[0] in LIBRARIES:
                found = [text]
        yield from ((getattr(node, "lineno", 0), name) for name in found if is_private(name))


def _inherited(tree: ast.Module, foreign: Collection[str]) -> Iterator[tuple[int, str]]:
    """`self._x` in a class that derives from a library's and defines no `_x` itself."""
    for node in nodes(tree):
        if isinstance(node, ast.ClassDef) and any(_root(base) in foreign for base in node.bases):
            ours = {*own_privates(node), *NAMEDTUPLE}
            for inner in ast.walk(node):
                match inner:
                    case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, lineno=line):
                        if is_private(name) and name not in ours:
                            yield line, f"{ast.unparse(node.bases[0])}.{name}"


def _imported(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for, in full."""
    known: dict[str, str] = {}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.partition(".")[0]
                known[alias.asname or package] = alias.name if alias.asname else package
        elif isinstance(node, ast.ImportFrom):
            module = node.module if not node.level else OWN[0]
            known |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
    return known


def _typed(tree: ast.Module, known: dict[str, str]) -> set[str]:
    """Names that are annotated with a library's type, or assigned from what one of its functions returns."""
    found: set[str] = set()
    for node in nodes(tree):
        match node:
            case (
                ast.arg(arg=name, annotation=ast.expr() as of)
                | ast.AnnAssign(target=ast.Name(id=name), annotation=of)
            ):
                named = (known.get(n.id) for n in ast.walk(of) if isinstance(n, ast.Name))
                found |= {name} if any(map(is_foreign, named)) else set()
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=of)):
                found |= {name} if is_foreign(known.get(str(_root(of)))) else set()
    return found - {"self", "cls"}


def _root(node: ast.expr) -> str | None:
    """The name that an expression such as `a.b(c).d[0]` begins with."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None
