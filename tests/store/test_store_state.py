from typing import Any

import pytest
from kit.event_dicts import apply_event, fold, ledger, project, typed

from ensemble.reporting import status_rows
from ensemble.store import MemberState, RunState

Event = tuple[str, dict[str, Any]]


def story(*events: Event) -> list[dict[str, Any]]:
    return [{"v": 2, "t": 100.0 + i, "type": kind, **fields} for i, (kind, fields) in enumerate(events)]


def started(resumed: bool = False) -> Event:
    fields = {"name": "digits", "run_id": "r", "executor": "local", "mode": "list", "objective": "accuracy"}
    return "run_started", {**fields, "direction": "max", "epochs": 3, "members": 2, "resumed": resumed}


def rows_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return status_rows(project(events))


def of(kind: str, number: int = 0, attempt: int = 0, **fields: Any) -> Event:
    return kind, {"member": f"member-{number}", "attempt": attempt, **fields}


def declared(number: int = 0) -> Event:
    return "member", {"member": f"member-{number}", "number": number, "params": {"lr": 0.1}, "first_epoch": None}


def placed(number: int = 0, attempt: int = 0) -> Event:
    return of("placed", number, attempt, node="n0", devices=[0], cohort=0, feeder=None, first_epoch=2)


def epoch(done: int, accuracy: float | None, number: int = 0, attempt: int = 0) -> Event:
    return of("epoch", number, attempt, epoch=done, step=10, metrics={"accuracy": accuracy}, samples_per_s=50.0)


BEGUN = (started(), declared(0), declared(1), placed(0), of("started", epoch=0, step=0))


def test_a_member_goes_from_waiting_to_finished() -> None:
    state = RunState()
    seen = []
    finish = of("finished", epoch=3, metrics={"accuracy": 0.9}, weights_sha256="ab")
    for event in story(*BEGUN, epoch(0, 0.5), of("checkpoint", epoch=1, step=0, path="p"), finish):
        apply_event(state, typed(event))
        if "member-0" in state.members:
            seen.append(state.members["member-0"].state)
    assert list(dict.fromkeys(seen)) == ["waiting", "placed", "running", "finished"]
    member = state.members["member-0"]
    assert member.first_epoch == 2 and member.identity["first_epoch"] == 2 and member.params == {"lr": 0.1}
    assert member.weights_sha256 == "ab" and member.metrics == {"accuracy": 0.9}
    (span,) = member.spans
    assert (span.placed, span.started, span.ended, span.outcome) == (103.0, 104.0, 107.0, "finished")
    assert state.members["member-1"].state == "waiting"


def test_a_status_row_has_the_promised_columns_and_then_all_metrics() -> None:
    rows = rows_of(story(*BEGUN, epoch(0, 0.5)))
    promised = {"member": "member-0", "state": "running", "epoch": 1, "metric": 0.5, "node": "n0", "attempts": 1}
    promised |= {"samples_per_s": 50.0, "cpu_s": 0, "energy_j": None, "energy_origin": "unavailable"}
    promised |= {"full_cpu_s": 0, "full_energy_j": None, "full_energy_origin": "unavailable", "mean_w": None}
    promised |= {"gpu_s": None, "metrics": {"accuracy": 0.5}, "params": {"lr": 0.1}, "seed": rows[0]["seed"]}
    assert rows[0] | {"cpu_s": 0, "full_cpu_s": 0} == promised and list(rows[0]) == list(promised)
    assert rows[1]["metric"] is None and rows[1]["cpu_s"] is None and rows[1]["attempts"] == 0


def test_a_failed_member_with_a_retry_waits_again_and_repeats_no_epoch() -> None:
    lost = of("failed", error="killed", reason="lost", retry=True)
    events = [*BEGUN, epoch(0, 0.5), of("checkpoint", epoch=1, step=0, path="p"), epoch(1, 0.6), lost]
    state = fold(story(*events))
    member = state.members["member-0"]
    assert (member.state, member.attempts, member.failures, member.error) == ("waiting", 1, 1, "killed")
    again = [placed(attempt=1), of("started", attempt=1, epoch=1, step=0)]
    resumed = fold(story(*events, *again)).members["member-0"]
    assert (resumed.epoch, resumed.attempts, resumed.metrics) == (1, 2, {"accuracy": 0.5})
    done = fold(story(*events, *again, epoch(1, 0.6, attempt=1))).members["member-0"]
    assert [e.epoch for e in done.history] == [0, 1] and done.failures == 1
    member = fold(story(*events, *again, started(resumed=True))).members["member-0"]
    assert (member.failures, member.attempts) == (0, 2), "a resume counts afresh"


def test_late_news_of_an_attempt_that_was_given_up_changes_nothing() -> None:
    lost = of("failed", error="lost", reason="lost", retry=True)
    events = [*BEGUN, lost, placed(attempt=1), of("started", attempt=1, epoch=0, step=0)]
    late = [epoch(0, 0.1), of("finished", epoch=1, metrics={}), of("progress", epoch=5, step=5, steps=9)]
    before, after = fold(story(*events)).members["member-0"], fold(story(*events, *late)).members["member-0"]
    assert before == after


@pytest.mark.parametrize("ending", [[], [("run_stopped", {"reason": "asked to"})]])
def test_a_run_that_was_killed_or_stopped_is_taken_up_again(ending: list[Event]) -> None:
    events = [*BEGUN, of("checkpoint", epoch=1, step=4, path="p"), placed(1), *ending]
    interrupted = fold(story(*events))
    assert (interrupted.ended is None) == (not ending)
    states = [member.state for member in interrupted.members.values()]
    assert states == (["stopped", "stopped"] if ending else ["running", "placed"])
    state = fold(story(*events, started(resumed=True)))
    assert state.ended is None and state.starts == 2 and state.started == 100.0
    assert [m.state for m in state.members.values()] == ["waiting", "waiting"]
    checkpoint = state.members["member-0"].checkpoint
    assert checkpoint is not None and checkpoint.step == 4
    assert state.members["member-0"].spans[0].ended is not None


def test_a_resume_takes_up_what_failed_unless_its_loss_was_no_number() -> None:
    for reason in ("disk", "error", "oom", "lost", "hang", "nan"):
        failed = of("failed", error="it broke", reason=reason, retry=False)
        ended = story(*BEGUN, failed, ("run_finished", {"wall_s": 1.0}), started(resumed=True))
        assert fold(ended[:-1]).members["member-0"].state == "failed"
        assert fold(ended).members["member-0"].state == ("failed" if reason == "nan" else "waiting"), reason


@pytest.mark.parametrize("heard", [True, False])
def test_an_epoch_that_a_killed_controller_did_not_hear_of_is_told_by_the_next_attempt(heard: bool) -> None:
    last = {"epoch": 1, "step": 10, "metrics": {"accuracy": 0.6}, "samples_per_s": 50.0, "of_a_later_version": 1}
    events = [*BEGUN, epoch(0, 0.5), *([epoch(1, 0.6)] if heard else []), started(resumed=True), placed(0, 1)]
    state = fold(story(*events, of("started", attempt=1, epoch=2, step=3, last_epoch=last)))
    member = state.members["member-0"]
    assert [(e.epoch, e.metrics["accuracy"]) for e in member.history] == [(0, 0.5), (1, 0.6)]
    assert (member.epoch, member.step, member.metrics) == (2, 3, {"accuracy": 0.6})
    assert all(event.t > 0 and event.member == "member-0" and event.attempt in (0, 1) for event in member.history)


def evaluated(done: int, step: int, accuracy: float, attempt: int = 0) -> Event:
    return of("progress", 0, attempt, epoch=done, step=step, steps=10, metrics={"accuracy": accuracy, "f1": None})


def list_values(member: MemberState) -> list[tuple[int, int | None, float]]:
    return [(event.epoch, event.step, event.metrics["accuracy"]) for event in member.list_measured()]


def test_an_evaluation_within_an_epoch_is_shown_before_the_epoch_has_ended() -> None:
    steps = of("progress", epoch=1, step=5, steps=10)
    events = [*BEGUN, epoch(0, 0.5), evaluated(1, 4, 0.6), steps]
    member = fold(story(*events)).members["member-0"]
    assert member.metrics == {"accuracy": 0.5} and member.latest_metrics == {"accuracy": 0.6}
    (row, _) = rows_of(story(*events))
    assert (row["epoch"], row["metric"], row["metrics"]) == (1, 0.6, {"accuracy": 0.6})
    assert list_values(member) == [(0, 10, 0.5), (1, 4, 0.6)]
    ended = fold(story(*events, evaluated(1, 8, 0.7), epoch(1, 0.65))).members["member-0"]
    assert ended.latest_metrics == {"accuracy": 0.65}, "of the end of the epoch, once it is there"


def test_evaluations_that_are_repeated_or_were_lost_are_listed_once() -> None:
    before = [*BEGUN, evaluated(0, 2, 0.1), epoch(0, 0.5), evaluated(1, 2, 0.6), evaluated(1, 4, 0.7)]
    lost = of("failed", error="killed", reason="lost", retry=True)
    again = [*before, lost, placed(attempt=1), of("started", attempt=1, epoch=1, step=3)]
    resumed = fold(story(*again)).members["member-0"]
    assert list_values(resumed) == [(0, 10, 0.5), (1, 2, 0.6)], "of the first epoch its own event names none"
    assert resumed.latest_metrics == {"accuracy": 0.6}
    repeated = fold(story(*again, evaluated(1, 2, 0.6, attempt=1))).members["member-0"]
    assert list_values(repeated) == list_values(resumed), (
        "a checkpoint is written before the evaluation at its step"
    )
    kind, fields = epoch(1, 0.8, attempt=1)
    named = {"validations": [[2, {"accuracy": 0.6}], [4, {"accuracy": 0.7, "f1": None}]]}
    ended = fold(story(*again, (kind, {**fields, **named}))).members["member-0"]
    assert list_values(ended) == [(0, 10, 0.5), (1, 2, 0.6), (1, 4, 0.7), (1, 10, 0.8)]
    first, second = ended.evaluations
    assert (first.attempt, second.attempt, second.metrics) == (0, 1, {"accuracy": 0.7}) and first.t < second.t


def used(cpu_s: float, pid: int = 1, role: str = "train", number: int | None = 0) -> Event:
    member = None if number is None else f"member-{number}"
    return "usage", {"node": "n0", "role": role, "member": member, "rank": 0, "pid": pid, "cpu_s": cpu_s}


@pytest.mark.parametrize(("origin", "given_as"), [("measured", "attributed"), ("estimated", "estimated")])
def test_a_status_row_says_of_cpu_time_and_energy_what_the_ledger_says(origin: str, given_as: str) -> None:
    power = ("power", {"node": "n0", "watts": 5.0, "energy_j": 30.0, "origin": origin, "source": "s"})
    use = [used(1.0), used(2.0, pid=2, number=1), used(3.0, pid=3, role="feed", number=None)]
    events = story(*BEGUN, *use, power, power)
    used_by = ledger(events)
    for row in rows_of(events):
        total = used_by.member(row["member"])
        assert row["energy_j"] == total.energy_j and total.energy_j is not None and total.energy_j > 0
        assert (row["cpu_s"], row["energy_origin"]) == (total.cpu_s, given_as)


def test_types_and_fields_of_a_later_minor_version_are_ignored() -> None:
    plain = fold(story(*BEGUN))
    state = fold([*story(*BEGUN), {"v": 2, "t": plain.updated, "type": "novelty", "member": "member-0", "x": 1}])
    assert state == plain


def test_a_member_that_moves_is_in_one_cohort_after_the_other() -> None:
    apart = of("moved", epoch=1, cohort=1, feeder="f-1", shared=True)
    alone, finish = of("moved", epoch=2, cohort=None, feeder=None), of("finished", epoch=3, metrics={})
    member = fold(story(*BEGUN, epoch(0, 0.5), apart, epoch(1, 0.5), alone, finish)).members["member-0"]
    assert (member.cohort, member.feeder, member.attempts) == (None, None, 1)
    spans = [(span.cohort, span.placed, span.ended, span.outcome) for span in member.spans]
    assert spans == [(0, 103.0, 106.0, "moved"), (1, 106.0, 108.0, "moved"), (None, 108.0, 109.0, "finished")]


def test_a_member_that_has_ended_needs_its_last_checkpoint_only() -> None:
    saved = [of("checkpoint", epoch=n, step=0, path=f"p{n}") for n in (1, 2)]
    member = fold(story(*BEGUN, *saved)).members["member-0"]
    assert [name for name, _ in member.list_checkpoints()] == ["p2", "p1"]
    for ending in ("pruned", "cancelled", "failed", "finished"):
        assert fold(story(*BEGUN, *saved, of(ending))).members["member-0"].list_checkpoints() == [("p2", None)]


def test_a_member_that_is_repaired_goes_on_with_the_present_code_for_all_who_read_the_log() -> None:
    start, again, more = (
        (kind, {**fields, "code": code}) for code in "abc" for kind, fields in [started(code != "a")]
    )
    saved = [of("checkpoint", epoch=1, step=0, path="p"), of("finished")]
    events = story(start, *BEGUN[1:], *saved, again, more, of("damaged", file="predictions", code="c"))
    controller = fold(events[:-2])
    apply_event(controller, typed(events[-1]))
    controller.updated = events[-3]["t"]
    for event in events[-2:]:
        apply_event(controller, typed(event))
    assert controller == fold(events)
    assert (controller.members["member-0"].code, controller.members["member-0"].earlier_code) == ("c", "a")


def test_a_member_that_learned_from_samples_not_its_own_has_no_checkpoint_and_shares_no_more() -> None:
    cases = [("none", "train", False, True), ("alone", "train", True, True), ("alone", "valid", False, True)]
    cases += [("anew", "train", True, False), ("anew", "valid", True, False), ("fails", "train", False, False)]
    for action, split, is_alone, has_checkpoint in cases:
        found = of("sample_difference", action=action, split=split, result="different")
        state = fold(story(*BEGUN, of("checkpoint", epoch=1, step=0, path="p"), found, started(resumed=True)))
        member = state.members["member-0"]
        assert (member.is_alone, member.checkpoint is not None) == (is_alone, has_checkpoint), (action, split)
        assert not state.members["member-1"].is_alone


def further(epochs: int = 8, **fields: Any) -> Event:
    kind, begun = started(resumed=True)
    return kind, {**begun, "more_epochs": {"epochs": epochs, "members": {"member-0": 4}, "notes": [], **fields}}


def checkpoint(done: int, attempt: int = 0) -> Event:
    return of("checkpoint", attempt=attempt, epoch=done, step=0, path=f"checkpoint-{attempt}-{done}-0", digest="d")


FINISHED = of("finished", epoch=3, metrics={"accuracy": 0.9}, weights_sha256="ab", predictions={"valid": "v"})
COMBINED = (
    "combined",
    {"split": "valid", "members": ["member-0"], "weights": {"member-0": 1.0}, "method": "average"},
)
EXTENDED: tuple[Event, ...] = (
    *(*BEGUN, *(epoch(n, 0.5) for n in range(4)), checkpoint(4), FINISHED, COMBINED, ("run_finished", {})),
    *(further(keeps_results=True), placed(attempt=1), of("started", attempt=1, epoch=4, step=0)),
    *(epoch(4, 0.1, attempt=1), checkpoint(5, attempt=1)),
)
FAILED = of("failed", attempt=1, reason="nan", error="the loss is nan", retry=False)


def test_a_member_that_is_trained_further_keeps_its_result() -> None:
    state = fold(story(*EXTENDED))
    member, used = state.members["member-0"], state.as_finished()
    assert (member.state, member.epoch, member.identity["epochs"]) == ("running", 5, 8)
    result = used.members["member-0"]
    assert (result.state, result.epoch, result.weights_sha256, len(result.history)) == ("finished", 4, "ab", 4)
    assert result.checkpoint is not None and result.checkpoint.path == "checkpoint-0-4-0"
    assert result.predictions == {"valid": "v"} and used.combined == state.combined is not None
    assert member.latest_metrics == {"accuracy": 0.9}
    assert "checkpoint-0-4-0" in [name for name, _ in member.list_kept()]


@pytest.mark.parametrize("end", [FAILED, of("cancelled", attempt=1)], ids=["failed", "cancelled"])
def test_further_epochs_without_success_leave_the_member_as_it_was(end: Event) -> None:
    before, state = fold(story(*EXTENDED[:12])), fold(story(*EXTENDED, end))
    member, old = state.members["member-0"], before.members["member-0"]
    for name in ("state", "epoch", "metrics", "history", "checkpoint", "predictions", "weights_sha256"):
        assert getattr(member, name) == getattr(old, name), name
    assert member.identity.get("epochs_before") is None and member.result is None
    assert state.combined == before.combined is not None
    assert member.unextended is not None
    again = fold(story(*EXTENDED, end, further(keeps_results=True)))
    assert again.members["member-0"].unextended is None and again.members["member-0"].result is not None


def test_a_stop_and_a_killed_controller_keep_the_result_and_new_ones_take_its_place() -> None:
    stopped = (of("stopped", attempt=1, epoch=5, step=0), ("run_stopped", {"reason": "asked to"}))
    for ending in ((), stopped):
        state = fold(story(*EXTENDED, *ending, started(resumed=True)))
        assert (state.members["member-0"].state, state.members["member-0"].epoch) == ("waiting", 5)
        assert state.as_finished().members["member-0"].epoch == 4
    end = of("finished", attempt=1, epoch=7, metrics={"accuracy": 0.95}, weights_sha256="cd")
    state = fold(story(*EXTENDED, end))
    assert state.members["member-0"].result is None and state.as_finished().combined is None
    assert state.combined is not None, "the figures of the last combination, until there is another"
    assert fold(story(*EXTENDED, end, COMBINED)).as_finished().combined is not None


def test_of_early_logs_the_further_epochs_replace_the_result() -> None:
    state = fold(story(*EXTENDED[:13], further(), *EXTENDED[14:], FAILED))
    assert (state.members["member-0"].state, state.combined) == ("failed", None)
