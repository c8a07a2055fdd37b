"""Logs of members are bounded on disk and when they are read, and lose no last line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ensemble.store import member_log
from ensemble.store.member_log import LogBounds, find_position, free_middle, read_pieces, read_text, shorten

LINE = "step %09d of a member that prints every step\n"


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("HEAD_BYTES", 2**14),
        ("TAIL_BYTES", 2**16),
        ("LIMIT_BYTES", 2**18),
        ("CHUNK_BYTES", 2**12),
    ):
        monkeypatch.setattr(member_log, name, value)


def write_lines(path: Path, first: int, lines: int) -> None:
    with path.open("a") as file:
        file.writelines(LINE % number for number in range(first, first + lines))


def test_the_middle_of_a_log_is_freed_while_a_process_writes_to_it(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log.txt"
    program = f"for n in range(40_000): print({LINE!r} % n, end='', flush=True)\nraise SystemExit('the reason')"
    most = 0
    with log.open("ab") as output:
        writer = subprocess.Popen([sys.executable, "-c", program], stdout=output, stderr=output)
    while writer.poll() is None:
        free_middle(log)
        most = max(most, os.stat(log).st_blocks * 512)
    free_middle(log)
    assert os.stat(log).st_blocks * 512 <= 2**18 and log.stat().st_size > 1_900_000
    assert most < log.stat().st_size
    for text in (read_text(log), shorten(log) or log.read_text()):
        head, _, tail = text.partition("bytes of output are left out here)\n")
        assert head.startswith(LINE % 0) and head.count("\n") > 300
        numbers = [int(line.split()[1]) for line in tail.splitlines()[1:-1]]
        assert numbers == list(range(numbers[0], 40_000)) and len(numbers) > 1_000, "no line of the end is lost"
        assert tail.endswith("the reason\n")
    assert log.stat().st_size < 2**17 and [each.name for each in tmp_path.iterdir()] == ["log.txt"]


def test_a_log_is_read_from_its_end_and_followed(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert read_text(log) == ""
    write_lines(log, 0, 1_000)
    whole = log.read_text()
    assert read_text(log) == whole
    assert [read_text(log, n) for n in (0, 1, 500, 5_000)] == [
        "",
        *("".join(whole.splitlines(True)[-n:]) for n in (1, 500, 5_000)),
    ]
    with log.open("rb") as file:
        *_, (_, offset) = read_pieces(file)
        write_lines(log, 1_000, 2)
        assert b"".join(piece for piece, _ in read_pieces(file, offset)).decode() == LINE % 1_000 + LINE % 1_001
        write_lines(log, 1_002, 9_000)
        pieces = list(read_pieces(file, offset))
    assert b"left out here" in pieces[0][0] and pieces[-1][0].decode().endswith(LINE % 10_001)
    assert max(len(piece) for piece, _ in pieces) <= 2**12 and sum(len(piece) for piece, _ in pieces) < 2**17


@pytest.mark.parametrize("shown", [10, 3_000, 20_000])
def test_who_follows_a_log_that_is_shortened_reads_on_and_nothing_twice(shown: int, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    write_lines(log, 0, shown)
    with log.open("rb") as file:
        inode, (*_, (_, offset)) = os.fstat(file.fileno()).st_ino, read_pieces(file)
    write_lines(log, shown, 20_000)
    shorten(log)
    write_lines(log, shown + 20_000, 2)  # of a resume
    with log.open("rb") as file:
        *pieces, (last, end) = read_pieces(file, find_position(file, inode, offset))
        text = b"".join([*(piece for piece, _ in pieces), last]).decode()
        assert find_position(file, os.fstat(file.fileno()).st_ino, end) == end
    numbers = [int(line.split()[1]) for line in text.splitlines() if line.startswith("step ")]
    assert numbers == sorted(set(numbers)) and numbers[0] >= shown and numbers[-1] == shown + 20_001
    assert text.count("left out here") == 1
    log.write_text("another\n")
    with log.open("rb") as file:
        assert find_position(file, inode, offset) == find_position(file, os.stat(log).st_ino, end) == 0


def test_only_a_file_system_that_cannot_free_parts_of_files_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log.txt"
    log.touch()
    answers = [errno.EINTR, errno.ENOSPC, errno.ENOSPC, None, errno.EOPNOTSUPP, None]
    asked = []

    def answer(path: Path) -> None:
        asked.append(number := answers[len(asked)])
        if number is not None:
            raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(member_log, "free_middle", answer)
    bounds = LogBounds()
    for _ in range(8):
        bounds.keep([log, tmp_path / "none" / "log.txt"][:1])
    assert asked == answers[:5]
    assert [record.args[1].errno for record in caplog.records] == [errno.ENOSPC, errno.EOPNOTSUPP]  # type: ignore[index,union-attr]
