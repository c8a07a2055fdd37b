"""The ports of public programs: each spec is accepted, and the page shows what was measured."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from kit.scripts import run_python
from kit.tv import HOOK

ROOT = Path(__file__).parents[2]
PORTS = ROOT / "examples" / "ports"
PAGE = (ROOT / "docs" / "how-to" / "port-a-script.md").read_text()
#: The packages that each needs beside those of the tests.
PACKAGES = {"tabm": "tabm", "towers": "torch", "monai": "monai", "lora": "peft", "chemprop": "chemprop"}
NEEDED = ("cpu_s", "seconds", "pss_mib")


@pytest.mark.more
@pytest.mark.parametrize("name", PACKAGES)
def test_the_spec_of_a_port_is_accepted(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    words = ["run", PORTS / name / "port.py", "--dry-run", "--executor", "local", "--run-dir", tmp_path / "run"]
    also = [HOOK, *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
    printed = run_python("-m", "ensemble.cli", *words, cwd=tmp_path, also=tuple(also))
    assert printed.startswith(f"{name} ·") and "steps x epochs" in printed
    assert list(tmp_path.iterdir()) == []


def test_both_sides_of_each_port_were_measured_with_members_that_learn_alike() -> None:
    figures = json.loads((PORTS / "figures.json").read_text())
    assert set(figures["pairs"]) == set(PACKAGES) == {path.parent.name for path in PORTS.glob("*/port.py")}
    for pairs in figures["pairs"].values():
        for pair in pairs:
            assert len(pair["plain"]["quality"]) == len(pair["port"]["quality"]) > 1
            assert all(pair[side][needed] > 0 for side in ("plain", "port") for needed in NEEDED)


@pytest.mark.more
def test_the_page_shows_what_measure_prints_of_the_figures(tmp_path: Path) -> None:
    """`measure.py` fails where the sides' qualities differ by more than chance."""
    printed = run_python(PORTS / "measure.py", cwd=tmp_path).strip()
    assert len(printed.splitlines()) == 2 + len(PACKAGES) + 2
    assert printed in PAGE, f"write into docs/how-to/port-a-script.md what this prints:\n{printed}"
