"""The ports of public programs: each spec is accepted, and the page names it."""

from __future__ import annotations

import importlib.util
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


def test_the_page_names_each_port_and_measure_knows_it() -> None:
    names = {path.parent.name for path in PORTS.glob("*/port.py")}
    assert names == set(PACKAGES) and all(f"examples/ports/{name}/port.py" in PAGE for name in names)
    assert all(f'"{name}": (' in (PORTS / "measure.py").read_text() for name in names)
