"""Clones of members, against a simulated cluster: what they are declared as, and what is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from kit.event_dicts import read_events
from test_controller import Simulated, an_ensemble, run, states
from test_queue import Script, _nothing_is_waited_for, answers  # noqa: F401

from ensemble.controller.clones import declare_clone, recover_declaration
from ensemble.spec import Bootstrap, Folds, Identity, Member, Resources, Search, SpecError, uniform
from ensemble.spec.identity import make_lineage
from ensemble.store import MemberState, RunDir, StoreError
from tests.search.studies import read_study


def clone(member: str, declared: dict[str, Any] | None = None, **fields: Any) -> tuple[str, dict[str, Any]]:
    """A request as the live page and `Run.clone` write it."""
    return "add", {"declared": declared or {}, "from": member, "warm": False, **fields}


def declared_as(member: Identity) -> dict[str, Any]:
    """What decides the weights of a member, but for which one it is."""
    return {k: v for k, v in member.compared_fields().items() if k not in ("member", "number")}


OWN_OPTIONS: dict[str, Any] = {"seed": 77, "workers": 2, "threads": 3, "precision": "bf16", "loss_scale": 8.0}
OWN_OPTIONS |= {"epochs": 5, "batch_size": 3, "accumulate": 2, "schedule": "cosine", "compression": "none"}
OWN_OPTIONS |= {"optimizer": {"name": "sgd", "momentum": 0.5, "lr": 0.2}, "communicator": "torch"}
OWN_OPTIONS |= {"span_nodes": False, "nodes": {"ray.io/market-type": "!spot", "team": None}}


@pytest.mark.parametrize("weights", ["uniform", "bootstrap", Bootstrap(seed=9), Folds(4), Folds(4, 1, seed=2)])
def test_a_clone_is_declared_as_its_member_was_whatever_the_ensemble_declares(weights: Any) -> None:
    made = an_ensemble(
        weights="bootstrap",
        compression="fp16",
        communicator="hierarchical",
        optimizer={"name": "adam", "lr": 0.1},
        members=[{"n": 0}, Member({"n": 1, "lr": 0.3}, weights=weights, **OWN_OPTIONS)],
    )
    for number in (0, 1):
        identity = made.identify(number)
        known = MemberState(identity.member, number, identity=identity.as_dict(), attempts=1)
        again = made.identify(5, recover_declaration(known, made))
        assert declared_as(again) == declared_as(identity)
        assert (again.cpus_per_worker, again.span_nodes) == (identity.cpus_per_worker, identity.span_nodes)
        assert again.nodes == identity.nodes


@pytest.mark.parametrize(("attempts", "workers"), [(0, "auto"), (1, 3)])
def test_a_measured_width_is_kept_once_it_has_been_trained_with(attempts: int, workers: Any) -> None:
    made = an_ensemble(resources=Resources(workers="auto"), members=[{"n": 0}])
    record = made.identify(0).as_dict() | {"workers": 3, "cpus_per_worker": 0.3, "memory_gb": 1.5}
    declared = recover_declaration(MemberState("member-0", 0, identity=record, attempts=attempts), made)
    assert (declared.workers, declared.cpus_per_worker, declared.memory_gb) == (workers, None, None)
    widened = record | {"auto": [], "workers": 4, "widened_from": 2}
    assert recover_declaration(MemberState("member-0", 0, identity=widened, attempts=2), made).workers == 2


def test_a_cold_clone_of_a_member_that_began_warm_needs_no_change() -> None:
    made = an_ensemble(members=[{"n": 0}])
    lineages = [{"lineage": make_lineage("member-9", warm=warm)} for warm in (False, True)]
    cold, warm = (made.identify(0).as_dict() | lineage for lineage in lineages)
    declared = declare_clone(MemberState("member-0", 0, identity=warm), {}, made, warm=False, names=[])
    assert declared_as(made.identify(0, declared)) == declared_as(made.identify(0))
    with pytest.raises(SpecError, match="it would repeat member-0"):
        declare_clone(MemberState("member-0", 0, identity=cold), {}, made, warm=False, names=[])


def test_a_clone_of_a_member_trains_with_its_changes_and_its_lineage_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run"
    changes = {"params": {"n": 9}, "epochs": 3}
    members = [{"n": 0}, Member({"n": 1, "m": "x"}, seed=50, batch_size=4)]
    script = Script(path, (("epoch", "member-0"), [clone("member-1", changes), clone("member-2", {"seed": 3})]))
    state = run(path, an_ensemble(members=members, sharing="node"), Simulated(4, before=script))
    first, second = state.members["member-2"], state.members["member-3"]
    assert (first.state, second.state) == ("finished", "finished")
    assert (first.params, first.identity["seed"], first.identity["batch_size"]) == ({"n": 9, "m": "x"}, 50, 4)
    assert (first.identity["epochs"], first.identity["added"], first.first_epoch) == (3, True, 5)
    nothing = dict.fromkeys(("epoch", "step", "weights_sha256", "code"))
    lineage = {"from": "member-1", "warm": False, **nothing}
    assert first.identity["lineage"] == lineage and second.identity["lineage"]["from"] == "member-2"
    assert (second.params, second.identity["seed"]) == (first.params, 3)
    assert [done for _, done, _ in answers(path)] == [True, True]
    declared = [e for e in read_events(RunDir(path).events) if e["type"] == "member" and e["member"] == "member-2"]
    assert all(event["lineage"] == lineage for event in declared)


def test_what_no_clone_can_be_is_refused_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "run"
    refused = [
        (clone("member-1"), "it would repeat member-1"),
        (clone("member-1", {"params": {"n": 1}, "cpus_per_worker": 0.5}), "it would repeat member-1"),
        (clone("member-1", {"params": {"nn": 3}}), "member-1 has no hyperparameter 'nn'; did you mean 'n'?"),
        (clone("member-1", {"params": {"n": "many"}}), "n=many is not a number; member-1 has n=1"),
        (clone("member-11", {"seed": 1}), "there is no member 'member-11'; did you mean 'member-1'?"),
        (clone("member-1", {"epoks": 3}), "epoks"),
        (clone("member-1", {"workers": 64}), "64 workers"),
        (clone("member-1", {"seed": 1}, warm="yes"), "true or false in `warm`"),
        (("add", {"declared": {"params": {"n": 9}}, "warm": True}), "the name of a member in `from`"),
        (("add", {"declared": {"params": {"n": 9}}, "from": ["x"]}), "the name of a member in `from`"),
    ]
    script = Script(path, (("epoch", "member-0"), [request for request, _ in refused]))
    state = run(path, an_ensemble(), Simulated(before=script))
    assert len(state.members) == 4 and set(states(state).values()) == {"finished"}
    told = answers(path)
    assert len(told) == len(refused) and not any(done for _, done, _ in told)
    for _, said in refused:
        assert any(said in why for _, _, why in told), said


def test_a_clone_may_change_what_others_of_the_run_have_or_its_optimizer_reads(tmp_path: Path) -> None:
    path = tmp_path / "run"
    made = an_ensemble(members=[{"n": 0}, {"m": 1}], optimizer={"name": "sgd", "lr": 0.1}, schedule="cosine")
    names = ("m", "lr", "momentum", "end")
    asks = [clone("member-0", {"params": {name: 0.5}}) for name in names]
    state = run(path, made, Simulated(before=Script(path, (("epoch", "member-0"), asks))))
    assert [done for _, done, _ in answers(path)] == [True] * 4
    assert [m.params for m in state.members.values()][2:] == [{"n": 0, name: 0.5} for name in names]


def test_a_hyperparameter_that_sets_an_option_is_changed_in_a_clone() -> None:
    made = an_ensemble(members=[{"n": 0, "batch_size": 8, "optimizer": "adam", "lr": 0.1}])
    parent = MemberState("member-0", 0, identity=made.identify(0).as_dict())
    for changes in ({"params": {"batch_size": 16}}, {"batch_size": 16}):
        clone = declare_clone(parent, changes, made, warm=False, names=())
        identity = made.identify(1, clone)
        assert identity.batch_size == identity.params["batch_size"] == 16 and identity.optimizer["name"] == "adam"
    plain = an_ensemble(members=[{"n": 0}])
    parent = MemberState("member-0", 0, identity=plain.identify(0).as_dict())
    clone = declare_clone(parent, {"params": {"batch_size": 16}}, plain, warm=False, names=())
    assert plain.identify(1, clone).batch_size == 16


def test_a_search_learns_from_a_clone_and_the_study_shows_where_it_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "run"
    search = Search({"lr": uniform(0, 1), "depth": 2}, trials=3, sampler="tpe", pruner="none")
    asks = [clone("member-0", {"params": {"lr": lr}}) for lr in (0.5, 7.0)]
    executor = Simulated(before=Script(path, (("epoch", "member-0"), [*asks, ("stop", {})])))
    made = an_ensemble(search=search, epochs=3, sharing="node")
    run(path, made, executor)
    state = run(path, made, Simulated(after=executor))
    assert len(state.members) == 5 and set(states(state).values()) == {"finished"}
    by_lr = {m.params["lr"]: m for m in state.members.values() if m.identity["added"]}
    assert by_lr[0.5].identity["outside"] is None and "outside uniform(0, 1)" in by_lr[7.0].identity["outside"]
    for trial in read_study(RunDir(path).journal, made.name).trials:
        member = state.members[trial.user_attrs["member"]]
        lineage = trial.user_attrs.get("lineage")
        assert lineage == member.identity["lineage"] and (lineage is not None) == member.identity["added"]


def test_a_resume_knows_a_clone_and_refuses_a_list_that_declares_another_in_its_place(tmp_path: Path) -> None:
    from ensemble.controller.changes import check_same

    path = tmp_path / "run"
    asks = [clone("member-1", {"params": {"n": 9}, "epochs": 6}), ("stop", {})]
    made = an_ensemble(epochs=4)
    executor = Simulated(before=Script(path, (("epoch", "member-0"), asks)))
    state = run(path, made, executor)
    assert state.members["member-4"].state != "finished"
    check_same(state, made, path)
    state = run(path, made, Simulated(after=executor))
    assert states(state)["member-4"] == "finished" and state.members["member-4"].params == {"n": 9}
    assert state.members["member-4"].identity["lineage"]["from"] == "member-1"
    for n in (9, 8):
        listed = an_ensemble(epochs=4, members=[*({"n": i} for i in range(4)), Member({"n": n}, seed=1, epochs=6)])
        with contextlib.nullcontext() if n == 9 else pytest.raises(StoreError, match="member-4 has params="):
            check_same(state, listed, path)
