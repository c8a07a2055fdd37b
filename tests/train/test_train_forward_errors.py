"""What is said where a model or a loss does not fit the batch, and that such a member is not tried again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ensemble
from ensemble import Ensemble, Recipe
from ensemble.train.forward_errors import explain_forward_error, is_repeatable
from pipelines import Pipeline, sources
from pipelines.errors import FieldError
from pipelines.loader.batch import Batch

N = 16


class Net(nn.Module):
    """A model with an error in its own forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).view(3, 4)  # type: ignore[no-any-return]


def batch(**fields: torch.Tensor) -> Batch:
    given = {"x": torch.rand(N, 8), "label": torch.arange(N) % 4, "index": torch.arange(N), **fields}
    return Batch(given, epoch=0, step=0, global_size=N)


def cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def error_of(model: nn.Module, given: Batch, loss: Callable[..., Any] = cross_entropy) -> Exception:
    with pytest.raises(Exception) as caught:
        loss(model, given)
    return caught.value


@pytest.mark.parametrize(
    ("model", "fields", "said"),
    [
        (
            nn.Sequential(nn.Linear(9, 16), nn.ReLU()),
            {},
            "the layer '0', Linear(in_features=9, out_features=16, bias=True), expects [..., 9] float32 and was "
            "given [16, 8] float32, the field 'x' of Ensemble.train; in_features=8 would fit",
        ),
        (
            nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(17, 4))),
            {},
            "Linear(in_features=17, out_features=4, bias=True), expects [..., 17] float32 and was "
            "given [16, 16] float32, where the batch of Ensemble.train has 'x' [16, 8] float32, 'label' [16] "
            "int64, 'index' [16] int64; in_features=16 would fit",
        ),
        (
            nn.Linear(8, 4),
            {"x": torch.zeros(N, 8, dtype=torch.uint8)},
            "Linear(in_features=8, out_features=4, bias=True).forward expects [..., 8] float32 and was given "
            "[16, 8] uint8, the field 'x' of Ensemble.train; let a stage return 'x' as float32",
        ),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3)),
            {"x": torch.zeros(N, 1, 8, 8)},
            "the layer '0', Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1)), expects [b, 3, h, w] float32 and was "
            "given [16, 1, 8, 8] float32, the field 'x' of Ensemble.train; in_channels=1 would fit",
        ),
        (
            nn.Sequential(nn.BatchNorm1d(9)),
            {},
            "expects [b, 9, ...] float32 and was given [16, 8] float32, the field 'x' of Ensemble.train; "
            "num_features=8 would fit",
        ),
        (
            nn.Sequential(nn.Embedding(5, 2)),
            {},
            "the layer '0', Embedding(5, 2), expects integers of 0 ... 4 and was given [16, 8] float32, the field",
        ),
        (
            nn.Sequential(nn.Embedding(5, 2)),
            {"x": torch.arange(N * 8).reshape(N, 8)},
            "Embedding(5, 2), expects integers of 0 ... 4 (they are 0 ... 127) and was given [16, 8] int64, the "
            "field 'x' of Ensemble.train",
        ),
        (nn.LSTM(9, 2), {}, "LSTM(9, 2).forward expects [steps, b, 9] float32 and was given [16, 1, 8] float32"),
        (Net(), {}, "Net.forward was given [16, 8] float32, the field 'x' of Ensemble.train"),
        (
            nn.Linear(8, 4),
            {"label": torch.zeros(N, dtype=torch.float64)},
            "cross_entropy expects a target of classes, [16] int64, and was given input [16, 4] float32, target "
            "[16] float64, the field 'label' of Ensemble.train; let a stage return 'label' so",
        ),
        (
            nn.Linear(8, 4),
            {"label": torch.zeros(N, 1, dtype=torch.int64)},
            "cross_entropy expects a target of classes, [16] int64, and was given input [16, 4] float32, target",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_layer_and_the_field_are_named(model: nn.Module, fields: dict[str, torch.Tensor], said: str) -> None:
    error = error_of(model, batch(**fields))
    assert said in str(explain_forward_error(error))
    assert is_repeatable(error)


def test_of_what_was_raised_elsewhere_nothing_is_said() -> None:
    def read(model: nn.Module, batch: Batch) -> None:
        (Path(__file__).parent / "no such file").read_bytes()

    error = error_of(nn.Linear(8, 4), batch(), read)
    assert explain_forward_error(error) is None and not is_repeatable(error)
    assert not is_repeatable(RuntimeError("CUDA error: an illegal memory access of size 4")), (
        "a device may recover"
    )


def test_a_misspelt_field_is_answered_with_the_fields() -> None:
    with pytest.raises(FieldError) as caught:
        batch()["lable"]
    assert str(caught.value) == "the batch has no field 'lable'; did you mean 'label'? (valid: x, label, index)"
    assert batch().get("lable") is None and "lable" not in batch()


def test_a_named_loss_names_the_field_of_a_target_that_does_not_fit() -> None:
    of = Recipe(model=len, loss="cross_entropy", inputs="x")
    error = error_of(nn.Linear(8, 4), batch(label=torch.zeros(N)), of.loss)
    assert "the target is float32, and classes are integers: return int64" in str(error)
    assert str(error).endswith("(the target is the field 'label')")


def declared(recipe: Any, width: int = 8) -> Ensemble:
    rng = np.random.default_rng(0)
    data = Pipeline(sources.arrays(x=rng.random((N, width), np.float32), label=rng.integers(0, 4, N)))
    return Ensemble(name="m", recipe=recipe, members=[{"lr": 0.1, "widht": 4}], train=data, epochs=2, batch_size=8)


def own_loop(member: Any) -> None:
    model = nn.Linear(9, 4)
    model, _ = member.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in member.epochs():
        for each in member.batches():
            member.backward(cross_entropy(model, each))
            member.step()
        member.report(accuracy=0.5)


def fails_later(member: Any) -> None:
    model = nn.Linear(8, 4)
    model, _ = member.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in member.epochs():
        for number, each in enumerate(member.batches()):
            member.backward(cross_entropy(model, each if number == 0 else batch(x=torch.rand(N, 9))))
            member.step()


@pytest.mark.parametrize(
    ("recipe", "attempts", "said"),
    [
        (
            Recipe(model=lambda params: nn.Linear(9, 4), loss="cross_entropy"),
            1,
            "in_features=8 would fit (in the first",
        ),
        (own_loop, 1, "expects [..., 9] float32 and was given [8, 8] float32, the field 'x' of Ensemble.train"),
        (fails_later, 2, "mat1 and mat2 shapes cannot be multiplied"),
        (
            Recipe(model=lambda params: nn.Linear(8, params["width"]), loss="cross_entropy"),
            1,
            "that the member does not have, 'width'; did you mean 'widht'? (valid: lr, widht)",
        ),
        (
            Recipe(model=lambda params: nn.Linear(8, 4), loss=lambda m, b: m(b["y"])),
            1,
            "the batch has no field 'y'",
        ),
    ],
    ids=["recipe", "train function", "a later step", "a hyperparameter", "a field"],
)
def test_what_fails_in_the_first_step_is_not_tried_again(
    recipe: Any, attempts: int, said: str, tmp_path: Path
) -> None:
    result = ensemble.submit(declared(recipe), tmp_path, "inline").wait()
    (row,) = result.members
    assert (row["state"], row["attempts"]) == ("failed", attempts)
    assert said in row["error"]
