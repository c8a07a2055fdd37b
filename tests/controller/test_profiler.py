"""Members are measured by real processes: what is found, and what becomes of those that cannot be."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.event_dicts import fold
from profiling_members import an_ensemble, train

from ensemble import Ensemble, Member
from ensemble.controller.actions import Action, Launch
from ensemble.controller.performer import Performer
from ensemble.controller.profiler import Profiler
from ensemble.controller.starts import make_trials
from ensemble.executors import Executor, make_executor
from ensemble.schedule.needs import Node
from ensemble.schedule.packing import pack
from ensemble.schedule.profiles import Profile, apply_profile, compute_own_rate
from ensemble.spec import Identity
from ensemble.store import EventLog, RunDir, RunState
from ensemble.train import Job

NARROW: dict[str, Any] = {"width": 8, "lr": 0.1}
CHANGES: list[dict[str, Any]] = [{}, {"lr": 0.3}, {"width": 1024}, {"fault": "kill"}, {"sleep_s": 0.02}]
CHANGES += [{"fault": "build"}, {"table": 50_000_000}, {"drop": 0.4}]
MEMBERS: list[Any] = [NARROW | change for change in CHANGES]
Local = tuple[Executor, list[Node], RunDir]
Event = dict[str, Any]


def measure(profiler: Profiler, actions: list[Action], executor: Executor, run_dir: RunDir) -> list[Event]:
    """Go on until all is measured; the events that the profiler does not take."""
    others = []
    while profiler.is_busy:
        assert not perform_all(actions, executor, run_dir)
        others += [e for e in executor.events(0.1) if not profiler.handle(e, time.monotonic())]
        profiler.watch(time.monotonic())
    return others


def perform_all(actions: list[Action], executor: Executor, run_dir: RunDir) -> list[Event]:
    """Perform what was decided; the events about what failed."""
    decided = actions.copy()
    actions.clear()
    trials = make_trials(an_ensemble(MEMBERS), run_dir, RunState(), sharing=False)
    log = EventLog(run_dir.path / "profiling.jsonl")
    try:
        return Performer(run_dir, executor, log, trials).perform(decided)
    finally:
        log.close()


class Measured:
    """What was measured of an ensemble's members, and what was told meanwhile."""

    def __init__(
        self, executor: Executor, nodes: list[Node], run_dir: RunDir, declared: Ensemble, **options: Any
    ) -> None:
        self.run_dir = run_dir
        self.told: list[Event] = []
        self.identities = [declared.identify(number) for number in range(len(declared.members or ()))]
        actions: list[Action] = []
        profiler = Profiler(actions, run_dir, self._emit, **options)
        self.wanted = profiler.select_members(self.identities, nodes)
        profiler.start(self.wanted, nodes[0], time.monotonic(), nodes)
        others = measure(profiler, actions, executor, run_dir)
        self.usage = [event for event in others if event["type"] == "usage"]
        self.profiler = profiler

    def _emit(self, kind: str, **fields: Any) -> None:
        self.told.append({"v": 2, "t": 0.0, "type": kind, **fields})

    def __getitem__(self, number: int) -> Profile:
        return self.profiler.profiles[f"member-{number}"]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """An executor, its nodes, and the run directory of MEMBERS."""
    run_dir = RunDir.create(tmp_path_factory.mktemp("profiling") / "run", an_ensemble(MEMBERS))
    executor = make_executor("local")
    nodes = executor.open(run_dir, an_ensemble(MEMBERS), lambda events: None)
    yield executor, nodes, run_dir
    executor.close()


@pytest.fixture(scope="module")
def measured(local: Local) -> Measured:
    return Measured(*local, an_ensemble(MEMBERS))


def test_steps_of_a_wide_net_take_longer_and_those_of_a_sleeping_one_hardly_a_core(measured: Measured) -> None:
    narrow, wide, sleeping = measured[0], measured[2], measured[4]
    assert wide.step_s[1] > 1.5 * narrow.step_s[1]
    assert wide.samples_per_s[1] == pytest.approx(128 / wide.step_s[1])
    assert 0.02 <= sleeping.step_s[1] < 0.06
    assert sleeping.cpus[1] < 0.5 < 0.8 < wide.cpus[1] < 1.2
    assert narrow.device == "cpu" and not narrow.gpus and narrow.gpu_memory_gb == 0


def test_members_of_one_shape_are_measured_once_and_a_parameter_of_200_mb_is_seen(measured: Measured) -> None:
    assert measured[0] is measured[1] is measured[7], "a learning rate and a dropout's rate change no shape"
    assert {"member-0", "member-1", "member-7"} == set(measured[0].members)
    assert len({profile.shape for profile in measured.profiler.profiles.values()}) == 4
    assert measured[0].memory_gb < 0.1
    difference = measured[6].memory_gb - measured[0].memory_gb
    assert 2 * 0.186 < difference < 2.2 * 0.186, "and so is its copy while a checkpoint is written"


def test_members_that_fail_keep_their_guesses_and_harm_no_other(measured: Measured) -> None:
    failed = {tuple(event["members"]): event["error"] for event in measured.told if event["type"] == "unmeasured"}
    assert set(failed) == {("member-3",), ("member-5",)}
    assert "SIGKILL" in failed[("member-3",)] and "this model cannot be built" in failed[("member-5",)]
    assert len(measured.profiler.profiles) == 6
    assert apply_profile(measured.identities[5], None) == measured.identities[5]
    assert apply_profile(measured.identities[4], measured[4]).cpus_per_worker < 0.5


def test_what_was_measured_is_in_the_log_and_not_measured_again(measured: Measured, local: Local) -> None:
    _, nodes, run_dir = local
    known = fold(measured.told).profiles.values()
    again = Profiler([], run_dir, lambda kind, **fields: None, earlier=known)
    wanted = [identity.member for identity in again.select_members(measured.identities, nodes)]
    assert wanted == ["member-3", "member-5"]
    assert not measured.profiler.select_members(measured.identities, nodes)
    assert again.profiles["member-6"] == measured[6]


def test_measuring_leaves_nothing_of_a_member_and_is_accounted_for(measured: Measured) -> None:
    assert [path.name for path in (measured.run_dir.path / "members").iterdir()] == ["profile"]
    assert [path.name for path in measured.run_dir.member("profile").iterdir()] == ["log.txt"]
    roles = {event["role"] for event in measured.usage if event["member"] is None}
    assert "profile" in roles and all(event["member"] is None for event in measured.usage)
    assert not fold(measured.told).members


def test_a_train_function_is_measured_with_every_number_of_workers(local: Local, tmp_path: Path) -> None:
    executor, nodes, _ = local
    members: list[Any] = [Member({"width": 8, "lr": lr}, workers="auto") for lr in (0.1, 0.2)]
    declared = an_ensemble(members, recipe=train)
    two = Node(name=nodes[0].name, cpus=2.0, gpus=(), memory_gb=8.0, host="here")
    found = Measured(executor, [two], RunDir.create(tmp_path / "run", declared), declared)
    assert not [event for event in found.told if event["type"] == "unmeasured"]
    assert found[0] is found[1] and set(found[0].step_s) == set(found[0].cpus) == {1, 2}
    assert [path.name for path in (tmp_path / "run" / "members").iterdir()] == ["profile"]


@pytest.mark.more
def test_a_wide_member_is_measured_on_two_nodes_too_where_that_is_left_open(local: Local, tmp_path: Path) -> None:
    executor, (node, *_), _ = local
    slow = NARROW | {"sleep_s": 0.01}
    members = [Member(slow, workers=2, span_nodes=how) for how in ("auto", True)]
    members.append(Member({"width": 8, "lr": 0.2}, workers=3))  # no node has room for all of its ranks
    declared = an_ensemble(members)
    run_dir = RunDir.create(tmp_path / "run", declared)
    nodes = [replace(node, cpus=2), replace(node, cpus=2, name="other")]
    for each in nodes:  # both are this machine: the executor starts all ranks here
        assert each.interface == "lo"
    found = Measured(executor, nodes, run_dir, declared)
    profile = found[0]
    assert set(profile.samples_per_s) == set(profile.spread_samples_per_s) == {2}
    assert 0.2 < profile.spread_samples_per_s[2] / profile.samples_per_s[2] < 5
    assert Profile.from_dict(json.loads(json.dumps(profile.as_dict()))) == profile
    identity = found.identities[0]
    for gain, chosen, names in ((1.2, "spread", {"local", "other"}), (1.0, True, {"local"})):
        rates = {2: gain * profile.samples_per_s[2]}
        known = apply_profile(identity, replace(profile, spread_samples_per_s=rates))
        assert known.span_nodes == chosen
        asked = replace(known, cpus_per_worker=0.5, gpus_per_worker=0.0, auto=[])
        (placed,) = pack([asked], [], [replace(node, cpus=2, name=name) for name in ("local", "other")])
        assert set(placed.ranks_by_node) == names
    assert apply_profile(found.identities[1], profile).span_nodes is True, "nobody asked"
    assert set(found[2].samples_per_s) == {3} and found[2].memory_gb > 0


def test_a_member_that_hangs_is_given_up(local: Local, tmp_path: Path) -> None:
    executor, nodes, _ = local
    declared = an_ensemble([Member({"width": 8, "lr": 0.1, "fault": "hang"}, workers=2, cpus_per_worker=0.5)] * 2)
    one = Node(name=nodes[0].name, cpus=1.0, gpus=(), memory_gb=8.0, host="here")
    found = Measured(executor, [one], RunDir.create(tmp_path / "run", declared), declared, timeout_s=3.0)
    both = ["member-0", "member-1"]
    assert [(e["type"], e["members"]) for e in found.told] == [("measuring", both), ("unmeasured", both)]
    assert "no report of its steps" in found.told[1]["error"]


def test_a_lost_node_is_nobodys_fault(local: Local, tmp_path: Path) -> None:
    executor, nodes, _ = local
    declared = an_ensemble([{"width": 8, "lr": 0.1, "fault": "hang"}] * 8)
    told: list[Any] = []
    actions: list[Action] = []
    run_dir = RunDir.create(tmp_path / "run", declared)
    profiler = Profiler(actions, run_dir, lambda *kind, **_: told.append(kind))
    waiting = [declared.identify(number) for number in range(8)]
    profiler.start(waiting, nodes[0], time.monotonic())
    assert not perform_all(actions, executor, run_dir)
    profiler.handle({"type": "node_lost", "node": nodes[0].name}, time.monotonic())
    measure(profiler, actions, executor, run_dir)
    assert told == [("measuring",)] and profiler.select_members(waiting, nodes) == waiting


FREE = [((0.0, 1.0), 1, ["GPU-1"]), ((0.1, 0.5), 1, ["GPU-1"]), ((0.1, 0.5), 2, ["GPU-1", "GPU-0"])]


# All of a GPU is what is guessed: it may need less.
@pytest.mark.parametrize(("free", "workers", "devices"), [*FREE, ((0.0, 0.5), 2, None), ((0.0, 0.0), 1, None)])
def test_members_are_measured_on_gpus_of_which_others_leave_memory(
    free: tuple[float, ...], workers: int, devices: list[str] | None, tmp_path: Path
) -> None:
    declared = an_ensemble([Member({"width": 8, "lr": 0.1}, workers=workers)] * 8)
    node = Node("a", 8.0, ("A100",) * 2, 64.0, "a", gpu_ids=("GPU-0", "GPU-1"), gpu_free=free)
    actions: list[Action] = []
    profiler = Profiler(actions, RunDir.create(tmp_path / "run", declared), lambda *_, **__: None)
    waiting = [declared.identify(number) for number in range(8)]
    profiler.start(profiler.select_members(waiting, [node]), node, 0.0)
    launched = [list(action.devices) for action in actions if isinstance(action, Launch)]
    assert launched == ([] if devices is None else [devices]) and profiler.is_busy == bool(launched)
    profiler.stop()
    freed = profiler.select_members(waiting, [node.without_others()])
    assert freed == waiting, "they are measured when others have left"


def trained(executor: Executor, run_dir: RunDir, identity: Identity) -> dict[str, Event]:
    """Train a member alone: its last event of each type."""
    alone = dict.fromkeys(("rendezvous", "interface", "feeder"))
    job = Job(run_dir=str(run_dir.path), identity=identity, attempt=0, rank=0, device="cpu", **alone)
    executor.launch([job], [None])
    said: dict[str, Event] = {}
    while "exited" not in said:
        said |= {event["type"]: event for event in executor.events(1.0)}
    return said


def test_having_been_measured_changes_no_bit_of_the_weights(local: Local, tmp_path: Path) -> None:
    executor, nodes, _ = local
    declared = an_ensemble([Member({"width": 8, "lr": 0.1}, workers="auto")], epochs=2)
    plain, then = (RunDir.create(tmp_path / name, declared) for name in ("plain", "measured"))
    without = trained(executor, plain, declared.identify(0))
    profile = Measured(executor, nodes, then, declared)[0]
    told = trained(executor, then, declared.identify(0))
    assert told["finished"]["weights_sha256"] == without["finished"]["weights_sha256"]
    assert 0 < told["epoch"]["memory_gb"] < 0.2 and 0 < told["epoch"]["cpus"] < 3
    seen = compute_own_rate(told["epoch"])
    assert seen is not None and seen > profile.samples_per_s[1] / 20
