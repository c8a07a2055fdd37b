"""A model that is handed out is the one that was trained: its state outside the state_dict, and what checks it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import ensemble  # noqa: E402
from ensemble import Ensemble, Member, Recipe  # noqa: E402
from ensemble.combine import CombineError  # noqa: E402
from ensemble.inspection import load_predictions  # noqa: E402
from pipelines import Pipeline, sources  # noqa: E402

X = np.random.default_rng(0).standard_normal((64, 2)).astype(np.float32)
Y = (X[:, 0] * X[:, 1] > 0).astype(np.int64)


class Net(nn.Module):
    """A head on features that `frequencies` [2, 16] make; subclasses hold these in their own way."""

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
    train(tmp_path, declare(UnknownNumbers))
    with pytest.raises(CombineError, match="member-0 cannot be loaded as it was trained.*state_dict.*generator"):
        ensemble.load(tmp_path)
