"""Running members change their stream or their width between two epochs, and learn what they would have learnt."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.event_dicts import fold, read_events
from kit.execute_members import an_ensemble, samples, when_sent
from kit.finished_runs import of_kind

import ensemble
from ensemble import Ensemble, Member, Resources
from ensemble.store import RunDir, StoreError, load_checkpoint
from pipelines.order.epoch_order import epoch_indices

N = 96
NARROW = Resources(cpus_per_worker=0.05)
EPOCHS = 10
Event = dict[str, Any]
Hook = Callable[[Any, Event], None]


def run(declared: Ensemble, run_dir: Path, hook: Hook | None = None) -> Any:
    started: list[Any] = []

    def on_event(event: Event) -> None:
        if hook is not None and started:
            hook(started[0]._controller, event)

    with pytest.MonkeyPatch.context() as patched:
        # Who is to move is said by the tests alone.
        patched.setattr("ensemble.controller.rebalancer.Rebalancer.rebalance", lambda self, *told: told[-1])
        started.append(ensemble.submit(declared, run_dir, "local", on_event=on_event))
        return started[0].wait()


def recorded(path: Path) -> dict[int, list[int]]:
    """Stream epoch -> the samples that were learnt from in it, in the stream's order."""
    lines = sorted(json.loads(line) for line in path.read_text().splitlines())
    seen: dict[int, list[int]] = {}
    for epoch, _, indices in lines:
        seen.setdefault(epoch, []).extend(indices)
    return seen


def undisturbed(members: list[Any], folder: Path, **options: Any) -> dict[str, Event]:
    ensemble.submit(an_ensemble(members, **options), folder, "inline").wait()
    return {event["member"]: event for event in of_kind(folder, "finished")}


STEPS_S = [0.01, 0.01, 0.01, 0.01, 0.08, 0.08]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of six members on one feeder one is sent on alone, and waits there for the quick ones to finish; two form a
    cohort of their own, which a third one joins later; then their feeder is killed.
    """
    folder = tmp_path_factory.mktemp("moves")
    asked: list[str] = []

    def change(controller: Any, event: Event) -> None:
        session, members = controller.session, controller.state.members
        commands = session.commands
        who, what = event.get("member"), event["type"]

        def join(*numbers: int) -> None:
            movers = [controller.ensemble.identify(number) for number in numbers]
            key = session.feeders.assign_late(movers, 1, session.state.nodes.held[0])
            address = session.feeders.address(key)
            assert all(commands.join(each.member, key, address) for each in movers)
            assert not commands.join(movers[0].member, key, address), "it was asked already"

        if what == "started" and not asked:
            asked.append("start")
            assert commands.alone("member-3") and not commands.alone("member-3")
            session._placer._cohort += 1
            join(4, 5)
            when_sent(controller, (folder / "they may begin").touch)
        if what == "finished" and {members[f"member-{n}"].state for n in (0, 1)} == {"finished"}:
            (folder / "the quick have finished").touch()
        if (what, who) == ("epoch", "member-4") and members["member-4"].epoch == 2:
            assert members["member-4"].cohort == 1
            asked.append("join")
            join(2)  # which is ahead by an epoch at most
            when_sent(controller, (folder / "it may go on").touch)
        feeder = controller.state.feeders.get(("local", 1))
        shares = (what, who) == ("epoch", "member-2") and members[who].cohort == 1 and event["shared_batches"]
        if shares and feeder and len(asked) == 2:
            asked.append("kill")
            os.kill(feeder.pid, signal.SIGKILL)

    # An epoch has three batches of training and two of validation.
    waits = {2: (11, "it may go on"), 3: (11, "the quick have finished")}
    waits |= {4: (1, "they may begin"), 5: (1, "they may begin")}
    members: list[Any] = [{"lr": 0.1, "step_s": s, "record": str(folder / f"{i}")} for i, s in enumerate(STEPS_S)]
    for number, (after, marker) in waits.items():
        members[number] |= {"fault": "wait", "after": after, "marker": str(folder / marker)}
    patient = {"capacity": 64, "stall_limit_s": 300.0, "resources": NARROW}
    result = run(an_ensemble(members, epochs=EPOCHS, **patient), folder / "run", change)
    assert asked == ["start", "join", "kill"] and {row["state"] for row in result.members} == {"finished"}
    assert {row["attempts"] for row in result.members} == {1}
    return folder


def test_who_moves_says_when_it_has(moved: Path) -> None:
    said = {event["member"]: event for event in of_kind(moved / "run", "moved")}
    cohorts = [(member, event["cohort"]) for member, event in sorted(said.items())]
    assert cohorts == [("member-2", 1), ("member-3", None), ("member-4", 1), ("member-5", 1)]
    assert said["member-3"]["feeder"] is None and said["member-4"]["feeder"].endswith("feeder-1")
    state = fold(read_events(moved / "run" / "events.jsonl"))
    spans = [(span.cohort, span.outcome) for span in state.members["member-2"].spans]
    assert spans == [(0, "moved"), (1, "finished")]


def test_members_that_move_learn_the_same_bits(moved: Path) -> None:
    members = [{"lr": 0.1} for _ in STEPS_S]
    expected = undisturbed(members, moved / "alone", epochs=EPOCHS)
    found = {event["member"]: event["weights_sha256"] for event in of_kind(moved / "run", "finished")}
    assert found == {member: event["weights_sha256"] for member, event in expected.items()}


def test_members_that_move_see_every_sample_once_in_an_epoch(moved: Path) -> None:
    pipeline = samples(N, 0)
    order = {epoch: epoch_indices(N, pipeline.seed, epoch, 0, N).tolist() for epoch in range(EPOCHS)}
    for member in range(len(STEPS_S)):
        assert recorded(moved / str(member)) == order
        assert len((moved / str(member)).read_text().splitlines()) == EPOCHS * 3


def test_a_stream_goes_on_at_once_without_who_has_left_it(moved: Path) -> None:
    run_dir = moved / "run"
    left = Counter({f"member-{i}": EPOCHS for i in range(len(STEPS_S))})
    for event in of_kind(run_dir, "moved"):
        left[event["member"]] = event["epoch"]
    private = {
        event["member"]
        for event in of_kind(run_dir, "epoch")
        if event["epoch"] < left[event["member"]] and event["private_batches"]
    }
    assert not private
    last = [event for event in of_kind(run_dir, "feeder") if event["cohort"] == 0][-1]
    assert last["consumed"] == N * sum(left.values()), "it fed each for as long as that read there"
    assert last["prepared"] == N * EPOCHS and last["members"] == 0
    assert last["detached"] == 0, "the one that waits until others have finished paces nobody any more"
    later = [e for e in of_kind(run_dir, "epoch", "member-3") if e["epoch"] >= left["member-3"]]
    assert {(e["shared_batches"], e["private_batches"]) for e in later} == {(0, 3)}


def test_a_member_shares_the_stream_that_it_has_joined(moved: Path) -> None:
    (event,) = of_kind(moved / "run", "moved", "member-2")
    later = [e for e in of_kind(moved / "run", "epoch", "member-2") if e["epoch"] >= event["epoch"]]
    assert sum(e["shared_batches"] for e in later) > 0, "as long as there is a feeder"
    assert sum(e["private_batches"] for e in later) > 0, "and none when it had died"


@pytest.mark.more  # what widening changes and does not in a member: tests/train/test_train_moves.py
def test_a_member_is_widened_between_two_epochs_and_all_ranks_of_another_leave_its_stream(tmp_path: Path) -> None:
    """A member of one worker gets a second after its second epoch; the run is stopped later and goes on. Of two
    equal members with two workers each one is sent on alone.
    """

    def change(controller: Any, event: Event) -> None:
        what = (event["type"], event.get("member"), event.get("epoch"))
        if what == ("epoch", "member-0", 1):
            widen = controller.session.commands.widen
            assert widen("member-0", 2) and not widen("member-0", 2)
            when_sent(controller, (tmp_path / "0 may go on").touch)
        if what == ("epoch", "member-2", 1):
            assert controller.session.commands.alone("member-2")
            when_sent(controller, (tmp_path / "2 may go on").touch)
        if what == ("epoch", "member-0", 5):
            controller.stop("asked to")

    def declare(*, elastic: bool = True) -> Ensemble:
        members: list[Any] = []
        for number, workers in enumerate((1, 2, 2)):
            params = {"lr": 0.1, "step_s": 0.02, "record": str(tmp_path / f"{number}")}
            if number != 1:  # its third epoch lasts until it has been told
                calls = 3 + 2 // workers + 1  # in an epoch: batches of training, of validation, of a checkpoint
                marker = str(tmp_path / f"{number} may go on")
                params |= {"fault": "wait", "after": 2 * calls + 1, "marker": marker}
            members.append(Member(params, workers=workers, seed=7))
        return an_ensemble(members, epochs=9, resources=NARROW, elastic=elastic)

    folder = tmp_path / "run"
    assert run(declare(), folder, change).stopped
    assert not run(declare(), folder).stopped
    first, second = of_kind(folder, "member", "member-0")
    assert (first["workers"], second["workers"], second["widened_from"]) == (1, 2, 1)
    stopped = of_kind(folder, "stopped", "member-0")[0]
    assert second["widened"] == {"from": 1, "epoch": stopped["epoch"]} and stopped["step"] == 0
    widths = [len(event["devices"]) for event in of_kind(folder, "placed", "member-0")]
    assert widths == [1, 2, 2], "the resume is as wide"
    state = fold(read_events(folder / "events.jsonl")).members["member-0"]
    assert (state.state, state.failures) == ("finished", 0)
    seen = recorded(tmp_path / "0")
    assert list(seen) == list(range(9)) and all(sorted(indices) == list(range(N)) for indices in seen.values())

    undisturbed([Member({"lr": 0.1}, seed=7)], tmp_path / "narrow", epochs=9)
    weights = [
        load_checkpoint(made.valid_checkpoint(fold(read_events(made.events)).members["member-0"]))["model"]
        for made in (RunDir(folder), RunDir(tmp_path / "narrow"))
    ]
    for name, tensor in weights[1].items():
        np.testing.assert_allclose(weights[0][name].numpy(), tensor.numpy(), rtol=1e-5, atol=1e-6)

    stays, leaves = (of_kind(folder, "finished", f"member-{n}")[0]["weights_sha256"] for n in (1, 2))
    assert stays == leaves and recorded(tmp_path / "1") == recorded(tmp_path / "2")
    [moved] = of_kind(folder, "moved", "member-2")
    assert moved["cohort"] is None
    with pytest.raises(StoreError, match="workers=2, now 1"):
        ensemble.submit(declare(elastic=False), folder, "local")
