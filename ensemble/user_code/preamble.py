"""Executes the imports of installed packages with which a file of the user's begins.

The packages are then as if the file itself had been imported: none of the user's code has run before them.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from ensemble.user_code.imports import find_file, parse, resolve

#: What an expression may consist of that calls nothing and looks up no attribute.
_PLAIN = (
    ast.Constant, ast.Name, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.UnaryOp, ast.BinOp, ast.Subscript,
    ast.operator, ast.unaryop, ast.expr_context,
)  # fmt: skip


class Preamble:
    """Executes imports as far as they are the first statements of a file, and of the user's modules among them.

    Definitions and assignments that call nothing may stand between them. Any other statement ends the preamble of
    all files: later imports may depend on what it does.
    """

    def __init__(self) -> None:
        self._walked: set[str] = set()

    def execute(self, file: Path, package: str = "") -> bool:
        """Returns whether the file does nothing but import and define.

        Args:
            file: whose imports are executed; `sys.path` is as when it is imported.
            package: that resolves its relative imports.
        """
        return all(self._execute_statement(node, package) for node in parse(file).body)

    def _execute_statement(self, node: ast.stmt, package: str) -> bool:
        match node:
            case ast.Import(names=aliases):
                return all(self._import(alias.name, (), package, ast.Import([alias])) for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                name, parts = resolve(module or "", level, package), tuple(alias.name for alias in aliases)
                return self._import(name, parts, package, node)
        return _only_defines(node)

    def _import(self, name: str, parts: tuple[str, ...], package: str, statement: ast.stmt) -> bool:
        names = name.split(".")
        modules = [".".join(names[: count + 1]) for count in range(len(names))]
        modules += [f"{name}.{part}" for part in parts]
        files = {module: file for module in modules if (file := find_file(module)) is not None}
        if not files:
            return _execute_import(statement)
        return all(self._walk(module, file) for module, file in files.items())

    def _walk(self, module: str, file: Path) -> bool:
        if module in self._walked:
            return True
        self._walked.add(module)
        return self.execute(file, module if file.name == "__init__.py" else module.rpartition(".")[0])


def _execute_import(statement: ast.stmt) -> bool:
    alone = ast.fix_missing_locations(ast.Module([statement], type_ignores=[]))
    try:
        exec(compile(alone, "<preamble>", "exec"), {"__name__": "preamble"})
    except (Exception, SystemExit):  # the file raises it again when it is imported
        return False
    return True


def _only_defines(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()) | ast.Pass():
            return True
        case ast.Assign(targets=targets, value=value):
            names = [name for target in targets for name in getattr(target, "elts", [target])]
            return all(isinstance(name, ast.Name) for name in names) and _is_plain(value)
        case ast.AnnAssign(target=ast.Name(), annotation=annotation, value=value):
            return _is_plain(annotation) and (value is None or _is_plain(value))
        case ast.FunctionDef(args=arguments, decorator_list=[], returns=returns):
            evaluated = [*arguments.defaults, *arguments.kw_defaults, returns]
            evaluated += [argument.annotation for argument in ast.walk(arguments) if isinstance(argument, ast.arg)]
            return all(expression is None or _is_plain(expression) for expression in evaluated)
        case ast.If(test=test, orelse=[]):
            return bool(re.match(r"__name__ ==|(typing\.)?TYPE_CHECKING$", ast.unparse(test)))
    return False


def _is_plain(expression: ast.expr) -> bool:
    return all(isinstance(part, _PLAIN) for part in ast.walk(expression))
