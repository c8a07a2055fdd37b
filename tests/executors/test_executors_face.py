"""What a user meets first: the package's names, how fast they come, what a mistyped executor is answered."""

from __future__ import annotations

import subprocess
import sys

import ensemble
from ensemble.executors import EXECUTORS, make_executor


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = ("torch", "ray", "optuna", "pyarrow", "cv2", "sklearn", "rich", "numpy")
    uses = "import sys, ensemble; ensemble.Ensemble, ensemble.Search"
    script = f"{uses}; print([m for m in {heavy!r} if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_every_public_name_is_there_and_executors_are_made_by_their_names() -> None:
    for name in ensemble.__all__:
        assert getattr(ensemble, name) is not None
    assert set(ensemble.__all__) <= set(dir(ensemble))
    assert make_executor("inline").name == "inline" and EXECUTORS.names() == ["inline", "local", "ray"]
