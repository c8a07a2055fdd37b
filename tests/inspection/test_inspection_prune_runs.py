"""`ensemble prune-runs` removes old runs, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import inspected_runs
import pytest

from ensemble import Member
from ensemble.cli.parser import main
from ensemble.inspection.prune_runs import find_old_runs, remove_run
from ensemble.store import EventLog, RunDir, StoreError

DAY_S = 86400.0


def test_old_runs_are_listed_and_removed_when_that_is_asked_for_and_nothing_else_is(
    tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    for name in ("old", "source", "busy", "nights/monday"):
        shutil.copytree(trained, folder / name)
    members = [Member({"width": 8, "lr": 0.01}, start=f"{folder}/source/member-0")]
    inspected_runs.train(folder / "user", members=members, epochs=1)
    shutil.copytree(trained, tmp_path / "elsewhere")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "old" / "outside").symlink_to(tmp_path / "elsewhere")
    for name in ("notes", "broken"):
        (folder / name).mkdir()
    (folder / "notes" / "run.json").write_text("{}")
    (folder / "broken" / "events.jsonl").write_text("no log\n")
    before = sorted(folder.rglob("*"))
    busy = EventLog(RunDir(folder / "busy").events)
    try:
        last = max(run.last for run in find_old_runs(folder, -DAY_S))
        assert find_old_runs(folder, 14 * DAY_S, now=last + 13 * DAY_S) == []
        user = RunDir(folder / "user").events
        os.utime(user)
        listed = {run.path.name: run for run in find_old_runs(folder, 0.0, now=last)}
        assert set(listed) == {"old", "source", "busy", "monday"}, "the last event decides, here that of `user`"
        assert listed["busy"].kept == "it is in progress" and "/user was made from it" in listed["source"].kept
        assert listed["old"].kept == "" and listed["old"].size_bytes > 10_000

        assert main(["prune-runs", str(folder), "--keep", "14d"]) == 0
        assert "no run" in capsys.readouterr().out
        assert main(["prune-runs", str(folder), "--keep", "0h"]) == 0
        shown = capsys.readouterr().out
        assert "would be removed" in shown and "it is in progress" in shown
        assert sorted(folder.rglob("*")) == before, "nothing was removed"
        gone_on = find_old_runs(folder, 0.0)
        with EventLog(RunDir(folder / "nights" / "monday").events) as log:
            log.append("asked", request="r", verb="stop", member=None, done=True, said="")
        for run in gone_on:
            if run.path.name in ("monday", "busy"):
                with pytest.raises(StoreError, match="it is kept"):
                    remove_run(run)
        shutil.rmtree(folder / "user")  # nothing keeps `source` any more
        assert main(["prune-runs", str(folder), "--keep", "0h", "--yes", "--json", str(tmp_path / "rows")]) == 0
    finally:
        busy.close()
    rows = {Path(row["path"]).name: row["kept"] for row in json.loads((tmp_path / "rows").read_text())}
    assert rows == {"old": "", "source": "", "monday": "", "busy": "it is in progress"}
    assert {each.name for each in folder.iterdir()} == {"busy", "nights", "link", "notes", "broken"}
    assert not any((folder / "nights").iterdir()) and (tmp_path / "elsewhere" / "events.jsonl").exists()
    assert main(["prune-runs", str(folder / "link"), "--keep", "0h", "--yes"]) != 0
    assert (tmp_path / "elsewhere" / "events.jsonl").exists()
