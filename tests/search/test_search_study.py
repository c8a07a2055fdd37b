import math
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
import pytest
from event_dicts import write_study
from optuna.trial import TrialState

from ensemble.store import StoreError

Event = dict[str, Any]


def event(kind: str, t: float = 0.0, **fields: Any) -> Event:
    return {"v": 2, "t": 1000.0 + t, "type": kind, **fields}


def begun(run_id: str = "r1", name: str = "digits") -> list[Event]:
    header = event(
        "run_started", name=name, run_id=run_id, mode="list", objective="accuracy", direction="max", epochs=2
    )
    members = [
        event("member", member=f"member-{n}", number=n, params=params)
        for n, params in enumerate(
            ({"lr": 0.1, "width": 16, "act": "relu"}, {"lr": 0.3, "width": 32, "act": "gelu"})
        )
    ]
    return [header, *members]


def trained(number: int, values: list[float], *, end: str | None = "finished", **fields: Any) -> list[Event]:
    who: Event = {"member": f"member-{number}", "attempt": 0}
    events = [event("placed", 1, **who, node="n0"), event("started", 2, **who, epoch=0, step=0)]
    events += [event("epoch", 3 + e, **who, epoch=e, metrics={"accuracy": v}) for e, v in enumerate(values)]
    return [*events, event(end, 9, **who, **fields)] if end else events


def test_a_fixed_list_is_a_study_with_numbers_as_parameters_and_the_rest_as_attributes(tmp_path: Path) -> None:
    events = [*begun(), *trained(0, [0.5, 0.7], weights_sha256="ab"), *trained(1, [0.4], end=None)]
    study = write_study(events, tmp_path / "optuna.journal")
    assert (
        study.study_name == "digits" and study.direction.name == "MAXIMIZE" and study.metric_names == ["accuracy"]
    )
    done, running = study.trials
    assert done.params == {"lr": 0.1, "width": 16.0} and done.state == TrialState.COMPLETE and done.value == 0.7
    assert done.distributions["lr"] == optuna.distributions.FloatDistribution(0.1, 0.3)
    assert done.intermediate_values == {1: 0.5, 2: 0.7}
    assert done.user_attrs["act"] == "relu" and done.user_attrs["weights_sha256"] == "ab"
    assert done.datetime_start is not None and done.datetime_start.timestamp() == 1001.0
    assert running.state == TrialState.RUNNING and running.intermediate_values == {1: 0.4}
    assert study.best_trial.number == 0


def test_a_trial_takes_as_long_as_it_took_when_clocks_are_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        shift = datetime(2026, 10, 25, 1, tzinfo=UTC).timestamp() - 1005  # summer time ends within the trial
        events = [{**each, "t": each["t"] + shift} for each in [*begun(), *trained(0, [0.5, 0.7])]]
        done = write_study(events, tmp_path / "optuna.journal").trials[0]
    finally:
        monkeypatch.undo()
        time.tzset()
    assert done.duration == timedelta(seconds=8) and done.datetime_start == datetime(2026, 10, 25, 2, 59, 56)


@pytest.mark.parametrize(
    ("end", "fields", "state"),
    [
        ("pruned", {"epoch": 1}, TrialState.PRUNED),
        ("cancelled", {}, TrialState.FAIL),
        ("failed", {"error": "nan", "reason": "nan", "retry": False}, TrialState.FAIL),
        ("failed", {"error": "lost", "reason": "lost", "retry": True}, TrialState.RUNNING),
        ("stopped", {"epoch": 1, "step": 0}, TrialState.RUNNING),
    ],
)
def test_each_end_of_a_member_is_the_like_state_of_a_trial(end: str, fields: Event, state: TrialState) -> None:
    first, second = write_study([*begun(), *trained(0, [0.5], end=end, **fields)], None).trials
    assert first.state == state and second.state == TrialState.WAITING


def stories() -> list[Event]:
    lost = {"end": "failed", "error": "lost", "reason": "lost", "retry": True}
    again = [e | {"attempt": 1} for e in trained(0, [0.6, 0.7], metrics={"accuracy": 0.7})]
    added = event(
        "member", 20, member="member-2", number=2, params={"lr": 9.0, "width": 8, "act": "tanh", "new": 1}
    )
    failed = {"end": "failed", "error": "x", "reason": "error", "retry": False}
    return [
        *begun(),
        *trained(0, [0.6], **lost),
        *again,
        added,
        *trained(1, [math.nan], **failed),
        *trained(2, [0.1]),
    ]


def shown(study: optuna.Study) -> list[tuple[Any, ...]]:
    return [(t.number, t.state, t.values, t.params, str(t.intermediate_values)) for t in study.trials]


@pytest.mark.parametrize("kind", ["journal", "memory", "sqlite"])
def test_following_the_log_step_by_step_gives_the_study_of_the_whole_log(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "optuna.journal"
    storage: Any = {
        "journal": path,
        "memory": optuna.storages.InMemoryStorage(),
        "sqlite": f"sqlite:///{tmp_path}/db",
    }[kind]
    events = stories()
    cuts = range(3, len(events) + 1, 4 if kind == "sqlite" else 1)
    for cut in (*cuts, len(events)):
        study = write_study(events[:cut], storage)
    assert shown(study) == shown(write_study(events, None))
    if kind == "journal":
        before = path.read_bytes()
        write_study(events, path)
        assert path.read_bytes() == before  # nothing new, nothing written


def test_a_study_that_says_what_the_log_does_not_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "optuna.journal"
    write_study([*begun(), *trained(0, [0.5])], path)
    other = [*begun(), *trained(0, [0.9])]
    assert shown(write_study(other, path)) == shown(write_study(other, None))
    assert len(write_study(begun()[:2], path).trials) == 1


def test_a_study_of_another_run_is_not_touched(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/db"
    write_study([*begun("r1"), *trained(0, [0.5])], storage)
    assert write_study(begun("r2"), storage).study_name == "digits-r2"
    assert len(write_study(begun("r2", "letters"), storage).trials) == 2
    assert write_study([*begun("r1"), *trained(0, [0.5])], storage).trials[0].value == 0.5


@pytest.mark.parametrize("damage", [b'{"op_code":', b'{"op_code": 6, "wor\n{"op_code": 4}\n'])
def test_a_damaged_journal_is_mended_from_the_log(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "events.jsonl").write_text("{}\n")  # it is the run's own journal
    path = tmp_path / "optuna.journal"
    events = [*begun(), *trained(0, [0.5])]
    write_study(events, path)
    with open(path, "ab") as file:
        file.write(damage)
    longer = [*events, *trained(1, [0.9])]
    assert shown(write_study(longer, path)) == shown(write_study(longer, None))
    assert len(optuna.load_study(study_name="digits", storage=write_study(longer, path)._storage).trials) == 2


def test_a_lock_left_by_a_killed_process_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is believed ends this test by its time limit: it would be waited for an hour."""
    monkeypatch.setattr("ensemble.search.storage.STALE_LOCK_S", 3600)
    path = tmp_path / "optuna.journal"
    write_study(begun(), path)
    lock = path.with_name("optuna.journal.lock")
    os.symlink(path, lock)
    os.utime(lock, (time.time() - 7200,) * 2, follow_symlinks=False)
    write_study([*begun(), *trained(0, [0.5])], path)
    assert not lock.is_symlink()


def test_a_storage_that_cannot_be_opened_is_said_without_its_password() -> None:
    with pytest.raises(StoreError, match="cannot open the Optuna storage") as caught:
        write_study(begun(), "nosuchdb://user:secret@host/db")
    assert "secret" not in str(caught.value)
