"""What is said where a model or a loss does not fit the batch, and that such a member is not tried again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ensemble.train.forward_errors import explain_forward_error, is_repeatable
from pipelines.loader.batch import Batch

N = 16


class Net(nn.Module):
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
            nn.Sequential(nn.Linear(8, 16), nn.Linear(17, 4)),
            {},
            "in Linear(in_features=17, out_features=4, bias=True), where the batch has 'x' [16, 8] float32, "
            "'label' [16] int64, 'index' [16] int64",
        ),
        (nn.Linear(8, 4), {"x": torch.zeros(N, 8, dtype=torch.uint8)}, "in Linear("),
        (nn.LSTM(9, 2), {}, "in LSTM(9, 2), where the batch has"),
        (Net(), {}, "in Net("),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_layer_and_the_fields_are_named(model: nn.Module, fields: dict[str, torch.Tensor], said: str) -> None:
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
