"""A declaration that cannot be run is refused in one line that says what, where and what would be valid."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from ensemble import Bootstrap, Ensemble, Folds, Member, Resources, Search, SpecError, integer, loguniform
from ensemble.spec.search_space import PROBES
from pipelines import Pipeline, sources, stages

AUGMENTED = Pipeline(sources.arrays(x=np.zeros((8, 3, 4, 4), np.uint8))).map(stages.random_crop("x", 4, padding=1))


def declared(**options: Any) -> Ensemble:
    train = Pipeline(sources.arrays(x=np.zeros((8, 2), np.float32)))
    usual = {"name": "spec", "recipe": len, "train": train, "members": [{"lr": 0.1}]}
    return Ensemble(**{**usual, **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epoch": 3}, "no option 'epoch'; did you mean 'epochs'"),
        (
            {"optimiser": "sgd"},
            "no option 'optimiser'; did you mean 'optimizer'? (help(ensemble.Ensemble) lists all ",
        ),
        ({"valid_every": 1}, "; did you mean 'validate_every' or 'valid'? (help(ensemble.Ensemble) lists all "),
        ({"qqqqq": 1}, "no option 'qqqqq' (help(ensemble.Ensemble) lists all "),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"epochs": 2.5}, "epochs must be an integer, got 2.5"),
        ({"epochs": True}, "epochs must be an integer"),
        ({"coverage": 0}, "coverage must be above 0, got 0"),
        ({"coverage": 1.0}, "coverage must be below 1, got 1.0"),
        ({"precision": "fp8"}, "(valid: fp32, bf16, fp16)"),
        ({"sharing": "none"}, "(valid: auto, node, single, multi, all, independent)"),
        ({"name": "a/b"}, "name must be a plain file name"),
        ({"name": " "}, "name must be a plain file name"),
        ({"name": 5}, "name must be a plain file name, got 5"),
        ({"members": 3}, "members must be a list of dicts or Members, got 3"),
        ({"members": []}, "members is empty"),
        ({"members": [{}, 7]}, "members[1] must be a dict of hyperparameters or a Member, got 7"),
        ({"members": [{}, Member({}, workers=0)]}, "members[1]: Resources.workers must be at least 1, got 0"),
        ({"members": None}, "exactly one of members= and search="),
        ({"search": Search({"lr": loguniform(0.1, 1.0)})}, "exactly one of members= and search="),
        ({"members": None, "search": {"lr": 1}}, "search must be Search("),
        ({"drop_last": "no"}, "drop_last must be True or False, got 'no'"),
        ({"drop_last": True, "batch_size": 9}, "an epoch of 8 samples has no whole batch of 9"),
        ({"train": None}, "train must be a pipelines.Pipeline or a function train(params) of one, got None"),
        ({"recipe": 1}, "recipe must be a Recipe or a function train(member), got 1"),
        (
            {"valid": AUGMENTED},
            "Ensemble.valid draws random numbers in its stage RandomCrop, but it is prepared once",
        ),
        ({"test": AUGMENTED}, "Ensemble.test draws random numbers in its stage RandomCrop"),
        ({"hang_timeout_s": 0}, "hang_timeout_s must be above 0, got 0"),
        ({"stall_limit_s": 0}, "stall_limit_s must be above 0, got 0"),
        ({"stall_policy": "detatch"}, "stall_policy cannot be 'detatch'; did you mean 'detach'"),
        ({"resources": {"workers": 2}}, "resources must be Resources(...)"),
        ({"weights": "bootstap"}, "weights cannot be 'bootstap'; did you mean 'bootstrap'"),
        ({"weights": 5}, "weights must be 'balanced', 'bootstrap', 'uniform', Bootstrap(...), Folds(...) or"),
        ({"weights": Folds(9)}, "members[0]: Folds.k must be at most the number of training samples, 8, got 9"),
        ({"members": None, "search": Search({"lr": 1}), "weights": Folds(9)}, "Folds.k must be at most"),
    ],
)
def test_a_mistake_is_named_with_what_would_be_valid(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        declared(**options)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_numpy_integers_are_integers() -> None:
    made = declared(
        epochs=np.int64(3),
        batch_size=np.int32(4),
        seed=np.uint8(7),
        resources=Resources(workers=np.int64(2), cpus_per_worker=np.float32(0.5)),  # type: ignore[arg-type]
        members=[Member({"lr": 0.1}, epochs=np.int16(2)), {"lr": 0.2}],
    )
    identities = [made.identify(number).as_dict() for number in range(2)]
    assert [(one["epochs"], one["seed"], one["workers"]) for one in identities] == [(2, 7, 2), (3, 8, 2)]
    assert json.loads(json.dumps(identities)) == identities
    with pytest.raises(SpecError, match=r"epochs must be an integer, got 2\.0"):
        declared(epochs=np.float64(2.0))
    with pytest.raises(SpecError, match="epochs must be an integer, got True"):
        declared(epochs=np.bool_(True))


def test_members_override_the_defaults_and_have_seeds_of_their_own() -> None:
    made = declared(
        members=[{"w": 1}, Member({"w": 2}, workers=2, precision="fp16", seed=99)],
        seed=10,
        precision="bf16",
        resources=Resources(threads=3, cpus_per_worker=0.5),
    )
    first, second = made.identify(0), made.identify(1)
    assert (first.member, first.seed, first.workers, first.precision, first.threads) == (
        "member-0",
        10,
        1,
        "bf16",
        3,
    )
    assert (second.seed, second.workers, second.precision, second.cpus_per_worker) == (99, 2, "fp16", 0.5)
    assert first.first_epoch == second.first_epoch == 0


def test_a_declaration_cannot_be_changed_afterwards() -> None:
    with pytest.raises(AttributeError):
        declared().epochs = 7  # type: ignore[misc]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Folds(1), "Folds.k must be at least 2, got 1"),
        (lambda: Folds(3, held_out=3), "Folds.held_out must be below k, which is 3, got 3"),
        (lambda: Folds(3, seed=-1), "Folds.seed must be at least 0"),
        (lambda: Folds(), "Folds: missing 1 required positional argument: 'k'"),
        (lambda: Bootstrap(seed=0.5), "Bootstrap.seed must be an integer"),
        (lambda: Member(weights="folds"), "Member.weights cannot be 'folds'"),
        (lambda: loguniform(0, 1), "loguniform(0, 1): both ends must be above 0"),
        (lambda: integer(3, 2), "integer(3, 2): the first end must be at most the second"),
    ],
)
def test_weights_and_intervals_that_cannot_be_are_refused(made: Any, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        made()
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_members_number_decides_its_weights_unless_it_says_otherwise() -> None:
    members = [{}, {}, {}, Member(weights="uniform"), Member(weights=Bootstrap(7)), Member(weights=Folds(2, 1, 9))]
    made = declared(members=members, seed=10, weights=Folds(2))
    recorded = [made.identify(number).weights for number in range(6)]
    assert recorded == [
        {"kind": "fold", "k": 2, "held_out": 0, "seed": 10},
        {"kind": "fold", "k": 2, "held_out": 1, "seed": 10},
        {"kind": "fold", "k": 2, "held_out": 0, "seed": 10},
        None,
        {"kind": "bootstrap", "seed": 7},
        {"kind": "fold", "k": 2, "held_out": 1, "seed": 9},
    ]
    bagged = declared(members=[{}, {}], seed=10, weights="bootstrap")
    assert [bagged.identify(n).weights for n in (0, 1)] == [{"kind": "bootstrap", "seed": s} for s in (10, 11)]
    assert declared().identify(0).weights is None


@dataclass(frozen=True)
class Patient(Member):
    """A member with a field of the user's, of which None is no default."""

    patience: int | None = 5


@pytest.mark.parametrize("member", [Member({"lr": 0.1}, epochs=3), Patient({"lr": 0.1}, patience=None), Patient()])
def test_a_copied_member_is_the_same(member: Member) -> None:
    for copied in (pickle.loads(pickle.dumps(member)), copy.deepcopy(member)):
        assert copied == member and repr(copied) == repr(member)


def test_a_space_is_drawn_once_and_a_small_data_set_is_warned_of_once() -> None:
    drawn = []

    def space(trial: Any) -> dict[str, Any]:
        drawn.append(trial)
        return {"lr": trial.suggest_float("lr", 0.1, 1.0), "batch_size": trial.suggest_categorical("b", [4, 32])}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        replace(declared(members=None, search=Search(space)), epochs=2)
    assert len(drawn) < 2 * PROBES
    (warning,) = caught
    assert "batch_size is 32, more than the 8 training samples" in str(warning.message)
