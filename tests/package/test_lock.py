"""The lock: the pinned versions with their hashes, for installations that must not change."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "deploy/requirements.lock").read_text()
#: Extras that the lock leaves out: they are for who changes the project.
NOT_LOCKED = {"dev", "docs"}


def normalize(name: str) -> str:
    """A package's name as indices compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock() -> dict[str, tuple[str, list[str]]]:
    """Of each package its version, and the hashes of its files."""
    found: dict[str, tuple[str, list[str]]] = {}
    for entry in re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", LOCK, flags=re.M).strip()):
        name, version = re.match(r"([\w.-]+)(?:\[[\w,-]+\])?==([^\s;]+)", entry).groups()  # type: ignore[union-attr]
        found[normalize(name)] = (version, re.findall(r"--hash=sha256:([0-9a-f]{64})", entry))
    return found


def test_every_package_has_hashes_and_no_address() -> None:
    locked = read_lock()
    assert len(locked) > 100
    assert [name for name, (_, hashes) in locked.items() if not hashes] == []
    assert "://" not in LOCK and "index" not in LOCK.partition("\n")[0]


def test_versions_are_those_that_the_tests_use() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = {normalize(name): version for name, version in pins.items()}
    locked = read_lock()
    assert {n: v for n, (v, _) in locked.items() if n in pinned and v != pinned[n]} == {}


def test_all_that_is_declared_is_locked() -> None:
    extras = PROJECT["optional-dependencies"]
    declared = [*PROJECT["dependencies"], *(d for e in extras if e not in NOT_LOCKED for d in extras[e])]
    names = {normalize(re.match(r"[\w.-]+", each).group()) for each in declared}  # type: ignore[union-attr]
    assert names - set(read_lock()) == set(), "run `make lock`"
