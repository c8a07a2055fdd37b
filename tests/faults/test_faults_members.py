"""What befalls single members and the disk, with real processes; README.md says which test shows what."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults_cluster import list_left, processes_with
from faults_conductor import EPOCHS, WIDTHS
from faults_members import declared, lost_and_doubled
from kit.control_groups import make_control_group
from kit.event_dicts import fold, read_events
from kit.finished_runs import hashes, of_kind

import ensemble
from ensemble import Ensemble, Recipe
from ensemble.store import WriteError, load_checkpoint
from pipelines import Pipeline, sources


@pytest.fixture
def cgroup() -> Iterator[Path | None]:
    """A group of processes that the kernel gives 400 MiB; None where this machine makes none."""
    with make_control_group(400) as made:
        yield made


@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.more)])
def test_each_of_many_failures_stays_its_members_and_changes_no_weight(
    hangs: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, str | None],
    cgroup: Path | None,
) -> None:
    """Member 1 loses its second rank, 2 has no memory, 3 a loss of NaN; 4, if it is there, is stopped for ever."""
    monkeypatch.setenv("FAULTS_RUN", str(tmp_path))
    memory = {"fault": "kernel", "cgroup": str(cgroup)} if cgroup is not None else {"fault": "memory"}
    of_member: dict[int, dict[str, Any]] = {
        2: {**memory, "after": 9, "marker": str(tmp_path / "memory")},
        3: {"fault": "nan", "after": 10},
    }
    reasons = ["lost", "oom", "nan", "hang"] if hangs else ["lost", "oom", "nan"]
    widths = WIDTHS[: 1 + len(reasons)]
    victims = [("member-1", 1, signal.SIGKILL), ("member-4", 0, signal.SIGSTOP)]
    hit: dict[str, int] = {}

    def hit_some(event: dict[str, Any]) -> None:
        if event["type"] == "epoch":
            usage = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["type"] == "usage"]
            for member, rank, number in victims:
                pids = [e["pid"] for e in usage if (e["member"], e["rank"]) == (member, rank)]
                if event["member"] == member and member not in hit and pids:
                    hit[member] = pids[-1]
                    os.kill(pids[-1], number)

    limits = {"hang_timeout_s": 120.0 if hangs else 600.0, "gate_timeout_s": 120.0}  # a busy machine is slow
    made = declared(tmp_path / "account", widths, epochs=EPOCHS, of_member=of_member, **limits)
    result = ensemble.submit(made, tmp_path / "run", "local", on_event=hit_some).wait()

    states = ["failed" if number == 3 else "finished" for number in range(len(widths))]
    assert [row["state"] for row in result.members] == states
    failed = sorted((event["member"], event["reason"]) for event in of_kind(tmp_path / "run", "failed"))
    assert failed == [(f"member-{number}", reason) for number, reason in enumerate(reasons, start=1)]
    got = hashes(tmp_path / "run")
    for number, width in enumerate(widths):
        if number != 3:
            assert got[f"member-{number}"] == expected[f"member-{number}"], number
            assert lost_and_doubled(tmp_path / "account", f"member-{number}", width, EPOCHS) == (0, 0), number
    assert list_left(processes_with("FAULTS_RUN", str(tmp_path)), tmp_path) == []


def test_a_full_disk_lets_members_wait_and_fails_none(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ensemble.controller.failures.DISK_PAUSE_S", 0.0)
    filler, run_dir, failures = small_disk / "filler", small_disk / "run", list[Any]()

    def fill(event: dict[str, Any]) -> None:
        if event["type"] == "started" and not failures:  # the log has room, a checkpoint of 2 MiB has not
            filler.touch()
            os.posix_fallocate(os.open(filler, os.O_WRONLY), 0, shutil.disk_usage(small_disk).free - (1 << 20))
        elif event["type"] == "failed":
            failures.append(event)
            if len(failures) == 3:
                filler.write_bytes(b"")

    def model(params: dict[str, Any]) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 1 << 16), torch.nn.Linear(1 << 16, 3))

    records = sources.arrays(x=np.zeros((16, 4), np.float32), label=np.arange(16) % 3)
    recipe = Recipe(model=model, loss="cross_entropy", inputs=("x",))
    usual: dict[str, Any] = {"members": [{"lr": 0.1}], "epochs": 2, "retries": 0, "optimizer": "sgd"}
    declared = Ensemble(name="full", recipe=recipe, train=Pipeline(records), **usual)
    result = ensemble.submit(declared, run_dir, "inline", on_event=fill).wait()
    assert [(row["state"], row["attempts"]) for row in result.members] == [("finished", 4)]
    assert [(event["reason"], event["retry"]) for event in failures] == [("disk", True)] * 3
    assert "goes on from its last checkpoint when there is room" in caplog.text


@pytest.mark.more
def test_a_disk_without_room_for_the_log_ends_the_run_with_whole_checkpoints_and_a_resume_goes_on(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, str | None]
) -> None:
    monkeypatch.setenv("FAULTS_RUN", str(tmp_path))
    monkeypatch.setattr("ensemble.controller.failures.DISK_PAUSE_S", 0.0)
    filler = small_disk / "filler"

    def fill(event: dict[str, Any]) -> None:
        if event["type"] == "checkpoint" and not filler.exists():
            with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))

    made = declared(tmp_path / "account", (1, 2), epochs=EPOCHS, step_s=0.1)
    run = ensemble.submit(made, small_disk / "run", "local", on_event=fill)
    with pytest.raises(WriteError):  # a member would wait; the log cannot
        run.wait()
    assert list_left(processes_with("FAULTS_RUN", str(tmp_path)), tmp_path) == []
    state = fold(read_events(small_disk / "run" / "events.jsonl"))
    assert "finished" not in {member.state for member in state.members.values()}
    assert {member.reason for member in state.members.values()} <= {None, "disk", "lost"}
    found = list(small_disk.glob("run/members/*/checkpoint-*.safetensors"))
    assert found and all(load_checkpoint(path) for path in found), "each whole, none half"
    filler.unlink()
    result = ensemble.resume(small_disk / "run").wait()
    assert [row["state"] for row in result.members] == ["finished"] * 2
    got = hashes(small_disk / "run")
    assert got == {member: expected[member] for member in got} and not list(small_disk.glob("run/**/*.tmp*"))
    for number, width in enumerate((1, 2)):
        assert lost_and_doubled(tmp_path / "account", f"member-{number}", width, EPOCHS) == (0, 0)
