"""The words of a declaration: optimizer=, schedule=, compression=, communicator=, loss_scale=, accumulate=."""

from __future__ import annotations

from typing import Any

import pytest

from ensemble.spec import Ensemble, Member, Recipe, Search, SpecError, choice
from ensemble.spec.options import COMPRESSIONS, OPTIMIZERS, resolve


class Data:
    def __len__(self) -> int:
        return 100

    def loader(self) -> None: ...


def declare(**options: Any) -> Ensemble:
    recipe = options.pop("recipe", Recipe(model=dict, loss=dict, task="classification"))
    options.setdefault("members", [{"lr": 0.1}])
    return Ensemble(name="e", recipe=recipe, train=Data(), **options)  # type: ignore[arg-type]


def test_a_word_is_recorded_with_all_its_options() -> None:
    identity = declare(optimizer={"name": "lars", "momentum": 0.95}, compression="qsgd4").identify(0)
    assert identity.optimizer == {**resolve("", "lars", OPTIMIZERS), "momentum": 0.95}
    assert identity.optimizer["trust"] == 0.001
    assert identity.compression == {
        "name": "qsgd4",
        "bucket": 512,
        "norm": "max",
        "error_feedback": False,
        "min_size": 10_000,
    }


def test_words_that_change_nothing_leave_no_trace() -> None:
    identity = declare(compression="none", communicator="torch").identify(0)
    assert (identity.compression, identity.communicator, identity.optimizer) == (None, None, None)
    assert (identity.loss_scale, identity.accumulate) == ("dynamic", 1)


def test_a_member_departs_from_the_ensembles_words() -> None:
    members = [
        Member({"lr": 1}),
        Member({"lr": 1}, compression="none", accumulate=4, loss_scale=128.0, precision="fp16"),
    ]
    ensemble = declare(members=members, compression="onebit")
    first, second = ensemble.identify(0), ensemble.identify(1)
    assert first.compression is not None and first.compression["name"] == "onebit"
    assert (second.compression, second.accumulate, second.loss_scale) == (None, 4, 128.0)


def test_every_default_is_valid() -> None:
    for name in COMPRESSIONS:
        assert resolve("c", resolve("c", name, COMPRESSIONS), COMPRESSIONS) == resolve("c", name, COMPRESSIONS)


def test_a_search_may_propose_the_learning_rate() -> None:
    ensemble = declare(members=None, search=Search({"lr": choice(0.1, 0.2)}, trials=2), optimizer="sgd")
    assert ensemble.identify(0, {"lr": 0.2}).optimizer is not None


@pytest.mark.parametrize("values", [[8, 16], (8, 16)])
def test_a_list_in_a_search_is_answered_with_choice(values: Any) -> None:
    with pytest.raises(SpecError, match=r"Search.space\['width'\] is .*: choice\(8, 16\) tries each of them"):
        Search({"width": values, "lr": choice(0.1, 0.2)}, trials=2)
    assert choice([8, 16]) == choice((8, 16)) == choice(8, 16)


def test_l2_norm_takes_error_feedback_where_residuals_stay_small() -> None:
    declare(compression={"name": "qsgd8", "norm": "l2", "error_feedback": True})
