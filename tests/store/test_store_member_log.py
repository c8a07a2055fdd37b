"""Logs of members are read whole, from their end, or from a position on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ensemble.store import member_log
from ensemble.store.member_log import read_pieces, read_text

LINE = "step %09d of a member that prints every step\n"


def write_lines(path: Path, first: int, lines: int) -> None:
    with path.open("a") as file:
        file.writelines(LINE % number for number in range(first, first + lines))


def test_a_log_is_read_from_its_end_and_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_log, "CHUNK_BYTES", 2**12)
    log = tmp_path / "log.txt"
    assert read_text(log) == ""
    write_lines(log, 0, 1_000)
    whole = log.read_text()
    assert read_text(log) == whole
    assert read_text(log, 0) == ""
    assert all(read_text(log, n) == "".join(whole.splitlines(True)[-n:]) for n in (1, 500, 5_000))
    with log.open("rb") as file:
        *_, (_, offset) = read_pieces(file)
        write_lines(log, 1_000, 2)
        assert b"".join(piece for piece, _ in read_pieces(file, offset)).decode() == LINE % 1_000 + LINE % 1_001
        assert max(len(piece) for piece, _ in read_pieces(file)) <= 2**12


def test_a_log_that_grows_faster_than_it_is_read_ends(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    write_lines(log, 0, 1)
    with log.open("rb") as file:
        for number, (piece, _) in enumerate(read_pieces(file)):
            assert number == 0 and piece.decode() == LINE % 0
            write_lines(log, 1, 1)


def test_of_a_huge_log_the_begin_and_the_end_are_read(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    write_lines(log, 0, 10)
    os.truncate(log, 2**40)  # takes no place on the disk
    write_lines(log, 10, 10)
    text = read_text(log)
    assert text.startswith(LINE % 0) and text.endswith(LINE % 19)
    assert "the middle is left out here; `ensemble logs` has it" in text
    assert len(text) < 2**25
