"""The words of a declaration: optimizer=, schedule=, compression=, communicator=, loss_scale=, accumulate=."""

from __future__ import annotations

from typing import Any

import pytest

from ensemble.spec import Ensemble, Member, Recipe, Search, SpecError, choice, uniform
from ensemble.spec.options import COMPRESSIONS, OPTIMIZERS, resolve


class Data:
    """A pipeline as a declaration knows it: something with a length and a loader."""

    def __len__(self) -> int:
        return 100

    def loader(self) -> None: ...


def declare(**options: Any) -> Ensemble:
    recipe = options.pop("recipe", Recipe(model=dict, loss=dict))
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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"optimizer": "lasr"}, "did you mean 'lars'? (valid: sgd, adam, adamw, lars)"),
        ({"optimizer": {"name": "lars", "beta": 1}}, "'lars' has no option 'beta'"),
        ({"optimizer": {"momentum": 0.9}}, "Ensemble.optimizer needs a 'name'"),
        ({"optimizer": {"name": "sgd", "momentum": 1.5}}, "Ensemble.optimizer['momentum'] must be below 1"),
        ({"optimizer": {"name": "adam", "betas": [0.9]}}, "must be a list of 2 numbers"),
        ({"compression": "qsgd5"}, "valid: none, fp16, bf16, qsgd2"),
        ({"compression": {"name": "qsgd4", "norm": "l1"}}, "Ensemble.compression['norm'] cannot be 'l1'"),
        ({"compression": {"name": "none", "bucket": 1}}, "'none' has no options, got 'bucket'"),
        ({"compression": {"name": "qsgd4", "bucket": 100}}, "must be a power of two from 32 to 65536, got 100"),
        ({"compression": 4}, "Ensemble.compression must be a name (none, fp16,"),
        ({"optimizer": len}, "a function goes into the Recipe"),
        ({"optimizer": "adamW"}, "did you mean 'adamw'?"),
        ({"schedule": "step", "members": [{"gamma": -1}]}, "members[0]: schedule['gamma'] must be above 0"),
        (
            {"members": None, "search": Search({"momentum": uniform(0.5, 2.0)}, trials=1), "optimizer": "lars"},
            "Search.space: optimizer['momentum'] must be below 1",
        ),
        (
            {"members": None, "search": Search({"momentum": uniform(0.5, 0.9)}, trials=1), "optimizer": "lars"},
            "Search.space: the optimizer 'lars' needs lr",
        ),
        ({"members": [{"lr": "fast"}]}, "members[0]: optimizer['lr'] must be a number, got 'fast'"),
        ({"communicator": "mpi"}, "valid: torch, horovod, hierarchical, hybrid"),
        ({"communicator": {"name": "hybrid", "bucket_bytes": "big"}}, "must be an integer or 'auto'"),
        ({"schedule": {"name": "cosine", "end": 2}}, "Ensemble.schedule['end'] must be below 1"),
        ({"loss_scale": 0}, "Ensemble.loss_scale must be above 0"),
        ({"loss_scale": "static"}, "Ensemble.loss_scale must be 'dynamic' or a number above 0"),
        ({"accumulate": 0}, "Ensemble.accumulate must be at least 1"),
        ({"optimizer": "sgd", "members": [{}]}, "members[0]: the optimizer 'sgd' needs lr"),
        ({"optimizer": {"name": "adam", "betas": [0.9, 1.5]}}, "Ensemble.optimizer['betas'][1] must be below 1"),
        ({"optimizer": {"name": "sgd", "nesterov": True}}, "nesterov=True needs a momentum"),
        ({"schedule": {"name": "step", "every_epochs": 2, "milestones": [3]}}, "not both"),
        ({"schedule": {"name": "cosine", "warmup_epochs": 3}, "epochs": 2}, "but the member trains for 2 epochs"),
        ({"precision": "fp32", "loss_scale": 128.0}, "not for fp32"),
        ({"compression": {"name": "qsgd4", "norm": "l2", "error_feedback": True}}, "grows without bound"),
        ({"members": [{"lr": 1}, Member({"lr": 1})], "optimizer": "sgd", "recipe": len}, "is for a Recipe"),
        ({"optimizer": "sgd", "recipe": Recipe(model=dict, loss=dict, optimizer=dict)}, "not both"),
        (
            {
                "members": None,
                "search": Search({"lr": choice(1, 2)}, trials=1),
                "schedule": "step",
                "recipe": Recipe(model=dict, loss=dict, schedule=dict),
            },
            "not both",
        ),
    ],
)
def test_a_mistake_is_one_line_that_says_what_is_valid(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as error:
        declare(**options)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_members_mistake_is_refused_when_it_is_made() -> None:
    with pytest.raises(SpecError, match=r"Member.compression cannot be 'zip'"):
        Member({}, compression="zip")


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


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: declare(workers=2), r"resources=Resources\(workers=...\) or Member\(workers=...\) in members="),
        (
            lambda: declare(split_metrics=["f1_macro"]),
            r"'split_metrics'; give it as recipe=Recipe\(split_metrics=...\)$",
        ),
        (lambda: declare(patience=3), r"EarlyStopping\(patience=...\)$"),
        (
            lambda: Search({"lr": choice(0.1, 0.2)}, epochs=3),
            r"Search .* 'epochs'; give it as Member\(epochs=...\) or ",
        ),
    ],
)
def test_an_option_of_another_class_is_answered_with_that_class(make: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        make()


def test_l2_norm_takes_error_feedback_where_residuals_stay_small() -> None:
    declare(compression={"name": "qsgd8", "norm": "l2", "error_feedback": True})
