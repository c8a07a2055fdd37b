"""Executes the imports of installed packages with which a file of the user's begins.

The packages are then as if the file itself had been imported: none of the user's code has run before them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

from ensemble.user_code.imports import find_file, resolve

#: What an expression may consist of that calls nothing and looks up no attribute.
_PLAIN = (
    ast.Constant, ast.Name, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.UnaryOp, ast.BinOp, ast.Subscript,
    ast.operator, ast.unaryop, ast.expr_context,
)  # fmt: skip
#: The conditions of blocks that are not executed when a file is imported.
_NEVER = {ast.dump(ast.parse(text, mode="eval").body) for text in ("__name__ == '__main__'", "TYPE_CHECKING")}


class Preamble:
    """Executes imports as far as they are the first statements of a file, and of the user's modules among them.

    Definitions and assignments that call nothing may stand between them. Any other statement ends the preamble of
    all files, as later imports may depend on what it does; so does an import of which it is not clear whose it is.

    Args:
        is_installed: whether a package, by its name, is Python's, ours or installed, and not the user's.
    """

    def __init__(self, is_installed: Callable[[str], bool]) -> None:
        self._is_installed = is_installed
        self._walked: set[str] = set()

    def execute(self, file: Path, package: str = "") -> bool:
        """Returns whether the file does nothing but import and define.

        Args:
            file: whose imports are executed; `sys.path` is as when it is imported.
            package: that resolves its relative imports.
        """
        try:
            body = ast.parse(file.read_bytes()).body
        except (OSError, SyntaxError, ValueError):  # such as a module in an archive
            return False
        return all(self._execute_statement(node, file, package) for node in body)

    def _execute_statement(self, node: ast.stmt, file: Path, package: str) -> bool:
        match node:
            case ast.Import(names=aliases):
                alone = [ast.copy_location(ast.Import([alias]), node) for alias in aliases]
                pairs = zip(aliases, alone, strict=True)
                return all(self._import(alias.name, (), statement, file) for alias, statement in pairs)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                name, parts = resolve(module or "", level, package), tuple(alias.name for alias in aliases)
                return self._import(name, parts, node, file)
        return _only_defines(node)

    def _import(self, name: str, parts: tuple[str, ...], statement: ast.stmt, file: Path) -> bool:
        names = name.split(".")
        packages = [".".join(names[: count + 1]) for count in range(len(names))]
        files = {module: found for module in packages if (found := find_file(module)) is not None}
        if not files:
            return self._is_installed(names[0]) and _execute_import(statement, file)
        if "*" in parts or name not in files:  # names that decide what is imported; a folder without a file
            return False
        inner = {module: found for part in parts if (found := find_file(module := f"{name}.{part}")) is not None}
        if inner and ast.parse(files[name].read_bytes()).body:  # which may define a name of a module in it
            return False
        return all(self._walk(module, found) for module, found in (files | inner).items())

    def _walk(self, module: str, file: Path) -> bool:
        if module in self._walked:
            return True
        self._walked.add(module)
        return self.execute(file, module if file.name == "__init__.py" else module.rpartition(".")[0])


def _execute_import(statement: ast.stmt, file: Path) -> bool:
    try:
        exec(compile(ast.Module([statement], type_ignores=[]), str(file), "exec"), {"__name__": "preamble"})
    except (Exception, SystemExit):  # the file raises it again when it is imported
        return False
    return True


def _only_defines(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()) | ast.Pass():
            return True
        case ast.Assign(targets=targets, value=value):
            names = [name for target in targets for name in getattr(target, "elts", [target])]
            return all(map(_is_own_name, names)) and _is_plain(value)
        case ast.AnnAssign(target=target, annotation=annotation, value=value):
            return _is_own_name(target) and _is_plain(annotation) and (value is None or _is_plain(value))
        case ast.FunctionDef(args=arguments, decorator_list=[], returns=returns):
            evaluated = [*arguments.defaults, *arguments.kw_defaults, returns]
            evaluated += [argument.annotation for argument in ast.walk(arguments) if isinstance(argument, ast.arg)]
            return all(expression is None or _is_plain(expression) for expression in evaluated)
        case ast.If(test=test, orelse=[]):
            return ast.dump(test) in _NEVER
    return False


def _is_own_name(target: ast.expr) -> bool:
    """Whether it is a variable, and none that imports look at, such as `__path__`."""
    return isinstance(target, ast.Name) and not target.id.startswith("__")


def _is_plain(expression: ast.expr) -> bool:
    return all(isinstance(part, _PLAIN) for part in ast.walk(expression))
