"""Objects that are no tensors are in checkpoints as pickles, which nobody else's checkpoint has read."""

from __future__ import annotations

import threading
from datetime import timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ensemble.store import RunDir, load_checkpoint, save_checkpoint
from ensemble.train.job import TrainingError
from ensemble.train.own_states import OwnStates


class Holder:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def save(path: Path, state: Any) -> dict[str, Any]:
    own = OwnStates()
    own.add("trainer", Holder(state))
    save_checkpoint(path, {"own": own.state_dict()})
    loaded: dict[str, Any] = load_checkpoint(path)["own"]
    return loaded


def test_an_object_comes_back_with_its_tensors(tmp_path: Path) -> None:
    scale = torch.nn.Linear(2, 2)
    state = {"by": (Fraction(1, 3), [timedelta(3)]), "scale": partial(torch.add, torch.ones(3)), "layer": scale}
    saved, held = save(tmp_path / "c", state), Holder(None)
    own = OwnStates()
    own.load(saved, lambda: None)
    own.add("trainer", held)
    assert held.state["by"] == state["by"]
    assert torch.equal(held.state["scale"](torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(held.state["layer"].weight, scale.weight)


def test_what_cannot_be_pickled_is_named_by_its_place_and_by_the_hook_that_may_have_added_it() -> None:
    own, state = OwnStates(), dict[str, Any]()
    own.add("lightning", Holder({"taken": state}))
    state["lock"] = [threading.Lock()]
    says = r"lightning\.taken\.lock\.0, a lock .*on_save_checkpoint"
    with pytest.raises(TrainingError, match=says):
        own.state_dict()
    with pytest.raises(
        TrainingError, match=says
    ):  # before anything is trained, where the object has a state by then
        OwnStates().add("lightning", Holder({"taken": state}))


def test_a_checkpoint_that_others_could_have_written_is_not_unpickled(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    file = run.member("member-0") / "c"
    saved, held = save(file, {"by": Fraction(1, 3)}), Holder(None)
    own = OwnStates()
    own.add("trainer", held)
    file.chmod(0o666)
    with pytest.raises(TrainingError, match=r"can be written by everyone.*resume the run where it was trained"):
        own.load(saved, partial(run.check_owners, file))
    assert held.state is None
    file.chmod(0o600)
    own.load(saved, partial(run.check_owners, file))
    assert held.state == {"by": Fraction(1, 3)}
