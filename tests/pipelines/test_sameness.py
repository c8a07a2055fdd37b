"""Two stages that compute different things are never taken for one, and ordinary stages are sure."""

from __future__ import annotations

import builtins
import fractions
import importlib
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from kit.tv import import_torchvision
from sameness_pairs import DESCRIBED, HELPER, MAKER, UNSEEN, read_rows

from pipelines import Pipeline, sources
from pipelines.fingerprint import Description, describe
from pipelines.ipc import memory_pickle

RECORDS = sources.arrays(x=np.arange(8))
FILES = {
    "helper.py": HELPER,
    "sched.py": "def f(x): return x\n",
    "pkg/__init__.py": "",
    "pkg/sub.py": "def f(x): return x * 7\n",
    "site-packages/maker.py": MAKER,
}
USERS = ("user", "helper", "sched", "pkg", "pkg.sub", "maker")
#: Of which a pickled copy by value lacks something, or which cannot be copied so; an import needs its file.
NOT_COPIED = """attribute of a cached function; attribute of a subclass of an array; cached property
case of a singledispatch; default of a singledispatch; global in the body of a class; struct
object that __getstate__ leaves out; slot that __getstate__ leaves out; what __getstate__ leaves out
what __reduce__ leaves out; attribute of a subclass of a date; object pickled by its name
import in the function; import from in the function""".replace("\n", "; ").split("; ")


class User:
    """Imports `user.py` of some files, each time from a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, itertools.count()

    def load(self, files: dict[str, str]) -> Any:
        """Returns the `stage` of `user.py`, which stays imported until the next one."""
        self.forget()
        folder = self._folder / f"{next(self._numbers)}"
        for name in ("pkg", "site-packages"):
            (folder / name).mkdir(parents=True)
        for name, text in {**FILES, **files}.items():
            (folder / name).write_text(text)
        sys.path[:0] = [str(folder), str(folder / "site-packages")]
        importlib.invalidate_caches()
        return importlib.import_module("user").stage

    def describe_copy(self, stage: Any) -> Description:
        modules = [sys.modules[name] for name in USERS if name in sys.modules]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        fd = memory_pickle.dump(stage)
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
        self.forget()
        copy = memory_pickle.load(fd)
        os.close(fd)
        return describe(copy)

    def forget(self) -> None:
        sys.path[:] = [each for each in sys.path if not each.startswith(str(self._folder))]
        for name in USERS:
            sys.modules.pop(name, None)


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[User]:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for patched, name in ((math, "sqrt"), (fractions.Fraction, "more"), (builtins, "zzz")):
        monkeypatch.setattr(patched, name, getattr(patched, name, None), raising=False)  # is put back
    user = User(tmp_path)
    yield user
    user.forget()


def change(pair: tuple[str, str, str]) -> tuple[dict[str, str], dict[str, str]]:
    text, old, new = pair
    files = {**FILES, "user.py": text}
    where, _, what = old.partition(":") if old.startswith(("helper:", "pkg:", "sched:")) else ("user", "", old)
    changed = "pkg/sub.py" if where == "pkg" else f"{where}.py"
    assert what in files[changed]
    return files, {**files, changed: files[changed].replace(what, new)}


@pytest.mark.parametrize("name", DESCRIBED)
def test_two_stages_that_compute_different_things_are_not_taken_for_one(name: str, user: User) -> None:
    if "torchvision" in DESCRIBED[name][0]:
        import_torchvision()
    one, two = change(DESCRIBED[name])
    described = describe(user.load(one))
    assert described.gaps == () and describe(user.load(two)).digest != described.digest
    stage = user.load(one)
    assert describe(stage) == described, "the same, imported from another folder"
    json.dumps(described.value)
    if name not in NOT_COPIED:
        assert user.describe_copy(stage) == described, "the same in another process"


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_read_that_no_description_covers_is_said(name: str, user: User) -> None:
    described = describe(user.load({"user.py": UNSEEN[name]}))
    assert described.gaps != () and describe(user.load({"user.py": UNSEEN[name]})) == described


#: What people write with libraries that are installed.
ORDINARY = """
cv2 resize | import cv2¶def stage(s): return {**s, 'x': cv2.resize(s['x'], (8, 8), interpolation=cv2.INTER_AREA)}
cv2 object | import cv2¶C = cv2.createCLAHE(2.0)¶def stage(s): return {'x': C.apply(s['x'])}
PIL decode | import io¶from PIL import Image¶
def stage(s): return {'x': Image.open(io.BytesIO(s['raw'])).convert('L')}
torchvision v2 | from torchvision.transforms import v2¶
stage = v2.Compose([v2.Resize(8), v2.RandomHorizontalFlip()])
albumentations compose | import albumentations as A¶stage = A.Compose([A.Resize(8, 8), A.Normalize()])
sequential | import torch¶torch.manual_seed(0)¶M = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3), torch.nn.ReLU())¶
@torch.no_grad()¶def stage(s): return {'x': M(torch.as_tensor(s['x'])).numpy()}
scripted | import torch¶torch.manual_seed(0)¶stage = torch.jit.script(torch.nn.Linear(2, 2))
scaler | import numpy as np¶from sklearn.preprocessing import StandardScaler¶
stage = StandardScaler().fit(np.arange(6.0).reshape(3, 2)).transform
scipy | from scipy import signal¶def stage(s): return {'x': signal.resample(s['x'], 8)}
numba | import numba¶@numba.njit¶def add(x): return x + 1¶def stage(s): return {'x': add(s['x'])}
"""


@pytest.mark.more
def test_most_stages_of_installed_libraries_are_sure(user: User) -> None:
    import_torchvision()

    def describe_all() -> dict[str, Description]:
        stages = {name: user.load({"user.py": text}) for name, text in read_rows(ORDINARY)}
        return {name: Pipeline(RECORDS).map(stage).stages[0].description for name, stage in stages.items()}

    described = describe_all()
    assert len({each.digest for each in described.values()}) == len(read_rows(ORDINARY))
    unsure = {name: each.gaps for name, each in described.items() if each.gaps}
    assert set(unsure) == {"cv2 object", "scripted"}, unsure
    assert describe_all() == described
