"""A run of another format is refused in one sentence by all that reads runs, and nothing of it is changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ensemble
from ensemble.cli.parser import main
from ensemble.store import RunDir, StoreError

#: A run as it was logged before the first release.
INFO = {"v": 1, "name": "digits", "run_id": "0" * 32, "created": 1.0, "code": "/nowhere", "executor": "inline"}
LOG = [
    {"type": "run_started", "name": "digits", "run_id": "0" * 32, "executor": "inline", "mode": "list"},
    {"type": "member", "member": "member-0", "number": 0, "params": {"lr": 0.1}, "epochs": 2},
    {"type": "placed", "member": "member-0", "attempt": 0, "node": "node-1", "devices": []},
    {"type": "run_stopped", "reason": "asked"},
]
SAID, SAID_OF_INFO = (rf"format 1, this one reads {version}" for version in (2, 5))  # of the log; of run.json


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.requests.mkdir(parents=True, mode=0o700)
    found.path.chmod(0o700)
    found.info_file.write_text(json.dumps(INFO))
    found.ensemble_file.write_bytes(b"censemble.space\nchoice\n.")  # a module that is no more
    found.events.write_text("".join(json.dumps({"v": 1, "t": float(t), **e}) + "\n" for t, e in enumerate(LOG)))
    return found


def read_files(run: RunDir) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in run.path.rglob("*") if file.is_file()}


def test_commands_and_functions_refuse_it(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    before = read_files(run)
    for verb in ("status", "resume", "report", "verify", "export"):
        more = {"export": [str(run.path.parent / "artifact")]}.get(verb, [])
        assert main([verb, str(run.path), *more]) == 2
        told = capsys.readouterr()
        (line,) = told.err.splitlines()
        assert SAID in line and "another version of ray-ensemble" in line and "train it again" in line
        assert told.out == "" and read_files(run) == before
    for use in (ensemble.load, ensemble.resume, ensemble.attach):
        with pytest.raises(StoreError, match=SAID):
            use(run.path)
    with pytest.raises(StoreError, match=SAID_OF_INFO):
        run.load_ensemble()
    assert read_files(run) == before
