"""Members that are served samples of a pipeline which is said to be theirs, and is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from execute_members import an_ensemble
from finished_runs import finished_hashes, of_kind
from verified_members import draw, other_in_a_feeder, train_by_environment, train_that_drifts

import ensemble
from ensemble import Member, Resources, SpecError
from ensemble.meter import ledger
from ensemble.store import RunDir, read_events
from pipelines import Pipeline

NARROW = Resources(cpus_per_worker=0.1, gpus_per_worker=0.0, memory_gb=1.0)


def test_a_stage_that_reads_another_environment_is_found_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feeder has the environment of one of two members."""
    monkeypatch.setenv("LOOK", "1")
    declared = an_ensemble(
        [{"lr": 0.1, "look": 1}, {"lr": 0.1, "look": 3}],
        train=train_by_environment, valid=None, resources=NARROW,
    )  # fmt: skip
    ensemble.submit(declared, tmp_path / "alone", "inline").wait()
    run = ensemble.submit(declared, tmp_path / "run", "local")
    run.wait()
    (found,) = of_kind(tmp_path / "run", "sample_difference")
    assert (found["action"], found["split"], found["field"], found["verdict"]) == (
        "alone",
        "train",
        "x",
        "different",
    )
    assert found["size"] > 0 and len(found["position"]) == 1
    assert finished_hashes(tmp_path / "run") == finished_hashes(tmp_path / "alone")
    private = {e["member"]: e["private_batches"] for e in of_kind(tmp_path / "run", "epoch")}
    assert sorted(private.values()) == [0, 3] and private[found["member"]] == 3
    assert ledger(read_events(tmp_path / "run" / "events.jsonl")).cpu_by_role()["verify"] > 0


def drift_after_an_epoch(run_dir: Path, marker: Path, **options: Any) -> ensemble.Result:
    """A run in which the feeder prepares other samples as soon as a member has ended an epoch."""
    members = [{"lr": 0.1, "marker": str(marker)}, {"lr": 0.2, "marker": str(marker)}]

    def begin_to_drift(event: dict[str, Any]) -> None:
        if event["type"] == "epoch":
            marker.touch()

    declared = an_ensemble(
        members, train=train_that_drifts, valid=None, epochs=4, batch_size=100, capacity=200, resources=NARROW,
        retries=0, **options,
    )  # fmt: skip
    return ensemble.submit(declared, run_dir, "local", on_event=begin_to_drift).wait()


@pytest.fixture(scope="module")
def weights_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Of the members of `drift_after_an_epoch`, each of which prepares alone."""
    run_dir = tmp_path_factory.mktemp("alone")
    members = [{"lr": lr, "marker": str(run_dir / "never")} for lr in (0.1, 0.2)]
    declared = an_ensemble(members, train=train_that_drifts, valid=None, epochs=4, batch_size=100)
    ensemble.submit(declared, run_dir / "run", "inline").wait()
    return finished_hashes(run_dir / "run")


def test_a_late_difference_makes_a_member_begin_anew_and_alone(
    tmp_path: Path, weights_alone: dict[str, str | None]
) -> None:
    result = drift_after_an_epoch(tmp_path / "run", tmp_path / "marker")
    assert [row["state"] for row in result.members] == ["finished"] * 2
    assert finished_hashes(tmp_path / "run") == weights_alone
    found = of_kind(tmp_path / "run", "sample_difference")
    assert {event["member"] for event in found} == {"member-0", "member-1"}
    assert {(event["action"], event["field"]) for event in found} == {("anew", "x")}
    assert all(event["size"] == pytest.approx(1.0, abs=1e-5) for event in found)
    failed = of_kind(tmp_path / "run", "failed")
    assert all(event["reason"] == "sharing" and event["retry"] for event in failed), "beyond the retries"
    last = {event["member"]: event for event in of_kind(tmp_path / "run", "started")}
    assert all((event["epoch"], event["step"], event["attempt"]) == (0, 0, 1) for event in last.values())
    text = RunDir(tmp_path / "run").report.read_text()
    assert "are not what its own pipeline prepares" in text and "it begins anew" in text


def test_a_late_difference_ends_a_member_where_that_is_asked_for(tmp_path: Path) -> None:
    result = drift_after_an_epoch(tmp_path / "run", tmp_path / "marker", verify_sharing="fail")
    assert [(row["state"], row["attempts"]) for row in result.members] == [("failed", 1)] * 2
    assert {event["action"] for event in of_kind(tmp_path / "run", "sample_difference")} == {"fails"}
    (error, _) = (event["error"] for event in of_kind(tmp_path / "run", "failed"))
    assert "what it was served of train is not what its own pipeline prepares, epoch" in error and "'x'" in error


def test_nothing_is_compared_where_nobody_asks(tmp_path: Path, weights_alone: dict[str, str | None]) -> None:
    result = drift_after_an_epoch(tmp_path / "run", tmp_path / "marker", verify_sharing=False)
    assert [(row["state"], row["attempts"]) for row in result.members] == [("finished", 1)] * 2
    assert of_kind(tmp_path / "run", "sample_difference") == []
    assert finished_hashes(tmp_path / "run") != weights_alone
    assert "verify" not in ledger(read_events(tmp_path / "run" / "events.jsonl")).cpu_by_role()


def test_a_resident_set_that_is_another_here_is_prepared_by_its_member(tmp_path: Path) -> None:
    valid = Pipeline(draw(48, 1)).map(other_in_a_feeder, id="other")
    options: dict[str, Any] = {"train": Pipeline(draw(96, 0), seed=0), "valid": valid, "epochs": 1}
    ensemble.submit(an_ensemble(**options), tmp_path / "alone", "inline").wait()
    ensemble.submit(an_ensemble(**options, resources=NARROW), tmp_path / "run", "local").wait()
    found = of_kind(tmp_path / "run", "sample_difference")
    assert {(event["member"], event["split"], event["action"]) for event in found} == {
        (f"member-{i}", "valid", "alone") for i in range(2)
    }
    metrics = [
        {event["member"]: event["metrics"] for event in of_kind(tmp_path / name, "finished")}
        for name in ("alone", "run")
    ]
    assert metrics[0] == metrics[1]
    assert all(event["private_batches"] == 0 for event in of_kind(tmp_path / "run", "epoch"))


def test_a_mode_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(SpecError, match="verify_sharing must be 'alone', 'fail' or False, got 'never'"):
        an_ensemble(verify_sharing="never")


@pytest.mark.more
def test_all_ranks_of_a_member_leave_a_stream_that_is_not_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOK", "1")
    members: list[Any] = [Member({"lr": 0.1, "look": look}, workers=2) for look in (1, 3)]
    for name, sharing in (("alone", "independent"), ("run", "auto")):
        declared = an_ensemble(
            members, train=train_by_environment, valid=None, sharing=sharing, resources=NARROW, retries=0
        )
        ensemble.submit(declared, tmp_path / name, "local").wait()
    (found,) = of_kind(tmp_path / "run", "sample_difference")
    assert finished_hashes(tmp_path / "run") == finished_hashes(tmp_path / "alone")
    private = {event["member"]: event["private_batches"] for event in of_kind(tmp_path / "run", "epoch")}
    assert private[found["member"]] == 3 and sorted(private.values()) == [0, 3]
