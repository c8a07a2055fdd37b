"""Functions of a Recipe that cannot be called as they are, and parts of torch in their place, are refused."""

from __future__ import annotations

from typing import Any

import pytest
from test_spec_options import declare

from ensemble import Member, Recipe
from ensemble.spec import SpecError

torch = pytest.importorskip("torch")
nn, optim, functional = torch.nn, torch.optim, torch.nn.functional


class Net(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": Net()}, r"model=lambda params: Net\(...\), which builds a new one for each member"),
        ({"model": nn.Linear(2, 2)}, r"model=lambda params: Linear\("),
        ({"model": lambda: Net()}, r"Recipe.model is called as model\(params\), and .*too many positional"),
        ({"model": Net}, r"called as model\(params\)"),
        (
            {"loss": nn.CrossEntropyLoss()},
            r"write loss='cross_entropy', or lambda .*CrossEntropyLoss\(..., reduction",
        ),
        ({"loss": nn.CrossEntropyLoss}, "write loss='cross_entropy'"),
        (
            {"loss": functional.mse_loss},
            r"write loss='mse', or .*mse_loss\(model\(batch\['x'\]\), .*reduction='none'",
        ),
        ({"loss": nn.KLDivLoss()}, r"write loss=lambda model, batch: KLDivLoss\(..., reduction='none'\)\(model"),
        ({"loss": lambda batch: batch}, r"called as loss\(model, batch\)"),
        ({"optimizer": optim.Adam}, r"torch.optim.Adam\(model.parameters\(\), lr=params\['lr'\]\)"),
        ({"optimizer": optim.SGD(Net().parameters(), lr=0.1)}, r"torch.optim.SGD\(model.parameters"),
        ({"schedule": optim.lr_scheduler.OneCycleLR}, r"lr_scheduler.OneCycleLR\(optimizer, ...\)"),
        ({"metrics": lambda outputs: {}}, r"called as metrics\(outputs, batch\)"),
    ],
)
def test_what_cannot_be_called_is_refused_with_the_line_to_write(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        Recipe(**{"model": lambda params: Net(), "loss": "mse", **given})
    assert "\n" not in str(caught.value)


def test_functions_with_more_arguments_of_their_own_are_taken() -> None:
    Recipe(
        model=lambda params, width=8: Net(),
        loss=lambda *given: None,
        schedule=lambda optimizer, params, steps, *, steps_per_epoch: None,
    )
    with pytest.raises(SpecError, match=r"Ensemble.recipe is called as train\(member\)"):
        declare(recipe=lambda: None)


def test_a_member_has_no_name() -> None:
    with pytest.raises(SpecError, match=r"Member has no option 'name': .* {'name': 'wide'}"):
        Member({}, name="wide")  # type: ignore[call-arg]
