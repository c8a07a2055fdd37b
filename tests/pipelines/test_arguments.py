"""Arguments of other types that are valid; where the sockets of feeders lie, and what is cleared away there."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from core_pipes import LIMIT_S, data, leaves_nothing, pipe  # noqa: F401

from pipelines import Feeder, Peers, attach, find_shared_stages
from pipelines.feeder.process import spawn


def test_numpy_integers_and_paths_are_taken_for_what_they_are(tmp_path: Path) -> None:
    loader = pipe("plain").loader(np.int64(8), np.int64(2), rank=np.int32(0))  # type: ignore[arg-type]
    assert loader.reading.epochs == range(2) and type(loader.reading.batch_size) is int
    peers = Peers(tmp_path, np.int64(0), np.int64(2))  # type: ignore[arg-type]
    assert (peers.directory, type(peers.node), type(peers.nodes)) == (str(tmp_path), int, int)


def test_pipelines_of_any_iterable_have_a_shared_part() -> None:
    assert len(find_shared_stages(pipe("plain") for _ in range(2))) == len(pipe("plain"))


def test_where_temporary_files_lie_too_deep_for_a_socket_it_lies_in_tmp_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with Feeder(pipe("plain")) as feeder:
        assert len(list(attach(feeder.address, pipe("plain"), 8))) > 0
    assert not list(deep.iterdir()) and not Path(feeder.address).parent.exists()
    assert len([line for line in caplog.messages if str(deep) in line]) == 1


def test_what_a_killed_feeder_left_is_cleared_away_and_nothing_else() -> None:
    def aged(directory: Path) -> Path:
        os.utime(directory, (time.time() - 120,) * 2)
        return directory

    killed, fresh, alive = (spawn(pipe("plain")) for _ in range(3))
    other = Path(tempfile.gettempdir()) / "feeder-notes"
    other.mkdir()
    (other / "socket").touch()
    try:
        for process in (killed, fresh):
            process.kill()
            process._process.wait(LIMIT_S)
        left, kept = (aged(Path(each.address).parent) for each in (killed, alive))
        aged(other)
        with Feeder(pipe("plain")):
            assert not left.exists()
            assert kept.exists() and other.exists() and Path(fresh.address).exists()
        assert len(list(attach(alive.address, pipe("plain"), 8))) > 0
    finally:
        for process in (killed, fresh, alive):
            process.stop()
        (other / "socket").unlink()
        other.rmdir()
