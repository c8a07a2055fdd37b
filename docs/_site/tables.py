"""Parts of the reference that are made from the code: the commands, from their parser.

The site has all of it. The pages as they are in the repository have a table of the names, or of the commands,
between two comments; `python docs/_site/tables.py` writes it, and a test holds it to the code.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from ensemble.cli.parser import make_command_parser

#: What is declared has no methods that users call, but those that the page shows by itself.
OPTIONS = {"ensemble": "\n    options:\n      members: false"}

REFERENCE = Path(__file__).resolve().parents[1] / "reference"


def list_commands() -> list[tuple[str, str, argparse.ArgumentParser]]:
    """Every command, subcommands included, as (name, one-line help, parser), in the parser's order."""
    return list(_walk(make_command_parser(), "ensemble"))


def _walk(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for word, child in action.choices.items():
                yield f"{name} {word}", summaries.get(word, ""), child
                yield from _walk(child, f"{name} {word}")


def describe_commands() -> str:
    """The commands as Markdown: an overview, then each with its arguments and options."""
    commands = list_commands()
    lines = ["| command | does |", "|---|---|"]
    lines += [f"| [`{name}`](#{name.replace(' ', '-')}) | {_escape(text)} |" for name, text, _ in commands]
    for name, text, parser in commands:
        lines += ["", f"## `{name}` {{ #{name.replace(' ', '-')} }}", "", _escape(parser.description or text), ""]
        usage = " ".join(parser.format_usage().removeprefix("usage:").split())
        lines += ["```text", *_wrap(usage), "```", ""]
        rows = [row for action in parser._actions for row in _describe_action(parser, action)]
        if rows:
            lines += ["| argument or option | meaning |", "|---|---|", *rows]
    return "\n".join(lines)


def _describe_action(parser: argparse.ArgumentParser, action: argparse.Action) -> Iterator[str]:
    if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
        return
    value = parser._get_formatter()._format_args(action, (action.dest or "").upper()) if action.nargs != 0 else ""
    if action.option_strings:
        shown = ", ".join(f"`{' '.join(filter(None, (option, value)))}`" for option in action.option_strings)
    else:
        shown = f"`{value}`"
    # argparse fills in %(default)s and its kin
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    if action.choices is not None and "{" not in shown:
        text += f"; one of {', '.join(f'`{choice}`' for choice in action.choices)}"
    yield f"| {shown.replace('|', '&#124;')} | {_escape(text)} |"


def _escape(text: str) -> str:
    for mark in "\\*_<|[]":
        text = text.replace(mark, f"\\{mark}")
    return text


def _wrap(usage: str, width: int = 88) -> list[str]:
    import textwrap

    return textwrap.wrap(usage, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def describe_api(module: str) -> str:
    """Directives of mkdocstrings for the names in `__all__` of a module that the pages do not have."""
    names = importlib.import_module(module).__all__
    pages = "".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    shown = [name for name in names if not name.startswith("_") and f"::: {module}.{name}\n" not in pages]
    values = [name for name in shown if not inspect.ismodule(getattr(importlib.import_module(module), name))]
    return "\n\n".join(f"::: {module}.{name}{OPTIONS.get(module, '')}" for name in values)


#: The lines around the table of a page in the repository.
BEGIN, END = "<!-- made by docs/_site/tables.py -->", "<!-- end -->"


def write_overview(page: str) -> str:
    """A page of the reference with its table of names, or of commands, before the first directive of the site."""
    if page.startswith("# Events\n"):
        made = "\n".join([BEGIN, describe_events(), END])
        return re.sub(rf"{re.escape(BEGIN)}\n.*?{re.escape(END)}", lambda _: made, page, flags=re.DOTALL)
    kept = re.sub(rf"{re.escape(BEGIN)}\n.*?{re.escape(END)}\n\n", "", page, flags=re.DOTALL)
    first = re.search(r"^(?:::: \S+|\{\{ (?:api|commands).*)$", kept, re.MULTILINE)
    if first is None:
        return kept
    if "{{ commands }}" in kept:
        lines = ["| command | does |", "|---|---|"]
        lines += [f"| `{name}` | {_escape(text)} |" for name, text, _ in list_commands()]
        said = "`COMMAND --help` shows the arguments and options of each."
    else:
        text = re.sub(r"^\{\{ api (\S+) \}\}$", lambda match: describe_api(match[1]), kept, flags=re.MULTILINE)
        lines = ["| name | is |", "|---|---|"]
        lines += [f"| `{name}` | {_summarize(name)} |" for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]
        said = "`python -m pydoc NAME` shows the whole text of each, with arguments, errors and examples."
    table = "\n".join([BEGIN, *lines, "", said, END])
    return f"{kept[: first.start()]}{table}\n\n{kept[first.start() :]}"


def _summarize(name: str) -> str:
    """The first sentence of the docstring of a name."""
    import pydoc

    text = inspect.getdoc(pydoc.locate(name)) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return paragraph.replace("|", "\\|")


def describe_events() -> str:
    """The types of events as Markdown: a table for each section, and what is inside fields."""
    from ensemble.events import SECTIONS

    lines, notes = [], []
    for title, types in SECTIONS.items():
        lines += [f"## {title}", "", "| type | when | fields |", "|---|---|---|"]
        for kind in types:
            name, (when, known) = str(kind.__struct_config__.tag), _read_notes(kind)
            fields = ", ".join(f"`{field}`" for field in kind.__struct_fields__ if field not in ("v", "t"))
            lines.append(f"| `{name}` | {when} | {fields} |")
            notes += [f"| `{name}.{field}` | {note} |" for field, note in known.items()]
        lines.append("")
    return "\n".join([*lines, "## Inside fields", "", "| field | holds |", "|---|---|", *notes])


def _read_notes(kind: type) -> tuple[str, dict[str, str]]:
    """When an event is logged, and the notes on its fields, from its docstring."""
    when, _, attributes = (inspect.getdoc(kind) or "").partition("\n\nAttributes:\n")
    notes: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \w)", attributes):
        names, _, note = " ".join(entry.split()).partition(": ")
        notes |= dict.fromkeys(names.split(", "), note.removesuffix(".")) if note else {}
    first = " ".join(when.split()).removesuffix(".")
    return first[:1].lower() + first[1:], notes


def describe_options(framework: str) -> str:
    """Where each option and callback of a framework is placed (`ensemble.integrations`), as Markdown."""
    from ensemble.integrations.options import Options

    lines = ["| of | option | in a member |", "|---|---|---|"]
    for table in vars(importlib.import_module(f"ensemble.integrations.{framework}")).values():
        for place, names, why in table.rows if isinstance(table, Options) else ():
            shown = ", ".join(f"`{name}`" for name in names)
            lines.append(f"| {table.owner} | {shown} | {place}{why and ': '}{_escape(why)} |")
    return "\n".join([f"<!-- options of {framework}, made by docs/_site/tables.py -->", *lines, END])


def write_options(page: str) -> str:
    """The page of the frameworks with the tables of their options; all of them are installed."""
    pattern = r"<!-- options of (\w+), made by docs/_site/tables.py -->\n.*?<!-- end -->"
    return re.sub(pattern, lambda match: describe_options(match[1]), page, flags=re.DOTALL)


TABLES = {"commands": describe_commands, "api": describe_api}


if __name__ == "__main__":
    for page in REFERENCE.glob("*.md"):
        page.write_text(write_overview(page.read_text(encoding="utf-8")), encoding="utf-8")
    page = REFERENCE.parent / "how-to" / "frameworks.md"
    page.write_text(write_options(page.read_text(encoding="utf-8")), encoding="utf-8")
