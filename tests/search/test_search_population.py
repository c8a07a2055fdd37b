"""Population based training: whose state and hyperparameters a member goes on with, and what changes nothing."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.event_dicts import fold, read_events
from kit.leftovers import wait_until
from population_driver import EPOCHS, build, declare, loss
from small_run import stop_at

import ensemble
from ensemble import Member, Search, SpecError, choice, integer, loguniform, uniform
from ensemble.events import RunStopped
from ensemble.search.population import Population, choose_parent, perturb
from ensemble.search.space import make_distribution
from ensemble.spec.population import find_last_epoch
from ensemble.store import MemberState, RunDir, RunState, StoreError, load_checkpoint, load_initial_state

POPULATION, GENERATIONS = 4, 3


def state_of(path: Path) -> RunState:
    return fold(read_events(RunDir(path).events))


def run(path: Path, made: ensemble.Ensemble | None = None, executor: str = "inline") -> RunState:
    ensemble.submit(declare() if made is None else made, path, executor).wait()
    return state_of(path)


def _pick(made: ensemble.Ensemble, names: str) -> dict[str, Any]:
    return {name: getattr(made, name) for name in names.split()}


def source_of(member: MemberState) -> str | None:
    lineage = member.identity["lineage"]
    return None if lineage is None else str(lineage["from"])


def generations_of(state: RunState) -> list[list[MemberState]]:
    members = list(state.members.values())
    return [members[at : at + POPULATION] for at in range(0, len(members), POPULATION)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("population") / "run"
    run(path)
    return path


@pytest.mark.parametrize("failed", [0, 1, 3, 6])
def test_the_worst_and_who_failed_go_on_from_one_of_the_best(failed: int) -> None:
    rng = np.random.default_rng(failed)
    for round_ in range(50):
        size, quantile = int(rng.integers(max(2, failed + 1), 12)), float(rng.uniform(0.01, 0.49))
        values: list[Any] = [*rng.integers(0, 5, size - failed).astype(float), *[None] * failed]
        rng.shuffle(values)
        moved = max(1, round(quantile * size))
        known = sorted((v for v in values if v is not None), reverse=True)
        parents = [choose_parent(values, at, quantile, [round_, at]) for at in range(size)]
        replaced = [at for at in range(size) if parents[at] != at]
        assert all(values[parents[at]] >= known[:moved][-1] for at in replaced), "only the best are followed"
        assert all(at in replaced for at in range(size) if values[at] is None)
        beaten = [values[at] for at in replaced if values[at] is not None]
        assert len(replaced) <= max(moved, failed) and all(value <= known[-1] for value in beaten[moved:])
        if failed < moved and len(known) > moved:
            assert len(replaced) in (moved, moved - 1), "one of the worst may be among the best of very few"
    assert [choose_parent([None, 2.0, 1.0, 3.0], at, 0.0, [0]) for at in range(4)] == [3, 1, 2, 3]


def test_a_change_stays_in_the_space_and_is_one() -> None:
    floats = loguniform(1e-4, 1.0), uniform(-2.0, 3.0), uniform(0.0, 1.0, step=0.25)
    integers = integer(3, 90), integer(2, 64, log=True), integer(0, 12, step=4)
    for given in (*floats, *integers, choice(16, 64, 32)):
        distribution = make_distribution(given)
        for value in (given.values[0], given.values[-1], *([16, 64, 32] if given.kind == "choice" else ())):
            ups = {goes_up: perturb(distribution, value, 1.2, goes_up=goes_up) for goes_up in (True, False)}
            for moved in ups.values():
                assert distribution._contains(distribution.to_internal_repr(moved)) and type(moved) is type(value)
            assert set(ups.values()) != {value}, f"{given}: {value} leads nowhere"
    ordered = make_distribution(choice(16, 64, 32))
    assert [perturb(ordered, 32, 1.2, goes_up=up) for up in (True, False)] == [64, 16]
    assert perturb(make_distribution(choice("relu", "gelu")), "gelu", 1.2, goes_up=True) == "gelu"
    assert perturb(make_distribution(loguniform(1e-4, 1.0)), 0.1, 1.25, goes_up=False) == pytest.approx(0.08)


def test_each_generation_trains_its_part_and_the_worst_follows_one_of_the_best(undisturbed: Path) -> None:
    state = state_of(undisturbed)
    generations = generations_of(state)
    assert len(generations) == GENERATIONS and {m.state for m in state.members.values()} == {"finished"}
    for number, members in enumerate(generations):
        epochs = [[event.epoch for event in member.history] for member in members]
        assert epochs == [[2 * number, 2 * number + 1]] * POPULATION, "own epochs go on"
    assert [source_of(member) for member in generations[0]] == [None] * POPULATION
    for before, members in itertools.pairwise(generations):
        ranked = sorted(before, key=lambda member: member.metrics["loss"])
        worst = before.index(ranked[-1])
        for place, member in enumerate(members):
            if place == worst:
                assert source_of(member) == ranked[0].id and member.params != ranked[0].params
            else:
                assert (source_of(member), member.params) == (before[place].id, before[place].params)
            parent = state.members[str(source_of(member))]
            assert parent.checkpoint is not None
            assert member.identity["lineage"]["weights_sha256"] == parent.checkpoint.weights_sha256
    assert state.combined is not None
    assert {member.id for member in generations[-1]} & set(state.combined.candidates or ())


def test_who_is_never_replaced_ends_with_the_bits_of_one_training(undisturbed: Path, tmp_path: Path) -> None:
    generations = generations_of(state_of(undisturbed))
    pairs = list(itertools.pairwise(generations))
    kept = [n for n in range(POPULATION) if all(source_of(now[n]) == before[n].id for before, now in pairs)]
    assert kept
    names = "name recipe train valid objective mode epochs optimizer schedule averaging batch_size sharing"
    first = [generations[0][place] for place in kept]
    members = [Member(member.params, seed=member.identity["seed"]) for member in first]
    state = run(tmp_path / "plain", ensemble.Ensemble(**_pick(declare(), names), members=members))
    ends = [generations[-1][place].weights_sha256 for place in kept]
    assert [m.weights_sha256 for m in state.members.values()] == ends


def test_who_takes_a_place_trains_with_its_own_rate_from_there_on(undisturbed: Path) -> None:
    steps, warm = 4 * EPOCHS, 4
    for number, members in enumerate(generations_of(state_of(undisturbed))):
        for member in members:
            for event in member.history:  # the rate after the last step
                way = min(1.0, (4 * (event.epoch + 1) - warm) / (steps - warm))
                expected = member.params["lr"] * (1 + np.cos(np.pi * way)) / 2
                assert event.lr == pytest.approx(expected, rel=1e-6, abs=1e-12), (number, member.id)


@pytest.mark.more
def test_neither_a_kill_nor_the_number_of_places_changes_a_bit(undisturbed: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    driver = [sys.executable, str(Path(__file__).with_name("population_driver.py")), str(path), "local"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(place for place in sys.path if place)}

    def has_begun(member: str) -> bool:
        known = state_of(path).members.get(member) if RunDir(path).events.exists() else None
        return known is not None and known.state in ("running", "finished")

    for member in ("member-2", "member-9"):  # of the first generation and of the last
        process = subprocess.Popen(driver, env=environment)
        wait_until(lambda seen=member: has_begun(seen), f"the start of {member}")
        process.kill()
        process.wait()
    subprocess.run(driver, env=environment, check=True)
    before, after = state_of(undisturbed), state_of(path)
    trained = [
        [(m.id, m.params, source_of(m), m.weights_sha256) for m in s.members.values()] for s in (before, after)
    ]
    assert trained[0] == trained[1]


@pytest.mark.more
def test_who_fails_is_replaced_and_a_generation_of_failures_ends_the_run(tmp_path: Path) -> None:
    space, sampler = {"lr": loguniform(1e-3, 0.99)}, {"name": "pbt", "population": POPULATION, "generations": 2}
    search = Search(space, sampler=sampler, enqueue=[{"lr": 0.95}])
    first, second = generations_of(run(tmp_path / "one", declare(epochs=2, search=search)))
    assert first[0].state == "failed" and source_of(second[0]) in {m.id for m in first[1:]}
    assert second[0].state == "finished"
    search = Search({"lr": loguniform(0.91, 0.99)}, sampler=sampler)
    ended = run(tmp_path / "all", declare(epochs=2, search=search)).ended
    assert isinstance(ended, RunStopped) and "above 0.9" in ended.reason
    assert "no member of generation 0 finished, so none can go on: " in ended.reason


@pytest.mark.more
def test_what_changes_the_network_is_inherited_or_its_heir_fails_alone(tmp_path: Path) -> None:
    space = {"lr": loguniform(1e-3, 0.5), "width": choice(4, 8, 16, 32)}
    state = run(tmp_path / "kept", declare(space, generations=2, epochs=2, inherit=["width"]))
    assert {member.state for member in state.members.values()} == {"finished"}
    for member in list(state.members.values())[POPULATION:]:
        assert member.params["width"] == state.members[str(source_of(member))].params["width"]
    state = run(tmp_path / "changed", declare(space, generations=2, epochs=2))
    failed = [member for member in state.members.values() if member.state == "failed"]
    assert len(failed) == 1 and f"in {source_of(failed[0])}" in str(failed[0].error)


@pytest.mark.more
def test_checkpoints_are_reduced_when_nobody_goes_on_from_them(tmp_path: Path) -> None:
    state = run(tmp_path / "run", declare(generations=2, epochs=2, keep_checkpoints="weights"))
    assert {member.state for member in state.members.values()} == {"finished"}
    for member in state.members.values():
        assert not RunDir(tmp_path / "run").initial_weights(member.id).exists()
        checkpoint = load_checkpoint(RunDir(tmp_path / "run").valid_checkpoint(member))
        assert "optimizer" not in checkpoint


@pytest.mark.usefixtures("_requests_are_seen_at_once")
def test_the_same_declaration_goes_on_and_another_population_does_not(undisturbed: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    ask = stop_at(path, "finished", "member-5", "stop")
    ensemble.submit(declare(), path, "inline", on_event=ask).wait()
    assert 5 < len(state_of(path).members) < POPULATION * GENERATIONS
    with pytest.raises(StoreError, match=r"'population': 4.*now.*'population': 5"):
        ensemble.submit(declare(population=5), path, "inline")
    before, after = state_of(undisturbed).members, run(path).members
    assert [m.weights_sha256 for m in after.values()] == [m.weights_sha256 for m in before.values()]


def test_an_heir_whose_checkpoint_is_damaged_is_made_again(undisturbed: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(undisturbed, path)
    before = state_of(path).members["member-9"]
    damaged = RunDir(path).valid_checkpoint(before)
    damaged.write_bytes(damaged.read_bytes()[:500])
    ensemble.resume(path).wait()
    again = state_of(path).members["member-9"]
    assert (again.state, again.weights_sha256, again.attempts) == ("finished", before.weights_sha256, 2)


def test_a_flipped_bit_in_what_an_heir_starts_with_is_seen(undisturbed: Path) -> None:
    run_dir, state = RunDir(undisturbed), state_of(undisturbed)
    lineage = state.members["member-9"].identity["lineage"]
    copy = run_dir.initial_weights("member-9")
    shutil.copy(run_dir.valid_checkpoint(state.members[lineage["from"]]), copy)
    digests = lineage["weights_sha256"], None, lineage["digest"]
    assert load_initial_state(run_dir, "member-9", *digests)["optimizer"]
    content = bytearray(copy.read_bytes())
    content[-8] ^= 1
    copy.write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        load_initial_state(run_dir, "member-9", *digests)
    copy.unlink()


def keep_own(member: Any) -> None:
    import torch

    model = build(member.params)
    optimizer = torch.optim.SGD(model.parameters(), member.params["lr"])
    member.state("rates", torch.optim.lr_scheduler.ConstantLR(optimizer))
    member.prepare(model, optimizer)
    for _ in member.epochs():
        for batch in member.batches():
            member.backward(loss(model, batch))
            member.step()
        member.report(loss=member.params["lr"])


@pytest.mark.more
def test_a_state_that_may_hold_hyperparameters_is_not_inherited(tmp_path: Path) -> None:
    made = declare({"lr": loguniform(1e-3, 0.5)}, generations=2, epochs=2)
    own = ensemble.Ensemble(
        **_pick(made, "name train valid search epochs batch_size retries objective mode sharing"), recipe=keep_own
    )
    state = run(tmp_path / "run", own)
    first, second = generations_of(state)
    assert {m.state for m in first} == {"finished"} and {m.state for m in second} == {"failed"}
    assert str(second[0].error).endswith(": rates")


def test_the_epochs_of_a_population_are_its_own_and_no_fewer_than_its_generations(undisturbed: Path) -> None:
    with pytest.raises(StoreError, match="the generations of a population have fixed epochs"):
        ensemble.resume(undisturbed, epochs=9)
    with pytest.raises(SpecError, match="generations'\\] is 3, but there are 2 epochs"):
        declare(epochs=2)
    assert [find_last_epoch(generation, 4, 10) for generation in range(4)] == [3, 5, 8, 10]


def shift(sample: dict[str, Any], by: float) -> dict[str, Any]:
    return {**sample, "x": sample["x"] + np.float32(by)}


def augmented(params: dict[str, Any]) -> Any:
    return declare(epochs=3).train.map(functools.partial(shift, by=params.get("by", 0.1)))  # type: ignore[union-attr]


@pytest.mark.more
def test_seeds_and_sample_weights_are_of_the_place_and_the_data_may_go_by_hyperparameters(tmp_path: Path) -> None:
    made = declare({"lr": loguniform(1e-3, 0.5), "by": uniform(0.0, 0.5)}, epochs=3, generations=2, population=2)
    names = "name valid recipe search epochs batch_size retries objective mode sharing optimizer"
    own = ensemble.Ensemble(**_pick(made, names), train=augmented, weights="bootstrap")
    members = run(tmp_path / "run", own).members.values()
    assert {member.state for member in members} == {"finished"}
    assert len({member.params["by"] for member in members}) == 3
    drawn = [(member.identity["seed"], member.identity["weights"]["seed"]) for member in members]
    assert drawn[:2] == drawn[2:] and drawn[0] != drawn[1]


def test_generations_draw_other_parents_and_directions_at_the_same_place(undisturbed: Path) -> None:
    state = state_of(undisturbed)
    last = generations_of(state)[0]
    trial = SimpleNamespace(params={"lr": 0.1}, distributions={"lr": make_distribution(loguniform(1e-3, 0.5))})
    searcher: Any = SimpleNamespace(get_trial=lambda _: trial, ask=lambda _, params, __: trial.params | params)
    population = Population(declare(), state, searcher)
    population._options |= {"quantile": 0.5, "resample": 0.0}
    population._read_generation = lambda _: last  # type: ignore[method-assign]
    worst = max(range(POPULATION), key=lambda place: last[place].metrics["loss"])
    made = [population.propose(99, generation * POPULATION + worst) for generation in range(1, 9)]
    assert len({each.params["lr"] for each in made}) == len({str(each.lineage) for each in made}) == 2
