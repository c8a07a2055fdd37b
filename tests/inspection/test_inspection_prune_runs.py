"""`ensemble prune-runs` removes old runs, and nothing else."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import edited_log
import event_dicts
import inspected_runs
import pytest

from ensemble import Member
from ensemble.cli.parser import main
from ensemble.inspection.prune_runs import find_old_runs, remove_run, remove_runs
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
    (folder / "old" / "tensorboard").mkdir()
    (folder / "old" / "tensorboard" / "outside").symlink_to(tmp_path / "elsewhere")
    (folder / "notes").mkdir()
    (folder / "notes" / "run.json").write_text("{}")
    before = sorted(folder.rglob("*"))
    busy = EventLog(RunDir(folder / "busy").events)
    try:
        last = max(run.last for run in find_old_runs(folder, -DAY_S))
        assert find_old_runs(folder, 14 * DAY_S, now=last + 13 * DAY_S) == []
        user = RunDir(folder / "user").events
        os.utime(user)
        listed = {run.path.name: run for run in find_old_runs(folder, 0.0, now=last)}
        assert set(listed) == {"old", "source", "busy", "monday"}, "the last event decides, here that of `user`"
        assert listed["busy"].kept == "it is in progress" and "/user may need it" in listed["source"].kept
        assert listed["old"].kept == "" and listed["old"].size_bytes > 10_000

        assert main(["prune-runs", str(folder), "--keep", "14d"]) == 0
        assert "no run" in capsys.readouterr().out
        assert main(["prune-runs", str(folder), "--keep", "0h"]) == 0
        shown = capsys.readouterr().out
        assert "would be removed" in shown and "it is in progress" in shown
        assert sorted(folder.rglob("*")) == before, "nothing was removed"
        gone_on = find_old_runs(folder, 0.0)
        with EventLog(RunDir(folder / "nights" / "monday").events) as log:
            log.append("request", request="r", verb="stop", member=None, done=True, message="")
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
    assert {each.name for each in folder.iterdir()} == {"busy", "nights", "link", "notes"}
    assert not any((folder / "nights").iterdir()) and (tmp_path / "elsewhere" / "events.jsonl").exists()
    assert main(["prune-runs", str(folder / "link"), "--keep", "0h", "--yes"]) != 0
    assert (tmp_path / "elsewhere" / "events.jsonl").exists()


def test_a_run_stays_that_a_run_may_need_and_one_that_holds_what_is_not_of_it(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs"
    names = ("relative", "linked", "declared", "outer", "outer/members/inner", "notes", "deep/a/b/c/old")
    for name in names:
        shutil.copytree(trained, folder / name)
    (folder / "notes" / "thoughts.txt").write_text("of mine")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    for number, start in enumerate(("relative/member-0", f"{tmp_path}/link/linked/member-0")):
        members = [Member({"width": 8, "lr": 0.01}, start=start)]
        inspected_runs.train(folder / f"user-{number}", members=members, epochs=1)
    assert b"link/linked" in (folder / "user-1" / "events.jsonl").read_bytes()
    (folder / "user-2").mkdir()
    shutil.copy(trained / "events.jsonl", folder / "user-2")  # a declaration that names another one
    (folder / "user-2" / "ensemble.pkl").write_bytes(pickle.dumps({"teacher": f"{folder}/declared"}))
    monkeypatch.chdir(tmp_path)
    for name in names:  # they have no event for so long
        log = folder / name / "events.jsonl"
        events = [json.loads(line) for line in edited_log.without_crc(log.read_bytes()).splitlines()]
        log.write_bytes(event_dicts.lines({**event, "t": event["t"] - 30 * DAY_S} for event in events))
    kept = {run.path.relative_to(folder).as_posix(): run.kept for run in find_old_runs(folder, 14 * DAY_S)}
    assert {name: why.rpartition("/")[2] for name, why in kept.items()} == {
        "relative": "user-0 may need it",
        "linked": "user-1 may need it",
        "declared": "user-2 may need it",
        "outer": "inner is in it",
        "outer/members/inner": "",
        "notes": "it has files that no run has written, such as thoughts.txt",
        "deep/a/b/c/old": "",
    }
    (folder / "user-2" / "ensemble.pkl").write_bytes(b"\x80\x05broken")
    with pytest.raises(StoreError, match=r"user-2 cannot be read.*not known"):
        find_old_runs(folder, 14 * DAY_S)


@pytest.mark.parametrize(
    "named",
    [Path("/w/runs/base"), Path("runs/base"), b"/w/runs/base", "/w/runs/base/members/m", Path("base"), "base",
     "sqlite:////w/runs/base/x.db"],
)  # fmt: skip
def test_a_run_is_named_by_all_that_may_be_a_path_of_it(named: object, tmp_path: Path, trained: Path) -> None:
    folder = tmp_path / "w" / "runs"
    for name in ("base", "basement", "user"):
        shutil.copytree(trained, folder / name)
    if isinstance(named, str | bytes) and len(named) > 4:
        where, root = (os.fsencode(folder), b"/w/runs") if isinstance(named, bytes) else (str(folder), "/w/runs")
        named = named.replace(root, where)  # type: ignore[arg-type]
    elif isinstance(named, Path) and named.is_absolute():
        named = folder / "base"
    (folder / "user" / "ensemble.pkl").write_bytes(pickle.dumps({"teacher": named}))
    with EventLog(RunDir(folder / "user").events) as log:
        log.append("request", request="r", verb="stop", member=None, done=True, message="")
    now = max(run.last for run in find_old_runs(folder, -DAY_S))
    kept = {run.path.name: run.kept for run in find_old_runs(folder, 0.0, now=now)}
    assert kept == {"base": f"{folder}/user may need it", "basement": ""}


@pytest.mark.parametrize(
    "name",
    ["members/member-0/my-analysis/thesis.ipynb", "members/notes.txt", "code/mine.py", "ledger-of-the-lab.xlsx",
     "loggers/x/own.doc", "data/my_labels.npy", "data/big/own.npy", "top.txt", "members/member-0/notes.txt"],
)  # fmt: skip
def test_a_run_with_a_file_of_the_user_stays_wherever_that_is(name: str, tmp_path: Path, trained: Path) -> None:
    shutil.copytree(trained, tmp_path / "runs" / "run")
    (found,) = find_old_runs(tmp_path / "runs", -DAY_S)
    assert found.kept == ""
    file = tmp_path / "runs" / "run" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    with pytest.raises(StoreError, match="was written by no run"):
        remove_run(found)
    (again,) = find_old_runs(tmp_path / "runs", -DAY_S)
    assert again.kept == f"it has files that no run has written, such as {name}" and file.exists()


def test_what_a_run_may_need_that_cannot_be_removed_stays(tmp_path: Path, trained: Path) -> None:
    folder = tmp_path / "runs"
    for name in ("source", "other"):
        shutil.copytree(trained, folder / name)
    members = [Member({"width": 8, "lr": 0.01}, start=f"{folder}/source/member-0")]
    inspected_runs.train(folder / "user", members=members, epochs=1)
    with EventLog(RunDir(folder / "source").events) as log:  # it has gone on after the run that may need it
        log.append("request", request="r", verb="stop", member=None, done=True, message="")
    found = {run.path.name: run for run in find_old_runs(folder, -DAY_S)}
    assert found["user"].needs == [folder / "source"] and not found["source"].needs
    with EventLog(RunDir(folder / "user").events) as log:
        log.append("request", request="r", verb="stop", member=None, done=True, message="")
    remove_runs(list(found.values()))
    assert "was continued meanwhile" in found["user"].kept
    assert found["source"].kept == f"{folder}/user, which is kept, may need it"
    assert sorted(path.name for path in folder.iterdir()) == ["source", "user"]
    remove_runs(find_old_runs(folder, -DAY_S))
    assert not any(folder.iterdir())


def test_a_removal_that_was_killed_is_finished_by_the_next(
    tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = tmp_path / "runs" / ".old.removed-by-ensemble"
    shutil.copytree(trained, left)
    for name in ("ensemble.pkl", "run.json"):
        (left / name).unlink()
    assert main(["prune-runs", str(tmp_path / "runs"), "--keep", "1000w", "--yes"]) == 0
    assert "removed in part" in capsys.readouterr().out
    assert list((tmp_path / "runs").iterdir()) == []
