"""Every public name is in the reference, with a docstring that says what its parameters are."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
MODULES = ("pipelines", "pipelines.sources", "pipelines.stages", "ensemble")

sys.path.insert(0, str(ROOT / "docs" / "_site"))
import tables  # noqa: E402

#: Classes whose objects users are handed, and do not make: their constructors are no part of what is public.
HANDED_OUT = {f"pipelines.{name}" for name in ("Batch", "Loader", "Resident", "sources.Subset")} | {"ensemble.Run"}


def public_names() -> list[str]:
    found = []
    for name in ("pipelines.sampling", "pipelines.weights"):  # without `__all__`: their functions
        for function, value in inspect.getmembers(importlib.import_module(name), inspect.isfunction):
            if value.__module__ == name and not function.startswith(("_", "check_")):
                found.append(f"{name}.{function}")
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            if not name.startswith("_") and not inspect.ismodule(getattr(importlib.import_module(module), name)):
                found.append(f"{module}.{name}")
    return found


def get(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def parameters(value: Any) -> set[str]:
    if inspect.isclass(value) and issubclass(value, BaseException):
        return set()
    if dataclasses.is_dataclass(value):
        return {field.name for field in dataclasses.fields(value) if field.init and not field.name.startswith("_")}
    if inspect.isclass(value) and value.__init__ is object.__init__:
        return set()
    target = value.__init__ if inspect.isclass(value) else value
    return set(inspect.signature(target).parameters) - {"self", "cls"}


def documented(value: Any) -> set[str]:
    """The names that the sections Args and Attributes describe."""
    texts = [inspect.getdoc(value) or ""]
    if inspect.isclass(value):
        texts += [inspect.getdoc(base) or "" for base in value.__mro__[1:-1]]
        texts.append(inspect.getdoc(value.__init__) or "")
    names: set[str] = set()
    for text in texts:
        for section in re.findall(r"^(?:Args|Attributes):\n((?:[ ].*\n?|\n)+)", text, flags=re.MULTILINE):
            for match in re.finditer(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*):", section, flags=re.MULTILINE):
                names |= {name.strip(" *") for name in match[1].split(",")}
    return names


@pytest.mark.parametrize("name", public_names())
def test_a_public_name_says_what_it_is_and_what_its_parameters_are(name: str) -> None:
    value = get(name)
    text = inspect.getdoc(value) or ""
    assert len(text.split()) > 3, f"{name} has no docstring"
    if name not in HANDED_OUT:
        assert parameters(value) - documented(value) == set(), f"{name} has parameters without a word on them"


@pytest.mark.parametrize("page", sorted(page.name for page in REFERENCE.glob("*.md")))
def test_a_page_of_the_reference_can_be_read_in_the_repository(page: str) -> None:
    text = (REFERENCE / page).read_text(encoding="utf-8")
    assert text == tables.write_overview(text), "python docs/_site/tables.py writes it anew"
    rest = "\n".join(line for line in text.splitlines() if not line.startswith((":::", "{{", "    ")))
    assert rest.count("\n|") >= 3 or rest.count("\n- ") >= 3, "a page of placeholders"


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    text = re.sub(r"^\{\{ api (\S+) \}\}$", lambda match: tables.describe_api(match[1]), text, flags=re.MULTILINE)
    shown = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert set(public_names()) - set(shown) == set()
    assert sorted(name for name in shown if shown.count(name) > 1) == []


@pytest.mark.parametrize("name", ["ensemble.Run", "ensemble.train.member.TrainContext", "pipelines.Pipeline"])
def test_the_methods_of_what_users_hold_have_docstrings(name: str) -> None:
    value = get(name)
    methods = [m for key, m in inspect.getmembers(value, inspect.isroutine) if not key.startswith("_")]
    assert methods and [m.__name__ for m in methods if not inspect.getdoc(m)] == []


def test_the_page_of_events_is_made_of_their_types() -> None:
    """Each type has a sentence on when it is logged, and each word on a field is of one that the type has."""
    from ensemble.events import SECTIONS, TYPES

    text = (REFERENCE / "events.md").read_text(encoding="utf-8")
    assert tables.describe_events() in text, "python docs/_site/tables.py writes it anew"
    assert len(TYPES) == sum(map(len, SECTIONS.values())) > 50
    for name, kind in TYPES.items():
        assert len((inspect.getdoc(kind) or "").split()) > 3, name
        assert documented(kind) <= set(kind.__struct_fields__), name


def test_entries_of_several_names_become_entries_of_each() -> None:
    import docstrings

    args = "Args:\n    rank, world: of this worker,\n        and how many.\n    copy: whether.\n"
    mended = docstrings.mend(f"Reads.\n\n{args}\nExample:\n    >>> 1\n")
    each = "of this worker,\n        and how many.\n"
    assert f"    rank: {each}    world: {each}    copy: whether.\n" in mended and "\nExamples:\n" in mended


def test_the_page_of_options_has_every_name_and_option_with_its_default() -> None:
    import ast

    from ensemble.spec import loops, options, samplers

    tables = {
        "optimizer": options.OPTIMIZERS,
        "schedule": options.SCHEDULES,
        "compression": options.COMPRESSIONS,
        "communicator": options.COMMUNICATORS,
        "averaging": loops.AVERAGES,
        "compile": loops.COMPILES,
        "Search.sampler": samplers.SAMPLERS,
        "Search.pruner": samplers.PRUNERS,
        "Search.objective": samplers.OBJECTIVES,
    }
    sections = (REFERENCE / "options.md").read_text().split("\n## ")[1:]
    shown = {}
    for section in sections:
        title, _, text = section.partition("\n")
        rows = re.findall(r"^\| `(.*?)` \| (?:`(.*?)`)? ?\| (?:`(.*?)`)? ?\| ?(.*?) ?\|$", text, re.MULTILINE)
        shown[title] = [(name, option, default and ast.literal_eval(default)) for name, option, default, _ in rows]
        assert all(meaning for _, option, _, meaning in rows if option)
    wanted = {
        title: [
            row
            for name, known in table.items()
            for row in ([(name, option, given.default) for option, given in known.items()] or [(name, "", "")])
        ]
        for title, table in tables.items()
    }
    assert shown == wanted
