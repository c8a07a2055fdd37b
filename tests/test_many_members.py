"""Ten thousand members with all their files: three each, and reading them stays within its bounds."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.edited_log import sign, without_crc
from kit.execute_members import loss, model

import ensemble
from ensemble import Ensemble, Member, Recipe
from ensemble.cli.parser import main
from ensemble.store import RunDir, fold, read_events
from pipelines import Pipeline, sources

MEMBERS = 10_000


def declare(members: int) -> Ensemble:
    draws = np.random.default_rng(0)
    x, label = draws.normal(size=(256, 4)).astype(np.float32), draws.integers(0, 3, 256)
    sizes = {"train": 256, "valid": 128, "test": 64}
    given: Any = {name: Pipeline(sources.arrays(x=x[:n], label=label[:n]), seed=0) for name, n in sizes.items()}
    given |= {"members": [Member({"lr": 0.01 + 1e-6 * number}) for number in range(members)], "epochs": 1}
    recipe = Recipe(model=model, loss=loss)
    return Ensemble(name="many", recipe=recipe, batch_size=64, combine="average", **given)


def make_many(folder: Path, members: int) -> RunDir:
    """A run whose members are copies of one that was trained, interrupted before they were combined."""
    one = RunDir(folder / "one")
    ensemble.submit(declare(1), one.path, "inline").wait()
    run = RunDir.create(folder / "many", declare(members))
    lines = without_crc(one.events.read_bytes()).decode().splitlines()
    of_member = [line for line in lines if '"member":"member-0"' in line]
    start = json.loads(next(line for line in lines if '"type":"run_started"' in line))
    declaration = json.loads(without_crc(run.events.read_bytes()).decode().splitlines()[-1])
    start |= {"members": members, "run_id": run.info["run_id"], "files": declaration["files"]}
    with open(run.events, "ab") as log:
        log.write(sign(json.dumps(start, separators=(",", ":")).encode()))
        for number in range(members):
            name = f"member-{number}"
            for line in of_member:
                line = line.replace("member-0", name).replace('"number":0', f'"number":{number}')
                log.write(sign(line.encode()))
            shutil.copytree(one.member("member-0"), run.member(name))
    return run


def use(*command: Any) -> float:
    """CPU-seconds of a command of `ensemble`."""

    def read() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    words, before = [sys.executable, "-m", "ensemble.cli", *map(str, command)], read()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return read() - before


def test_a_member_that_has_ended_has_three_files(tmp_path: Path) -> None:
    run = make_many(tmp_path, 3)
    for number in range(3):
        names = sorted(path.name for path in run.member(f"member-{number}").iterdir())
        assert [name.partition("-")[0].partition(".")[0] for name in names] == ["checkpoint", "log", "predictions"]
    assert main(["resume", str(run.path)]) == 0
    state = fold(read_events(run.events))
    assert [member.attempts for member in state.members.values()] == [1, 1, 1] and state.combined is not None
    assert main(["verify", str(run.path)]) == 0


@pytest.mark.slow
def test_ten_thousand_members_are_shown_continued_and_reported_in_time(tmp_path: Path) -> None:
    """CPU time: other work on the machine does not count."""
    run = make_many(tmp_path, MEMBERS)
    status_s, before = use("status", run.path), len(run.events.read_bytes())
    resume_s = use("resume", run.path)
    events = [json.loads(line) for line in run.events.read_bytes()[before:].splitlines()]
    again, combining = (next(e["t"] for e in events if e["type"] == kind) for kind in ("run_started", "combining"))
    report_s = use("report", run.path)
    print(f"CPU-seconds: status {status_s:.2f}, resume {resume_s:.1f}, report {report_s:.1f}")
    assert use("status", run.path) < 2 and status_s < 4
    assert combining - again < 20 and report_s < 60
