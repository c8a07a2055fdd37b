"""Bytes of a run that a disk has changed or lost: never used, always said, and made again where they can be."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults_members import declared
from faults_members import train_two as train
from kit.edited_log import replace_in_log
from kit.finished_runs import of_kind, read_state
from kit.kept_predictions import save_predictions

import ensemble
from ensemble.cli.parser import main
from ensemble.store import (
    DamagedError,
    EventLog,
    RunDir,
    RunState,
    StoreError,
    load_checkpoint,
    load_predictions,
    save_checkpoint,
)
from ensemble.store.file_checks import check_members
from ensemble.store.verification import verify

EPOCHS = 3


def digests(state: RunState) -> dict[str, str | None]:
    return {member.id: member.weights_sha256 for member in state.members.values()}


def results(state: RunState) -> Any:
    assert state.combined is not None
    return state.combined.weights, state.combined.metrics, digests(state)


def call(command: str, path: Path, *options: str) -> int:
    return main([command, str(path), *options])


def read_files(run: RunDir) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained")
    train(path / "run", path / "account")
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunDir:
    shutil.copytree(trained / "run", tmp_path / "run")
    return RunDir(tmp_path / "run")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 0x10
    path.write_bytes(content)


def stop_at(epoch: int, run_dir: Path) -> Callable[[dict[str, Any]], None]:
    def stop(event: dict[str, Any]) -> None:
        if event["type"] == "checkpoint" and event["epoch"] == epoch:
            ensemble.attach(run_dir).stop()

    return stop


def test_a_damaged_checkpoint_is_never_gone_on_from(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one that is whole, but not what the log says. The one before it is used, else the member begins."""
    monkeypatch.setattr("ensemble.controller.controller.TICK_S", 0.0)
    expected, path = digests(read_state(trained / "run")), tmp_path / "run"
    train(path, tmp_path / "account", stop_at(2, path))
    member = read_state(path).members["member-0"]
    assert member.checkpoint is not None and member.checkpoint_before is not None
    last, before = (RunDir(path).member("member-0") / name for name, _ in member.list_checkpoints())
    state = load_checkpoint(last)
    state["model"] = {name: tensor + 1 for name, tensor in state["model"].items()}
    save_checkpoint(last, state)
    again = shutil.copytree(path, tmp_path / "again")
    flip(RunDir(again).member("member-0") / before.name)
    own = shutil.copytree(path, tmp_path / "own")
    shutil.copy(last, RunDir(own).checkpoint("member-0", member.attempts, EPOCHS, 0))  # no log vouches for it

    position = member.checkpoint_before.epoch, member.checkpoint_before.step
    for folder, begins in ((path, position), (again, (0, 0)), (own, position)):
        train(folder, tmp_path / "account")
        said = of_kind(folder, "damaged")
        damaged = [last.name] if begins == position else [last.name, before.name]
        assert [event["file"] for event in said] == damaged
        assert all("is damaged" in event["error"] for event in said)
        started = of_kind(folder, "started", "member-0")
        assert (started[-1]["epoch"], started[-1]["step"]) == begins
        assert digests(read_state(folder)) == expected, "the same weights as without damage"


def test_damaged_predictions_are_made_again_and_never_used(
    run: RunDir, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_state(run.path)
    path = run.predictions("member-1")
    found = load_predictions(path, "valid")
    save_predictions(path, "valid", found.values[::-1], found.index, found.target)
    with pytest.raises(DamagedError, match="is damaged: its digest is"):
        ensemble.load_predictions(run.path, "valid")
    capsys.readouterr()
    assert call("verify", run.path) == 1
    assert "members/member-1/predictions.safetensors" in capsys.readouterr().out
    assert call("resume", run.path, "--json", "-") == 0
    assert np.array_equal(load_predictions(path, "valid").values, found.values)
    assert results(read_state(run.path)) == results(before)
    assert len(of_kind(run.path, "epoch")) == 2 * EPOCHS, "its checkpoint is whole: nothing is trained again"
    assert call("verify", run.path, "--json", "-") == 0


@pytest.mark.parametrize("how", ["changed", "gone"])
def test_a_resume_trains_again_what_nothing_else_can_give(
    run: RunDir, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_state(run.path)
    path = run.valid_checkpoint(before.members["member-0"])
    flip(path) if how == "changed" else path.unlink()
    content = read_files(run)
    assert call("verify", run.path) == 1 and path.name in capsys.readouterr().out
    assert read_files(run) == content, "it only looks"
    assert call("resume", run.path) == 0 and path.name in capsys.readouterr().err
    assert call("verify", run.path) == 0 and re.search(r"\nall \d+ files are whole\n", capsys.readouterr().out)
    after = read_state(run.path)
    assert results(after) == results(before)
    assert [member.attempts for member in after.members.values()] == [2, 1]


def test_all_is_read_once_before_anything_starts_and_a_signal_ends_that(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ensemble.executors.inline import InlineExecutor as Inline
    from ensemble.store import digests as module

    state = read_state(run.path)
    flip(run.valid_checkpoint(state.members["member-0"]))
    done: list[str] = []
    digest_file, open_executor = module.digest_file, Inline.open

    def hold(path: Any, check: Callable[[], None] = lambda: None) -> str:
        threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()
        while True:  # a file that is very long
            check()
            time.sleep(0.001)

    def note_read(path: Any, check: Callable[[], None] = lambda: None) -> str:
        done.append(os.path.realpath(path))
        return digest_file(path, check)

    def note_open(self: Inline, *given: Any) -> Any:
        done.append("open")
        return open_executor(self, *given)

    monkeypatch.setattr(Inline, "open", note_open)
    monkeypatch.setattr(module, "digest_file", hold)
    assert call("resume", run.path) == 130
    with pytest.raises(KeyboardInterrupt):
        ensemble.resume(run.path)
    monkeypatch.setattr(module, "digest_file", note_read)
    assert call("resume", run.path) == 0
    known = state.members["member-1"]
    files = run.valid_checkpoint(known), run.predictions(known.id)
    before = done[: done.index("open")]
    assert [before.count(str(file)) for file in files] == [1, 1] and done.count(str(files[0])) == 1


def test_a_damaged_checkpoint_that_nothing_needs_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one that failed only its last is kept, and what a kill has left is swept at the next start."""
    monkeypatch.setattr("ensemble.controller.controller.TICK_S", 0.0)
    run, faults = RunDir(tmp_path / "run"), {1: {"fault": "nan", "after": 14}}
    made = declared(tmp_path / "account", (1, 1), step_s=0.0, epochs=EPOCHS, of_member=faults)
    ensemble.submit(made, run.path, "inline").wait()
    member = read_state(run.path).members["member-1"]
    last = run.valid_checkpoint(member)
    assert member.state == "failed" and list(run.member("member-1").glob("checkpoint-*")) == [last]
    swept = run.checkpoint("member-0", 0, 99, 0), run.predictions("member-0", 7)
    for path in swept:
        path.touch()
    flip(last)
    assert call("verify", run.path) == 1 and call("resume", run.path, "--allow-failed") == 0
    assert f"{last} is damaged" in caplog.text and "nothing needs it" in caplog.text
    assert not any(path.exists() for path in (last, *swept)) and call("verify", run.path) == 0


@pytest.mark.parametrize("how", ["changed", "no JSON", "gone"])
def test_a_damaged_run_json_is_not_used_and_written_anew_by_the_spec(
    run: RunDir, trained: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    content, path, info = run.info_file.read_bytes(), run.info_file, run.info
    path.write_bytes(content.replace(b'"faults"', b'"faultz"') if how == "changed" else content[9:])
    path.unlink() if how == "gone" else None
    assert run.info == info and (how == "gone" or "run.json is not used" in caplog.text)
    assert call("verify", run.path) == 1 and call("resume", run.path) == 0
    other = replace(declared(trained / "account", (1, 1), step_s=0.0, epochs=EPOCHS), name="other")
    with pytest.raises(StoreError, match="holds the run of another ensemble"):
        ensemble.submit(other, run.path, "inline")
    train(run.path, trained / "account")
    assert run.info_file.read_bytes() == content and call("verify", run.path) == 0


def test_damaged_code_is_not_run_and_written_anew_by_the_spec_also_of_a_run_that_has_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "run")
    command = write_spec(tmp_path, run.path)
    assert main(command) == 0
    capsys.readouterr()
    assert call("verify", run.path, "--json", "-") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["kind"] for row in rows} == {"log", "code", "checkpoint", "predictions"}
    assert {row["condition"] for row in rows} == {"whole"}
    (kept,) = (run.path / "code").rglob("faults_members.py")
    for file in (run.ensemble_file, run.spec_file, kept, *(run.path / "code").rglob("code.json")):
        content, is_needed = file.read_bytes(), file.name in ("ensemble.pkl", "code.json")
        flip(file)
        assert call("verify", run.path) == 1
        if file == run.ensemble_file:
            with pytest.raises(
                DamagedError, match=r"is damaged: .* `ensemble run SPEC` on this directory writes it"
            ):
                run.load_ensemble()
        assert call("resume", run.path) == (2 if is_needed else 0), file
        assert not is_needed or "`ensemble run SPEC` on this directory writes it again" in capsys.readouterr().err
        capsys.readouterr()
        assert main(command) == 0 and f"{file.name} is damaged" in capsys.readouterr().err
        assert call("verify", run.path) == 0
        assert file.read_bytes() == content or file.name == "ensemble.pkl"
    assert [member.attempts for member in read_state(run.path).members.values()] == [1, 1]
    assert len(of_kind(run.path, "run_started")) == 5


def test_damaged_code_that_the_run_has_no_more_does_not_keep_it_from_going_on(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    state = read_state(run.path)
    old = run.code("0" * 16)
    shutil.copytree(run.code(state.header.code), old)
    content = (old / "ensemble.pkl").read_bytes()[:-1]
    (old / "ensemble.pkl").write_bytes(content)
    with EventLog(run.events) as log:
        run.log_files(log, {old / "ensemble.pkl": content}, None)
    flip(old / "ensemble.pkl")
    assert call("resume", run.path) == 0
    assert "the run continues without it" in caplog.text and "writes it again" not in caplog.text


def test_results_that_are_gone_or_empty_are_written_again(run: RunDir) -> None:
    def read() -> list[Any]:
        return [json.loads((run.path / name).read_bytes()) for name in ("results.json", "ledger.json")]

    before = read()
    for missing in ("results.json", "metrics.csv", "ledger.json", run.report.name):
        (run.path / missing).unlink()
        assert call("verify", run.path) == 1, missing
        (run.path / missing).touch()
        assert call("verify", run.path) == 1, missing
        assert call("report", run.path) == 0
        assert call("verify", run.path) == 0, missing
    assert read() == before


def test_files_that_a_run_replaces_while_it_is_verified_are_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, found = tmp_path / "run", []

    def replace(run_dir: RunDir, members: Any) -> Any:
        """The member goes on after its log was read, and before its files are."""
        if not found:
            member = next(each for each in members if each.checkpoint_before)
            old = run_dir.valid_checkpoint(member)
            new = run_dir.checkpoint(member.id, member.attempt, 9, 0)
            digest = save_checkpoint(new, load_checkpoint(old))
            with EventLog(run_dir.events) as log:
                who = {"member": member.id, "attempt": member.attempt}
                log.append("checkpoint", **who, epoch=9, step=0, path=str(new), digest=digest)
            (run_dir.member(member.id) / member.list_checkpoints()[1][0]).unlink()
        found.append(members)
        return check_members(run_dir, members)

    monkeypatch.setattr("ensemble.controller.controller.TICK_S", 0.0)
    train(path, tmp_path / "account", stop_at(2, path))
    monkeypatch.setattr("ensemble.store.verification.check_members", replace)
    assert [each.file for each in verify(RunDir(path)) if not each.is_sound] == [] and len(found) == 2


def test_a_damaged_line_of_the_log_is_said_by_every_command_and_not_read_around(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is an event that does not fit. Whoever cuts the log there goes on from it, to the same weights."""
    from ensemble.reporting.dashboard.feed import LogReader

    content = run.events.read_bytes()
    more = '"type":"run_started","more_epochs":{"epochs":9,"members":{"x":1}}'
    replace_in_log(run.events, '"type":"combining"', more)
    with pytest.raises(DamagedError, match=r"the event 'run_started' of .* does not fit to those before it"):
        read_state(run.path)
    run.events.write_bytes(content)
    before, lines = read_state(run.path), run.events.read_bytes().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if b'"type":"checkpoint"' in line)
    lines[number] = lines[number].replace(b'"epoch":', b'"epoch": ', 1)
    run.events.write_bytes(b"".join(lines))
    said = f"{run.events}, line {number + 1} is damaged"
    for command in ("status", "resume", "report"):
        assert call(command, run.path) == 2
        assert said in capsys.readouterr().err, command
    assert call("verify", run.path) == 1
    assert f"line {number + 1} is damaged" in " ".join(capsys.readouterr().out.split())
    feed = LogReader(run)
    feed.read()
    assert said in str(feed.view.driver)
    os.truncate(run.events, len(b"".join(lines[:number])))
    assert call("resume", run.path) == 0 and results(read_state(run.path)) == results(before)
    assert call("verify", run.path) == 0


def test_a_power_failure_cannot_undo_the_names_of_what_the_log_says_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New directories are synced into those above, and predictions are renamed and synced before `finished`."""
    done: list[tuple[str, str]] = []

    def note(name: str, what: Callable[..., str | None]) -> None:
        usual = getattr(os, name)

        def call(*given: Any, **more: Any) -> Any:
            came = usual(*given, **more)
            if (about := what(*given)) is not None:
                done.append((name, about))
            return came

        monkeypatch.setattr(os, name, call)

    def find_finished(descriptor: int, data: Any) -> str | None:
        lines = [line for line in bytes(data).splitlines() if b'"type":"finished"' in line]
        return json.loads(lines[0])["member"] if lines else None

    note("fsync", lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}"))
    note("replace", lambda source, target: str(target))
    note("mkdir", lambda path, *mode: str(path))
    note("write", find_finished)
    train(tmp_path / "run", tmp_path / "account")
    monkeypatch.undo()
    members = str(tmp_path / "run" / "members")
    for number in range(2):
        folder = f"{members}/member-{number}"
        logged = done.index(("write", f"member-{number}"))
        assert ("fsync", members) in done[done.index(("mkdir", folder)) : logged]
        assert ("fsync", folder) in done[done.index(("replace", f"{folder}/predictions.safetensors")) : logged]
    assert ("fsync", str(tmp_path / "run")) in done[done.index(("mkdir", members)) :]


SPEC = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from faults_members import declared
from faults_members import train_two as train

def spec():
    return declared(Path({account!r}), (1, 1), step_s=0.0, epochs=2)
"""


def write_spec(folder: Path, run_dir: Path) -> list[str]:
    spec = folder / "spec.py"
    spec.write_text(SPEC.format(folder=str(Path(__file__).parent), account=str(folder / "account")))
    return ["run", str(spec), "--run-dir", str(run_dir), "--executor", "inline"]


def test_a_run_that_finds_no_room_says_how_much_it_needs_and_what_finds_none_at_the_end_is_written_later(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ensemble.controller.finalize import Finalizer

    filler, path = small_disk / "filler", small_disk / "run"
    command = write_spec(tmp_path, path)
    filler.write_bytes(bytes(30 * 2**20))
    assert main(command) == 2
    assert "10.0 MiB free, 16.0 MiB needed); make room, then try again" in capsys.readouterr().err
    filler.unlink()
    write_report = Finalizer.write_report

    def fill_and_write(self: Finalizer, ending: dict[str, Any]) -> None:
        """Members are combined by then; only the log has some room left."""
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        os.truncate(filler, filler.stat().st_size - 16384)
        write_report(self, ending)

    monkeypatch.setattr(Finalizer, "write_report", fill_and_write)
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "report.html" in said and "MiB needed" in said and f"`ensemble report {path}` writes them" in said
    monkeypatch.undo()
    left = [each for each in RunDir(path).list_results() if each.exists()]
    assert path / "report.html" not in left and all(each.stat().st_size for each in left), (
        "nothing is left in part"
    )
    for command in ("report", "resume"):
        assert call(command, path) == 1, "there is no room yet"
        assert "MiB needed" in capsys.readouterr().err
    filler.unlink()
    shutil.copytree(path, tmp_path / "copy")
    for command, folder in (("report", path), ("resume", tmp_path / "copy")):
        assert call(command, folder) == 0 and all(each.stat().st_size for each in RunDir(folder).list_results())
        assert call("verify", folder) == 0
