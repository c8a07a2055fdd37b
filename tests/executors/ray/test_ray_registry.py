"""What runs of a cluster say of themselves to each other: rows that are kept, left out, and told apart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import ray
from ray_model import make_member

from ensemble.executors.ray import registry
from ensemble.executors.ray.cluster_model import ClusterModel
from ensemble.executors.ray.lease_manager import LeaseManager
from ensemble.executors.ray.registry import Registry, RunRow, decode_rows
from ensemble.executors.ray.request import Offer
from ensemble.executors.ray.sharing import Shared
from ensemble.schedule import Node
from ensemble.schedule.fairness import Amount, Holding, RunClaim, Want
from ensemble.spec import SpecError
from ensemble.spec.limits import apply_limits

ONE = Amount(1.0, 1.0, 1.0)
HOLDS = {"holdings": [{"id": "1", "parts": {"n": [1, 1, 1]}}], "wants": [{"parts": [[1, 1, 1]]}]}


class Actor:
    """The actor of the rows, in this process: it answers at once, or has ended."""

    def __init__(self) -> None:
        self.rows: dict[str, bytes] = {}
        self.is_gone = False
        self.beat = SimpleNamespace(remote=self.answer)

    def answer(self, run: str, row: bytes | None) -> Any:
        if self.is_gone:
            return ray.exceptions.RayActorError()
        if row is None:
            self.rows.pop(run, None)
        else:
            self.rows[run] = row
        return [(0.0, each) for each in self.rows.values()]


class Runs:
    """Registries that beat in turn, each once a second."""

    def __init__(self, patch: pytest.MonkeyPatch, *names: str) -> None:
        self.now, self.actor = 0.0, Actor()
        patch.setattr(registry, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: 0.0))
        patch.setattr(registry, "_find_or_create", self.find)
        patch.setattr(ray, "wait", lambda calls, timeout: (calls, []))
        patch.setattr(ray, "get", self.get)
        self.known = [Registry("id", Path("/runs") / name) for name in names]

    def find(self) -> Actor:
        if self.actor.is_gone:
            self.actor = Actor()
        return self.actor

    def get(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def turn(self) -> list[set[str]]:
        """A second; of each, the names of the others that it knows then."""
        self.now += 1.0
        for each in self.known:
            each.beat(RunClaim(run=each.start))
        return [{row.name for row in each.list_others()} for each in self.known]


def test_runs_do_not_lose_sight_of_each_other_when_the_one_that_kept_the_rows_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = Runs(monkeypatch, "c", "b", "a")
    for _ in range(3):
        seen = runs.turn()
    assert seen == [{"a", "b"}, {"a", "c"}, {"b", "c"}]
    runs.actor.is_gone = True
    runs.known = runs.known[1:]
    assert all("a" in of_b and "b" in of_a for of_b, of_a in (runs.turn() for _ in range(10)))
    assert runs.turn() == [{"a"}, {"b"}], "who does not come back is forgotten"


def test_two_starts_of_one_run_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, "original", "copy")
    for _ in range(3):
        seen = runs.turn()
    assert seen == [{"copy"}, {"original"}]


def test_nothing_is_asked_for_before_it_is_known_who_else_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, "a")
    (run,) = runs.known
    assert run.is_due and run.is_blind
    run.beat(RunClaim(run=run.start))
    assert run.is_due and run.is_blind, "the first answer is looked for at once"
    run.beat(RunClaim(run=run.start))
    assert not run.is_due and not run.is_blind
    runs.actor.is_gone, runs.known = True, [Registry("id", Path("/runs/b"))]
    runs.now += registry._ANSWER_S
    assert not runs.known[0].is_blind, "without an answer it goes on"


def encode(**claim: Any) -> tuple[float, bytes]:
    row = RunRow(
        run_id="x", name="x", user="u", host="h", pid=1, directory="/", started=0.0, claim=RunClaim(run="x")
    )
    raw = msgspec.to_builtins(row)
    raw["claim"] |= {**HOLDS, **claim}
    return 0.0, msgspec.json.encode(raw)


@pytest.mark.parametrize(
    "claim",
    [
        {"weight": 0.0},
        {"weight": 1e300},
        {"weight": -1.0},
        {"priority": 2**70},
        {"waited_s": -1.0},
        {"wants": [{"parts": [[1, 1, 1]], "count": 10**9}]},
        {"wants": [{"parts": [[1, 1, 1]], "count": 0}]},
        {"wants": [{"parts": []}]},
        {"wants": [{"parts": [[-1, 1, 1]]}]},
        {"wants": [{"parts": [[1, 1, 1]]}] * 65},
        {"holdings": [{"id": "1", "parts": {"n": [1, float("nan"), 1]}}]},
        {"holdings": [{"id": "1", "parts": {"n": [1, -1, 1]}}]},
        {"holdings": [{"id": "1", "parts": {"n": [1e300, 1, 1]}}]},
        {"holdings": [{"id": "1", "parts": {}, "held_s": -5.0}]},
    ],
)
def test_a_row_that_cannot_be_so_is_left_out_and_the_others_are_read(claim: dict[str, Any]) -> None:
    assert len(decode_rows([encode()])) == 1
    assert [row.claim.run for row in decode_rows([encode(**claim), encode(run="y")])] == ["y"]


def make_model() -> ClusterModel:
    leases = LeaseManager("me", "cpu", [make_member(gpus_per_worker=0.0)], shared=Shared("me"))
    leases.set_offers([Offer("n", Node(name="n", cpus=4.0, gpus=(), memory_gb=4.0, host="n"), {})])
    return ClusterModel(leases)


def test_a_division_that_fails_is_said_once_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    assert model.leases is not None
    broken = RunClaim(run="x", weight=0.0, wants=(Want((ONE,)),), holdings=(Holding("q", {"n": ONE}),))
    for _ in range(3):
        model.share(model.leases.make_claim(), [("run x", broken)], {"n": {"CPU": 1.0}})
    assert [record.getMessage() for record in caplog.records] == [
        "the cluster cannot be divided between its runs, and stays as it is: "
        "ZeroDivisionError('float division by zero')"
    ]


@pytest.mark.parametrize("declared", [{"share_weight": 5e-324}, {"share_weight": 1e7}, {"priority": 2**70}])
def test_what_no_other_run_would_read_is_refused(declared: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="must be at"):
        apply_limits(object(), **declared)  # type: ignore[arg-type]
