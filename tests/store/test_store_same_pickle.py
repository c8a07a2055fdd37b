"""A declaration that is submitted again has the pickle, and so the digest, that it had; another one has not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_store_mirror import make

import ensemble
from ensemble.api import DrivenRun
from ensemble.store import RunDir
from ensemble.store.digests import digest_file
from ensemble.store.same_pickle import find_renaming
from ensemble.train.data_identity import training_data

SPEC = """
import numpy as np
import torch
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources

class Net(torch.nn.Linear):
    pass

def model(params):
    return Net(4, 3, bias=params["kind"] in {"plain", "wide", "deep", "odd"})

def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

def spec(epochs: int = 1) -> Ensemble:
    x = np.zeros((64, 4), np.float32)
    train = Pipeline(sources.arrays(x=x, y=np.zeros(64, np.int64)), seed=0).map(lambda sample: sample, id="same")
    return Ensemble(name="same", recipe=Recipe(model=model, loss=loss), train=train, epochs=epochs,
        members=[{"kind": "plain"}, {"kind": "odd"}], batch_size=16)
"""
SUBMIT = """
import sys
from pathlib import Path
from ensemble import submit
from ensemble.spec.spec_file import load_spec
from ensemble.store import RunDir
from ensemble.store.digests import digest_file
spec, run, limit, *settings = sys.argv[1:]
submit(load_spec(spec, settings), run, "inline", spec_file=spec, limits={"cpus": float(limit)})
print(digest_file(RunDir(run).ensemble_file))
"""


def digest_of(path: Path) -> str:
    return digest_file(RunDir(path).ensemble_file)


def make_identified(epochs: int = 2) -> ensemble.Ensemble:
    """An ensemble whose arrays are known by what they hold, as when it is submitted."""
    made = make(epochs)
    training_data(made)
    return made


def test_a_declaration_that_is_submitted_again_keeps_its_digest(tmp_path: Path) -> None:
    """With pipelines made anew, which have other tokens."""
    first = RunDir.create(tmp_path / "run", make_identified())
    digest, token = digest_of(first.path), first.load_ensemble().train.token
    again = make_identified()
    assert again.train.token != token
    RunDir.create(first.path, again)
    assert digest_of(first.path) == digest and first.load_ensemble().train.token == token
    run = ensemble.submit(make(), first.path, "inline", limits={"cpus": 2})
    assert digest_of(first.path) == digest, "what a start takes at most is no part of the declaration"
    assert isinstance(run, DrivenRun) and run._controller is not None
    frozen = run._controller.ensemble
    assert frozen.train is not None and frozen.train.token == token, "all processes of the run have the same"
    run.wait()
    assert run.state.header.limits == {"cpus": 2}
    RunDir.create(first.path, make_identified(3))
    assert digest_of(first.path) != digest and first.load_ensemble().epochs == 3


def test_pickles_are_the_same_but_for_ids_and_the_order_of_sets() -> None:
    import pickle

    ids = [f"{n:032x}" for n in range(1, 5)]

    def dump(*values: object) -> bytes:
        return pickle.dumps(values, protocol=5)

    assert find_renaming(dump(ids[0], ids[1], ids[0]), dump(ids[2], ids[3], ids[2]), ids) == {
        ids[0]: ids[2],
        ids[1]: ids[3],
    }
    assert find_renaming(dump(ids[0], ids[1]), dump(ids[2], ids[2]), ids) is None
    assert find_renaming(dump(ids[0], ids[0]), dump(ids[2], ids[3]), ids) is None
    assert find_renaming(dump(ids[0]), dump(ids[2]), ()) is None, "a text of the user's"
    assert find_renaming(dump(frozenset((1, 2)), 2), dump(frozenset((1, 3)), 2), ids) is None
    for one, other in ((1, 1.0), (1, True), ("1", b"1"), (0.0, -0.0), ([1], (1,))):
        assert find_renaming(dump(one), dump(other), ids) is None
    assert find_renaming(dump(1), b"no pickle", ids) is None


@pytest.mark.more
def test_processes_that_run_one_spec_have_one_digest(tmp_path: Path) -> None:
    """Whose classes have other ids, whose sets another order, and which have other limits."""
    spec = tmp_path / "spec.py"
    spec.write_text(SPEC)

    def submit(seed: int, *settings: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", SUBMIT, str(spec), str(tmp_path / "run"), str(seed), *settings],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()[-1]

    assert submit(1) == submit(2) != submit(3, "epochs=2")
