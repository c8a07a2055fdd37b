"""The small files of many members in one: what is read from a pack, damage of it, and kills while it is made."""

from __future__ import annotations

import errno
import os
import random
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import FORK

import ensemble.store.pack_index as pack_index
import ensemble.store.packs as packs
from ensemble.store import (
    DamagedError,
    EventLog,
    RunDir,
    fold,
    load_checkpoint,
    load_predictions,
    read_events,
    save_predictions,
)
from ensemble.store.checkpoint import count_bytes, save_checkpoint
from ensemble.store.member_log import find_position, read_text
from ensemble.store.packs import finish_removal, measure, open_member_file, remove_packed, unpack, write_packs

MEMBERS = ["member-0", "member-1", "member-2"]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    for number, member in enumerate(MEMBERS):
        save_checkpoint(run.checkpoint(member, 0, 1, 0), {"model": {"w": torch.full((8,), float(number))}})
        save_predictions(run.predictions(member, "valid"), np.full((4, 2), 0.5), np.arange(4), None)
        run.log(member).write_text(f"{member} began\n" + "a line\n" * 200)
        (run.member(member) / "preparing-0-0").write_bytes(bytes(128))
    return run


def pack(run: RunDir, members: list[str] = MEMBERS) -> Path:
    """What a controller does: write, log, remove."""
    ((path, digest, files, members),) = write_packs(run.path, members)
    with EventLog(run.events) as events:
        name = str(path.relative_to(run.path))
        events.append("packed", path=name, digest=digest, bytes=path.stat().st_size, members=members)
    remove_packed(files)
    return path


def check_all(run: RunDir) -> None:
    """All that was saved is read as it was."""
    for number, member in enumerate(MEMBERS):
        state = load_checkpoint(run.checkpoint(member, 0, 1, 0))
        assert torch.equal(state["model"]["w"], torch.full((8,), float(number)))
        assert load_predictions(run.predictions(member, "valid"), mapped=True).values.shape == (4, 2)
        assert read_text(run.log(member)).startswith(f"{member} began\n")
        assert read_text(run.log(member), lines=2) == "a line\n" * 2


def list_inodes(run: RunDir) -> list[str]:
    return sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*"))


def test_what_is_packed_is_read_as_before_and_takes_one_file(run_dir: RunDir) -> None:
    big = run_dir.member("member-1") / "checkpoint-0-2-0-weights.safetensors"
    big.write_bytes(bytes(pack_index.MOST_BYTES + 1))
    (run_dir.member("member-2") / "notes.csv").write_text("the user's own")
    sizes = {path: path.stat().st_size for path in (run_dir.path / "members").rglob("*.safetensors")}
    pack(run_dir)
    check_all(run_dir)
    assert {path: measure(path) for path in sizes} == sizes
    assert count_bytes(run_dir.checkpoint("member-0", 0, 1, 0), "model") == 32
    left = [name for name in list_inodes(run_dir) if name.count("/") == 2]
    assert left == ["members/member-1/checkpoint-0-2-0-weights.safetensors", "members/member-2/notes.csv"]
    assert not run_dir.member("member-0").exists()
    assert measure(run_dir.predictions("member-0", "test")) is None
    with pytest.raises(DamagedError, match="does not exist"):
        load_predictions(run_dir.predictions("member-0", "test"))


def test_an_unpacker_that_everybody_has_gives_the_files_back(run_dir: RunDir, tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in (run_dir.path / "members").rglob("*.*")}
    with zipfile.ZipFile(pack(run_dir)) as archive:
        archive.extractall(run_dir.path / "members")
    assert {p: p.read_bytes() for p in (run_dir.path / "members").rglob("*.*")} == before


def test_a_file_has_precedence_and_of_packs_the_last(run_dir: RunDir) -> None:
    pack(run_dir)
    log = run_dir.log("member-0")
    unpack(log)
    with open(log, "a") as file:
        file.write("goes on\n")
    assert read_text(log).startswith("member-0 began\n") and read_text(log, lines=1) == "goes on\n"
    assert pack(run_dir, ["member-0"]).name == "000002.zip"
    assert read_text(log, lines=1) == "goes on\n"
    assert len(load_predictions(run_dir.predictions("member-0", "valid")).index) == 4


def test_a_log_that_is_followed_goes_on_where_it_was_when_it_is_packed(run_dir: RunDir) -> None:
    log = run_dir.log("member-0")
    with open(log, "rb") as file:
        inode, position = os.fstat(file.fileno()).st_ino, 40
    pack(run_dir)
    with open_member_file(log) as file:
        assert find_position(file, inode, position) == position


def test_what_was_written_while_it_was_packed_is_kept(run_dir: RunDir) -> None:
    (made,) = write_packs(run_dir.path, MEMBERS)
    with open(run_dir.log("member-0"), "a") as file:
        file.write("a last word\n")
    remove_packed(made[2])
    assert read_text(run_dir.log("member-0"), lines=1) == "a last word\n"
    assert not run_dir.member("member-1").exists()


def test_damage_of_an_entry_is_of_that_file_alone(run_dir: RunDir) -> None:
    path = pack(run_dir)
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("member-1/log.txt").header_offset + 60
    content = bytearray(path.read_bytes())
    content[at] ^= 255
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=r"member-1/log\.txt in .* is damaged"):
        open_member_file(run_dir.log("member-1"))
    assert read_text(run_dir.log("member-2")).startswith("member-2 began")


@pytest.mark.parametrize("lost", [30, 200])
def test_a_pack_without_its_directory_is_read_by_the_headers_of_its_entries(
    run_dir: RunDir, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_index, "BLOCK_BYTES", 100)  # headers lie across the blocks that are read
    path = pack(run_dir)
    path.write_bytes(path.read_bytes()[:-lost])
    check_all(run_dir)


def read_all(run: RunDir) -> dict[str, bytes]:
    with zipfile.ZipFile(run.path / "packs/000001.zip") as archive:
        names = archive.namelist()
    found = {}
    for name in names:
        with open_member_file(run.path / "members" / name) as file:
            found[name] = file.read()
    return found


def test_wherever_a_pack_is_damaged_but_in_its_content_all_is_read(run_dir: RunDir) -> None:
    path = pack(run_dir)
    whole, expected = path.read_bytes(), read_all(run_dir)
    with zipfile.ZipFile(path) as archive:
        headers = [
            at
            for each in archive.infolist()
            for at in range(each.header_offset, each.header_offset + 30 + len(each.filename))
        ]
        places = [*headers, *range(archive.start_dir, len(whole))]
    rng = random.Random(0)
    for at in sorted(rng.sample(places, 300)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.randrange(8)
        path.unlink()
        path.write_bytes(damaged)
        for name, content in expected.items():
            with open_member_file(run_dir.path / "members" / name) as file:
                assert file.read() == content, (name, at)


def test_a_pack_is_read_once_however_many_follow(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = list[str]()
    usual = pack_index.read_pack
    monkeypatch.setattr(pack_index, "read_pack", lambda path: reads.append(path.name) or usual(path))
    long_ago = 1e9
    for number, member in enumerate(MEMBERS):
        pack(run_dir, [member])
        os.utime(run_dir.path / "packs", (long_ago + number,) * 2)
        assert measure(run_dir.log(member)) and measure(run_dir.log("member-9")) is None
    assert reads == ["000001.zip", "000002.zip", "000003.zip"]
    monkeypatch.setattr(os, "listdir", lambda path: pytest.fail("nothing has changed"))
    assert all(measure(run_dir.log(member)) for member in MEMBERS) and measure(run_dir.log("member-9")) is None


def test_a_pack_that_cannot_be_read_for_a_while_is_read_then(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(run_dir)
    os.utime(run_dir.path / "packs", (1e9, 1e9))

    def fail(path: Path) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as failing:
        failing.setattr(pack_index, "read_pack", fail)
        assert measure(run_dir.log("member-0")) is None
    check_all(run_dir)


def test_packs_have_bounds(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "MOST_MEMBERS", 2)
    assert [each[3] for each in write_packs(run_dir.path, MEMBERS)] == [MEMBERS[:2], MEMBERS[2:]]
    monkeypatch.setattr(packs, "MOST_PACK_BYTES", 1)
    assert [each[3] for each in write_packs(run_dir.path, MEMBERS)] == [[member] for member in MEMBERS]
    assert len(list((run_dir.path / "packs").iterdir())) == 5


def kill_at(number: int, do: Callable[[], Any]) -> bool:
    """Run something in a child that is killed at its n-th change of a directory or the log; False: it came to its
    end before that.
    """

    def run() -> None:
        left = number
        names = ("open", "replace", "unlink", "rmdir", "mkdir", "fsync", "write")
        for name in names:
            usual = getattr(os, name)

            def counted(*args: Any, usual: Callable[..., Any] = usual, **more: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return usual(*args, **more)

            setattr(os, name, counted)
        do()

    child = FORK.Process(target=run)
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def test_a_kill_at_any_point_loses_nothing_and_the_next_start_does_the_rest(tmp_path: Path) -> None:
    for number in range(1, 200):
        run = RunDir(tmp_path / f"run-{number}")
        for other, member in enumerate(MEMBERS):
            save_checkpoint(run.checkpoint(member, 0, 1, 0), {"model": {"w": torch.full((8,), float(other))}})
            save_predictions(run.predictions(member, "valid"), np.full((4, 2), 0.5), np.arange(4), None)
            run.log(member).write_text(f"{member} began\n" + "a line\n" * 200)
        EventLog(run.events).close()
        with EventLog(run.events) as events:
            events.append("run_started", name="killed")
            for member in MEMBERS:
                events.append("member", member=member)
        was_killed = kill_at(number, lambda run=run: pack(run))
        check_all(run)
        state = fold(read_events(run.events))
        packed = [member.id for member in state.members.values() if member.is_packed]
        finish_removal(run.path, state.packs, packed)
        check_all(run)
        assert (not packed) == all(run.member(member).exists() for member in MEMBERS), list_inodes(run)
        assert len(list(run.path.glob("packs/*.zip"))) == len(state.packs) == bool(packed)
        if not was_killed:
            assert number > 15 and packed == MEMBERS
            return
    raise AssertionError("it has never come to its end")
