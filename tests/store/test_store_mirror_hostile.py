"""Mirrors that somebody has rewritten: a log steers neither which code runs nor where files are written."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from event_dicts import fold, read_events
from test_store_mirror import Bomb, begin, code_of, edit_head, put, train, url_of

import ensemble
from ensemble.controller.repair import restore_files
from ensemble.store import DamagedError, EventLog, RunDir, StoreError
from ensemble.store.digests import digest_bytes
from ensemble.store.mirror import fetch_run
from ensemble.store.mirror.layout import MirrorHead
from ensemble.store.verification import verify


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has ended, `run`, and its mirror, `mirror`."""
    folder = tmp_path_factory.mktemp("hostile")
    begin(train(folder / "run"), f"file://{folder}/mirror").sync(is_last=True)
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


def edit_log(folder: Path, type: str, **fields: Any) -> None:
    """Append an event to the log in the mirror, with a head that agrees with it."""
    log = folder / "forged/events.jsonl"
    log.parent.mkdir(exist_ok=True)
    shutil.copy(folder / "run/events.jsonl", log)
    with EventLog(log) as opened:
        opened.append(type, **fields)
    stored = put(folder, log.read_bytes())

    def edit(head: MirrorHead) -> None:
        head.log, head.log_digest = [stored], stored.digest

    edit_head(folder, edit)


def test_a_log_does_not_say_what_the_declaration_is(copied: Path) -> None:
    """A pickle in a file that nobody trusts, which the log calls a copy of the declaration."""
    mark, url, code = copied / "mark", url_of(copied), code_of(RunDir(copied / "run"))
    bomb = pickle.dumps(Bomb(mark))
    digest = digest_bytes(bomb)
    edit_head(copied, lambda head: head.files.update({"notes.json": put(copied, bomb)}))
    info = {**RunDir(copied / "run").info, "code": str(copied)}
    for fields in (
        {"files": {"ensemble.pkl": digest, "notes.json": digest}},
        {"files": {"../escaped/x.txt": digest, "notes.json": digest}},
        {"files": {str(copied / "x.txt"): digest}},
        {"files": {"code/../ensemble.pkl": digest}},
        {"info": info},
        {"files": {"ensemble.pkl": digest}, "arrays": ["../../x.npy"]},
    ):
        edit_log(copied, "code_saved", **fields)
        with pytest.raises(StoreError, match="is damaged, or was forged: its log says that"):
            ensemble.resume(url, "inline", into=copied / "into/new", trust=code).wait()
    with pytest.raises(StoreError, match="is damaged, or was forged"):
        ensemble.load(url, trust=code)
    assert not mark.exists() and not list((copied / "into").iterdir())


def test_a_log_names_no_files_elsewhere(copied: Path) -> None:
    url, code = url_of(copied), code_of(RunDir(copied / "run"))
    at = {"member": "member-0", "attempt": 0, "epoch": 0, "step": 0}
    for type, fields in (
        ("checkpoint", {**at, "member": "../../x", "path": "checkpoint-0-0-0.safetensors"}),
        ("checkpoint", {**at, "path": "x/.."}),
        ("packed", {"path": "../x.zip", "digest": "xxh3:0", "bytes": 1, "members": ["member-0"]}),
        ("packed", {"path": "/etc/hostname", "digest": "xxh3:0", "bytes": 1, "members": ["member-0"]}),
    ):
        edit_log(copied, type, **fields)
        with pytest.raises(StoreError, match=r"a file .* is part of the run, which has no such files"):
            fetch_run(url, copied / "new", code)


def test_nothing_that_runs_is_made_again_in_a_fetched_directory(copied: Path) -> None:
    """Also of one that was fetched when its log was not looked at."""
    mark = copied / "mark"
    bomb = pickle.dumps(Bomb(mark))
    run_dir = fetch_run(url_of(copied), copied / "new", code_of(RunDir(copied / "run")))
    members = sorted(run_dir.path.glob("members/*"))
    (members[0] / "log.txt").write_bytes(bomb)
    own = fold(read_events(run_dir.events))
    own.files["ensemble.pkl"] = own.files[f"code/{own.header.code}/ensemble.pkl"] = [digest_bytes(bomb)]
    copy = f"code/{own.header.code}/x.py"
    (run_dir.path / copy).write_bytes(bomb)
    own.files[copy] = [digest_bytes(bomb)]
    with pytest.raises(DamagedError, match="was fetched from a mirror, and no copy in it"):
        restore_files(run_dir, own)
    run_dir.info_file.unlink()
    with pytest.raises(DamagedError, match=r"run\.json is gone; the directory was fetched"):
        ensemble.resume(run_dir.path, "inline")
    assert not run_dir.info_file.exists() and not mark.exists()


def test_names_in_a_log_that_are_no_files_of_a_run_are_said_and_not_used(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a directory that was not fetched, too."""
    run_dir = RunDir(copied / "run")
    notes = digest_bytes(b"{}")
    (run_dir.path / "notes.json").write_bytes(b"{}")
    with EventLog(run_dir.events) as events:
        names = ("../escaped.txt", str(copied / "absolute.txt"), "code/../ensemble.pkl", "notes.json")
        events.append("code_saved", files=dict.fromkeys(names, notes))
        events.append("packed", path="/etc/hostname", digest=notes, bytes=1, members=["member-0"])
    restore_files(run_dir, fold(read_events(run_dir.events)))
    found = [each for each in verify(run_dir) if not each.is_sound]
    assert [each.kind for each in found] == ["log"] * 5
    assert all("which is none of a run; it is not used" in each.detail for each in found)
    assert not (copied / "escaped.txt").exists() and not (copied / "absolute.txt").exists()
    with pytest.raises(StoreError, match="is no name of a version of the code"):
        run_dir.load_ensemble("../../other")


@pytest.mark.more
def test_a_directory_whose_log_names_the_run_itself_as_unused_code_stays(copied: Path) -> None:
    run_dir = RunDir(copied / "run")
    with EventLog(run_dir.events) as events:
        events.append("code_saved", files={"code/../ensemble.pkl": digest_bytes(b"x")})
    run_dir.mirror.unlink()
    train(run_dir.path)
    assert run_dir.info_file.exists()
