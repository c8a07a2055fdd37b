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

from ensemble import Bootstrap, Ensemble, Folds, Member, Resources, Search, SpecError
from ensemble.spec.search_space import PROBES
from pipelines import Pipeline, sources, stages

AUGMENTED = Pipeline(sources.arrays(x=np.zeros((8, 3, 4, 4), np.uint8))).map(stages.random_crop("x", 4, padding=1))


def declared(**options: Any) -> Ensemble:
    train = Pipeline(sources.arrays(x=np.zeros((8, 2), np.float32)))
    usual = {"name": "spec", "recipe": len, "train": train, "members": [{"lr": 0.1}]}
    return Ensemble(**{**usual, **options})


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
