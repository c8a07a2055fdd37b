"""Links the page's ES modules into one script, for the report: a file on a disk cannot import another one.

Each module becomes a function that is called once, in the order of their dependencies. Modules keep to few forms,
each on one line: `import { a, b } from "./x.js";`, and `export` before a function, an async function, a class or a
const.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

_IMPORT = re.compile(r'import \{ ([\w$]+(?:, [\w$]+)*),? \} from "(\.\.?/[\w./-]+\.js)";')
_EXPORT = re.compile(r"export ((?:async )?function|const|class) ([\w$]+)\b")
_STATEMENT = re.compile(r"(?:import|export)\b")
_FORBIDDEN = re.compile(r"\bimport\s*[(.]|</script|<!--", re.IGNORECASE)


class LinkError(Exception):
    """A module has a form that is not linked; the message names file and line."""


def read_modules(folder: Path) -> dict[str, str]:
    """Returns the text of each module below a folder, by its path in it."""
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.js"))
    }


def link_modules(modules: Mapping[str, str], entry: str) -> str:
    """Returns one script that does what the module `entry` does, with all that it imports.

    Args:
        modules: text by path.

    Raises:
        LinkError: a module is missing, is part of a cycle, or has a form that is not linked.
    """
    exports: dict[str, list[str]] = {}  # of the modules that are linked, in their order
    functions: list[str] = []

    def link(path: str, importers: tuple[str, ...], where: str) -> None:
        if path in importers:
            cycle = " -> ".join([*importers[importers.index(path) :], path])
            raise LinkError(f"{where}: the modules import each other: {cycle}")
        if path in exports:
            return
        if path not in modules:
            raise LinkError(f"{where}: there is no module {path}")
        lines, exported_names = [], list[str]()
        for number, line in enumerate(modules[path].splitlines(), start=1):
            here = f"{path}:{number}"
            if _FORBIDDEN.search(line):
                raise LinkError(f"{here}: this form is not linked: {line.strip()}")
            if (imported := _IMPORT.fullmatch(line)) is not None:
                target = posixpath.normpath(posixpath.join(posixpath.dirname(path), imported[2]))
                link(target, (*importers, path), here)
                if missing := [name for name in imported[1].split(", ") if name not in exports[target]]:
                    raise LinkError(f"{here}: {target} exports no {', '.join(missing)}")
                line = f"const {{ {imported[1]} }} = {_name(target, exports)};"
            elif (exported := _EXPORT.match(line)) is not None:
                exported_names.append(exported[2])
                line = line.removeprefix("export ")
            elif _STATEMENT.match(line.strip()):
                raise LinkError(f"{here}: this form is not linked: {line.strip()}")
            lines.append(line)
        exports[path] = exported_names
        body = "\n".join(lines)
        result = f"return {{ {', '.join(exported_names)} }};"
        functions.append(f"// {path}\nconst {_name(path, exports)} = (() => {{\n{body}\n{result}\n}})();")

    link(entry, (), entry)
    return "\n".join(functions) + "\n"


def _name(path: str, exports: Mapping[str, object]) -> str:
    return f"$module{list(exports).index(path)}"
