"""What the text of the documentation names between backticks exists: commands, files, names of the packages."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from typing import Any

from code_blocks import PAGES, ROOT, inline_codes

import ensemble
import pipelines
from benchmarks.__main__ import make_parser
from ensemble.cli.parser import make_command_parser

TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "tests" / "faults" / "README.md"]

#: Folders of the repository; a path that begins with one is a file of it.
FOLDERS = ("ensemble", "pipelines", "benchmarks", "tests", "docs", "deploy", "examples", r"\.ci")

#: What looks like a name or a path of ours and is none.
NO_NAMES = {
    "ensemble.pkl": "a file of a run directory",
    "ensemble.predictions": "a field of the header of saved predictions",
    "tests/FILE.py": "stands for any file",
}

#: Commands that went, which the changelog and decision records name.
GONE = r"ensemble (bench|top|tag|cache|export-data|prune-runs|dashboard --viewer)"
GONE += r"|ensemble (report --(mlperf|samples)|doctor --power|verify --(repair|contents))"


def find_wrong(is_wrong: Callable[[str], bool]) -> tuple[int, list[str]]:
    """How many code spans all texts have, and those that are wrong, with their page."""
    spans = [(page.relative_to(ROOT).as_posix(), code) for page in TEXTS for code in inline_codes(page)]
    return len(spans), [f"{page}: {code}" for page, code in spans if is_wrong(code)]


@functools.cache
def commands() -> dict[str, str]:
    found = {"ensemble": make_command_parser().format_help()}
    for command, whole in (("ensemble", make_command_parser()), ("python -m benchmarks", make_parser())):
        action = next(a for a in whole._actions if isinstance(a, argparse._SubParsersAction))
        for name, parser in action.choices.items():
            inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
            parsers = [parser, *(child for each in inner for child in each.choices.values())]
            found[f"{command} {name}"] = "".join(each.format_help() for each in parsers)
    return found


def test_commands_and_options_named_in_the_text_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    def is_wrong(code: str) -> bool:
        if match := re.match(r"(?:[A-Z_]+=\S+ )?make ([a-z-]+)$", code):
            return match[1] not in targets
        command = r"(ensemble(?: [a-z][\w-]*)?|python -m benchmarks [a-z]+)"
        match = re.match(rf"(?:\.venv/bin/)?{command}(?= |$)(.*)", code)
        if match is None or re.match(GONE, code):
            return False
        options = re.findall(r"(?<!\S)\[?(--[a-z][\w-]*)", match[2])
        known = commands().get(match[1])
        return known is None or not all(re.search(rf"{option}\b", known) for option in options)

    assert find_wrong(is_wrong)[1] == []


def test_files_named_in_the_text_exist() -> None:
    seen = 0

    def is_wrong(code: str) -> bool:
        nonlocal seen
        found = re.findall(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*", code)
        seen += len(found)
        return any(not is_file(path.rstrip(".")) for path in found if path not in NO_NAMES)

    def is_file(path: str) -> bool:
        return (ROOT / path).exists() or ("/test_" in path and (ROOT / "tests" / path).exists())

    assert find_wrong(is_wrong)[1] == [] and seen > 80


def find_parts(value: Any) -> set[str]:
    """The attributes of a class or a module, and the fields of a class."""
    fields = (inspect.get_annotations(each) for each in getattr(value, "__mro__", ()))
    return set(dir(value)).union(*fields)


def exists(dotted: str) -> bool:
    owner, _, last = dotted.rpartition(".")
    try:
        return last in find_parts(pkgutil.resolve_name(owner)) or bool(pkgutil.resolve_name(dotted))
    except (ImportError, AttributeError):
        return False


def test_dotted_names_in_the_text_exist() -> None:
    seen = 0

    def is_wrong(code: str) -> bool:
        nonlocal seen
        match = re.match(r"(?:ensemble|pipelines|benchmarks)(?:\.\w+)+", code)
        if match is None or match[0] in NO_NAMES:
            return False
        seen += 1
        return not exists(match[0])

    assert find_wrong(is_wrong)[1] == [] and seen > 80


def public_classes() -> dict[str, Any]:
    found = {name: getattr(package, name) for package in (ensemble, pipelines) for name in package.__all__}
    return {name: value for name, value in found.items() if inspect.isclass(value)}


def test_arguments_and_attributes_of_public_classes_named_in_the_text_exist() -> None:
    classes, seen = public_classes(), 0

    def find_named(code: str) -> Iterator[tuple[Any, str]]:
        """(class, attribute) of `Class.attribute`, (signature, parameter) of `Class(parameter=...)`."""
        try:
            tree = ast.parse(code.replace("...", "0"), mode="eval").body
        except SyntaxError:
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in classes:
                yield find_parts(classes[node.value.id]), node.attr
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
                parameters = inspect.signature(classes[node.func.id]).parameters
                yield from ((parameters, keyword.arg) for keyword in node.keywords if keyword.arg)

    def is_wrong(code: str) -> bool:
        nonlocal seen
        named = list(find_named(code))
        seen += len(named)
        return any(name not in known for known, name in named)

    assert find_wrong(is_wrong)[1] == [] and seen > 80
