"""A record that ends whoever prepares it, in a run: it costs no member its life for good, and is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.event_dicts import fold, read_events
from kit.execute_members import an_ensemble, bad, keyed, poison
from kit.finished_runs import hashes, of_kind

import ensemble
from ensemble import Resources
from ensemble.reporting.sections.feeders import pipeline_lines

NARROW = Resources(cpus_per_worker=0.1, gpus_per_worker=0.0, memory_gb=1.0)


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
    declared = an_ensemble(train=keyed(poison, "skip"), sharing=sharing, retries=1, resources=NARROW)
    result = ensemble.submit(declared, tmp_path / "run", "local").wait()
    assert [row["state"] for row in result.members] == ["finished"] * 2
    assert hashes(tmp_path / "run") == expected
    assert declared.stream.poison_records.codes == {}, "the next run of it may find the file mended"
    found = {(event["split"], event["index"]) for event in of_kind(tmp_path / "run", "bad_record")}
    assert found == {("train", 7), ("train", 70)}
    assert "sample 7 of train (arrays(" in str(
        pipeline_lines(fold(read_events(tmp_path / "run" / "events.jsonl")))
    )
    attempts = [row["attempts"] for row in result.members]
    if sharing == "auto":
        assert attempts == [1, 1], "the feeder has found them before any member could"
    else:
        assert max(attempts) <= 3, "one death for each record at most, and more of them than retries"
        assert all("it was preparing sample" in event["error"] for event in of_kind(tmp_path / "run", "failed"))
