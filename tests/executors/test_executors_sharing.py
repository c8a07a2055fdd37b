"""What one member does to the others of its cohort, on real feeders: it hangs, fails early.

A record that ends whoever prepares it costs no member its life for good, and is named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.event_dicts import fold, read_events
from kit.execute_members import HangsInAFeeder, an_ensemble, bad, keyed, poison, samples
from kit.finished_runs import hashes, of_kind
from kit.leftovers import wait_until

import ensemble
from ensemble import Resources
from ensemble.controller.attempts import Attempts
from ensemble.reporting.sections.feeders import pipeline_lines

NARROW = Resources(cpus_per_worker=0.1)


def test_a_hang_ends_the_guilty_attempt_only_and_nobody_waits_for_one_that_fails_before_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, marker = tmp_path / "run", tmp_path / "marker"

    def patience_s(attempts: Any) -> float:
        """Little only while one hangs: how long processes take to start is another matter."""
        hangs = marker.exists() and not of_kind(run_dir, "failed", "member-1")
        return 10.0 if hangs else 600.0

    monkeypatch.setattr(Attempts, "_hang_timeout_s", property(patience_s, lambda attempts, declared: None), False)
    hung = {"lr": 0.1, "fault": "hang", "after": 8, "marker": str(marker)}
    members: list[Any] = [{"lr": 0.1}, hung, {"lr": 0.2}, {"lr": 0.1, "fault": "build"}]
    declared = an_ensemble(members, epochs=8, capacity=64, retries=1, resources=NARROW)
    result = ensemble.submit(declared, run_dir, "local").wait()
    assert [row["state"] for row in result.members] == ["finished"] * 3 + ["failed"]
    assert [row["attempts"] for row in result.members[:3]] == [1, 2, 1]
    assert [event["reason"] for event in of_kind(run_dir, "failed", "member-1")] == ["hang"]
    first = [event for event in of_kind(run_dir, "epoch") if event["epoch"] == 0]
    assert len(first) == 3 and all(event["private_batches"] == 0 for event in first)
    assert max(event["waited_s"] for event in first) < 150, "half of the gate's time"


@pytest.mark.more
def test_a_feeder_that_hangs_while_it_starts_is_given_up_and_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ensemble.executors.node_services.START_S", 1.0)
    run_dir = tmp_path / "run"
    declared = an_ensemble(train=samples(96, 0).map(HangsInAFeeder()), valid=None, resources=NARROW)
    result = ensemble.submit(declared, run_dir, "local").wait()
    assert [(row["state"], row["attempts"]) for row in result.members] == [("finished", 1)] * 2
    assert sum(event["private_batches"] for event in of_kind(run_dir, "epoch")) == 2 * 2 * 3
    (lost,), (ended,) = of_kind(run_dir, "feeder_lost"), of_kind(run_dir, "sharing_ended")
    assert "it had not started after 1 s" in lost["detail"] and "it could not start" in ended["detail"]
    assert of_kind(run_dir, "feeder_restarted") == [], "what hangs would hang again"


@pytest.mark.more
def test_a_stop_reaches_members_that_wait_at_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ensemble.controller.controller.TICK_S", 0.0)
    # The one that hangs is not ended before we say so.
    monkeypatch.setattr("ensemble.controller.attempts.LINGER_S", 600.0)
    run_dir, records = tmp_path / "run", [tmp_path / "0", tmp_path / "1"]
    late = {"lr": 0.1, "fault": "wait", "after": 1, "marker": str(tmp_path / "marker")}
    members: list[Any] = [{"lr": 0.1 * (1 + n), "record": str(path)} for n, path in enumerate(records)] + [late]
    run = ensemble.submit(an_ensemble(members, epochs=200, capacity=64, resources=NARROW), run_dir, "local")
    # The ring holds two of an epoch's batches while the third member keeps the first: the others wait.
    wait_until(lambda: all(path.exists() and path.read_text().count("\n") == 2 for path in records), "two records")
    run.cancel("member-2")
    run.stop()
    wait_until(lambda: len(of_kind(run_dir, "stopped")) == 2, "the stops")
    (tmp_path / "marker").touch()
    states = [row["state"] for row in run.wait().members]
    assert states[:2] == ["stopped", "stopped"] and states[2] == "cancelled"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What members learn from the same records where the bad ones are mere errors."""
    run_dir = tmp_path_factory.mktemp("expected") / "run"
    ensemble.submit(an_ensemble(train=keyed(bad, "skip"), resources=NARROW), run_dir, "inline").wait()
    return hashes(run_dir)


@pytest.mark.more  # of a feeder and its readers alone: tests/pipelines/test_poison_records.py
@pytest.mark.parametrize("sharing", ["auto", "independent"])
def test_members_train_without_the_records_that_kill(
    sharing: str, tmp_path: Path, expected: dict[str, str | None]
) -> None:
    needs = Resources(cpus_per_worker=0.1, gpus_per_worker=0.0, memory_gb=1.0)  # nothing is measured before
    declared = an_ensemble(train=keyed(poison, "skip"), sharing=sharing, retries=1, resources=needs)
    result = ensemble.submit(declared, tmp_path / "run", "local").wait()
    assert [row["state"] for row in result.members] == ["finished"] * 2
    assert hashes(tmp_path / "run") == expected
    assert declared.stream.poison_records.codes == {}, "the next run of it may find the file mended"
    found = {(event["split"], event["index"]) for event in of_kind(tmp_path / "run", "bad_record")}
    assert found == {("train", 7), ("train", 70)}
    state = fold(read_events(tmp_path / "run" / "events.jsonl"))
    assert "sample 7 of train (arrays(" in str(pipeline_lines(state))
    attempts = [row["attempts"] for row in result.members]
    if sharing == "auto":
        assert attempts == [1, 1], "the feeder has found them before any member could"
    else:
        assert max(attempts) <= 3, "one death for each record at most, and more of them than retries"
        assert all("it was preparing sample" in event["error"] for event in of_kind(tmp_path / "run", "failed"))
