"""`ensemble.extend`: all tables of providers, and what an extension builds on."""

from __future__ import annotations

import re

import pytest
from kit.extensions import ROOT, read_packages

from ensemble import extend


def test_every_table_of_the_packages_is_listed() -> None:
    made = re.compile(r"^(\w+) = Providers\(\s*\"(\w+)\"", re.MULTILINE)
    tables = [(kind, name) for text in read_packages().values() for name, kind in made.findall(text)]
    assert dict(tables).keys() == extend.TABLES.keys()
    assert [table.kind for table in extend.list_tables()] == list(extend.TABLES)


def test_all_of_ours_can_be_loaded_and_what_it_exports_imported() -> None:
    for table in extend.list_tables():
        assert all(provider.load() is not None for provider in table.list_providers())
    for name in extend.__all__:
        assert getattr(extend, name) is not None
    with pytest.raises(AttributeError, match="Sorce"):
        extend.Sorce  # noqa: B018


def test_the_page_has_the_group_of_every_table() -> None:
    page = (ROOT / "docs" / "how-to" / "write-an-extension.md").read_text(encoding="utf-8")
    assert {f"ray_ensemble.{kind}" for kind in extend.TABLES} == set(
        re.findall(r"^\| `([\w.]+)`", page, re.MULTILINE)
    )
