"""A model that is handed out is the one that was trained: its state outside the state_dict, and what checks it."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import ensemble
from ensemble import Ensemble, Recipe
from ensemble.combine import CombineError
from ensemble.inspection import load_predictions
from ensemble.store import RunDir, read_state
from pipelines import Pipeline, sources

X = np.random.default_rng(0).standard_normal((64, 2)).astype(np.float32)
Y = (X[:, 0] * X[:, 1] > 0).astype(np.int64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 2)
        self.draw()

    def draw(self) -> None:
        self.frequencies = torch.randn(2, 16)

    def find(self) -> Tensor:
        return self.frequencies

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sin(3 * x @ self.find()))


class FromNumpy(Net):
    def draw(self) -> None:
        self.frequencies = np.random.randn(2, 16).astype(np.float32)

    def find(self) -> Tensor:
        return torch.from_numpy(self.frequencies)


class FromPython(Net):
    """Of plain numbers, which are no tensors: only the seed makes them again."""

    def draw(self) -> None:
        self.frequencies = [[random.gauss(0, 1) for _ in range(16)] for _ in range(2)]  # type: ignore[assignment]

    def find(self) -> Tensor:
        return torch.tensor(self.frequencies)


class FromOwnGenerator(Net):
    def draw(self) -> None:
        drawn = np.random.default_rng().standard_normal((2, 16))
        self.held = {"of": [torch.from_numpy(drawn).float()], "layers": [nn.Linear(2, 2)]}

    def find(self) -> Tensor:
        return self.held["of"][0]  # type: ignore[no-any-return]


class NotPersistent(Net):
    def draw(self) -> None:
        self.register_buffer(
            "frequencies", torch.randn(2, 16, generator=torch.Generator().manual_seed(id(self))), persistent=False
        )


class MovedInTraining(Net):
    """A plain attribute that training changes."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.frequencies = self.frequencies * 1.05
        return super().forward(x)


class Tied(Net):
    """Layers that are made at the first call, and two with one weight."""

    def draw(self) -> None:
        self.lazy, self.one, self.two = nn.LazyLinear(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(self.lazy(x)).relu()).relu())


class UnknownNumbers(Net):
    """Nothing says what they were: not a seed, and no tensor."""

    def draw(self) -> None:
        own = random.Random()
        self.numbers = [[own.gauss(0, 1) for _ in range(16)] for _ in range(2)]

    def find(self) -> Tensor:
        return torch.tensor(self.numbers)


class Jittered(UnknownNumbers):
    """A prediction that is drawn is no sign of another model."""

    def draw(self) -> None:
        self.frequencies = torch.randn(2, 16)

    def find(self) -> Tensor:
        return self.frequencies + 0.1 * torch.randn(2, 16)


class WithBuffers(nn.Module):
    """Layers whose buffers have a meaning of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = spectral_norm(nn.Linear(2, 16)), nn.BatchNorm1d(16)
        self.two = weight_norm(nn.Linear(16, 2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("highest", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.one(x))
        if self.training:
            self.steps += 1
            self.highest = torch.maximum(self.highest, hidden.detach().amax(dim=0))
        return self.two(hidden.relu() / (1 + self.highest))


def declare(model: Any, **options: Any) -> Ensemble:
    data = Pipeline(sources.arrays(x=X, label=Y), seed=1)
    recipe = Recipe(
        model=lambda params: model(),
        loss=lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none"),
        optimizer=lambda model, params: torch.optim.Adam(model.parameters(), 0.02),
    )
    chosen: dict[str, Any] = {"members": [{}, {}], "epochs": 3, "batch_size": 16, **options}
    return Ensemble(name="same", recipe=recipe, train=data, valid=data, **chosen)


def train(path: Path, declared: Ensemble, executor: str = "inline") -> Any:
    return ensemble.submit(declared, path, executor).wait()


@pytest.mark.parametrize(
    "model", [Net, FromNumpy, FromPython, FromOwnGenerator, NotPersistent, MovedInTraining, Tied]
)
def test_state_that_is_in_no_state_dict_is_that_of_training(model: type[Net], tmp_path: Path) -> None:
    train(tmp_path / "run", declare(model))
    (tmp_path / "run").rename(tmp_path / "moved")
    loaded = ensemble.load(tmp_path / "moved")
    for name in loaded.member_ids:
        saved = load_predictions(tmp_path / "moved", "valid", name).values
        found = loaded.calls[name].compute_values(loaded.members[name], {"x": torch.from_numpy(X)})
        np.testing.assert_allclose(found, saved, atol=1e-5)


def test_a_model_that_predicts_something_else_is_not_handed_out(tmp_path: Path) -> None:
    train(tmp_path / "run", declare(UnknownNumbers))
    wanted = r"member-\d cannot be loaded as it was trained.*4 samples of validation data.*generator of its own"
    with pytest.raises(CombineError, match=wanted):
        ensemble.load(tmp_path / "run")
    with pytest.raises(CombineError, match=wanted):
        ensemble.export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    ended = train(tmp_path / "run", declare(UnknownNumbers, epochs=3, retries=0))
    assert [member["state"] for member in ended.members] == ["finished", "finished"]


def test_tensors_that_cannot_be_made_again_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ensemble.train.lifecycle.copy_loose", lambda model, most: {})  # as if they were too large
    train(tmp_path, declare(FromOwnGenerator))
    with pytest.raises(CombineError, match=r"not in its state_dict: held\['of'\]\[0\], held\['layers'\]"):
        ensemble.load(tmp_path)


def test_a_model_that_draws_its_predictions_is_loaded(tmp_path: Path) -> None:
    train(tmp_path, declare(Jittered))
    assert ensemble.load(tmp_path)({"x": torch.from_numpy(X)}).shape == (64, 2)


@pytest.mark.parametrize(
    "options", [{"averaging": "ema"}, {"averaging": ensemble.SWA(1)}, {"keep": "best", "objective": "loss"}]
)
def test_the_weights_that_count_are_those_that_answer(options: dict[str, Any], tmp_path: Path) -> None:
    """The checkpoint has others than those in training, and its buffers; a resume goes on from it, and loads."""
    train(tmp_path, declare(WithBuffers, **options))
    loaded = ensemble.load(tmp_path)
    before = loaded({"x": torch.from_numpy(X)})
    if "averaging" in options:  # none is averaged, nor counts the pass for statistics of the averages
        assert {int(member.steps) for member in loaded.members.values()} == {3 * 4}
    ensemble.resume(tmp_path, epochs=5, executor="inline").wait()
    after = ensemble.load(tmp_path)({"x": torch.from_numpy(X)})
    assert before.shape == after.shape and not torch.equal(before, after)


def test_a_member_does_not_go_on_as_another_model(tmp_path: Path) -> None:
    train(tmp_path, declare(UnknownNumbers))
    ensemble.resume(tmp_path, epochs=5, executor="inline").wait()
    members = read_state(RunDir(tmp_path).events).members.values()
    assert all("cannot go on from its checkpoint: its predictions of 4" in str(one.unextended) for one in members)


BACKBONE = nn.Linear(2, 16)


def share(trains: bool) -> Any:
    def model() -> nn.Module:
        BACKBONE.requires_grad_(trains)
        return nn.Sequential(BACKBONE, nn.ReLU(), nn.Linear(16, 2))

    return model


def test_members_share_no_parameter_that_trains(tmp_path: Path) -> None:
    ended = train(tmp_path / "shared", declare(share(trains=True)))
    assert all("0.weight and 1 more: all members would train" in each["error"] for each in ended.members)
    assert all(each["attempts"] == 1 for each in ended.members)
    ended = train(tmp_path / "frozen", declare(share(trains=False)))
    assert [member["state"] for member in ended.members] == ["finished", "finished"]
    ensemble.load(tmp_path / "frozen")
    looked = ensemble.dry_run(declare(share(trains=True)), tmp_path / "dry", "inline")
    assert "0.weight and 1 more" in looked.members[0]["error"]


def test_loaded_members_are_built_apart(tmp_path: Path) -> None:
    """Each process of a run made its own; one process that loads has one for all."""
    train(tmp_path, declare(remembered), "local")
    loaded = ensemble.load(tmp_path, combine="average")
    one, two = (loaded.members[name][0].weight for name in ("member-0", "member-1"))
    assert one.data_ptr() != two.data_ptr() and not torch.equal(one, two)


@functools.cache
def remember() -> nn.Module:
    return nn.Linear(2, 16)


def remembered() -> nn.Module:
    return nn.Sequential(remember(), nn.ReLU(), nn.Linear(16, 2))


@pytest.mark.parametrize("batch", [torch.zeros(3, 5), torch.zeros(3, 2, dtype=torch.float64)])
def test_a_batch_of_another_shape_or_type_is_explained_as_in_training(batch: Tensor, tmp_path: Path) -> None:
    train(tmp_path, declare(remembered, members=[{}], epochs=1))
    remember.cache_clear()
    says = r"cannot predict this batch: in Linear.*, where the batch has 'x' \[3, "
    with pytest.raises(CombineError, match=says):
        ensemble.load(tmp_path)({"x": batch})
