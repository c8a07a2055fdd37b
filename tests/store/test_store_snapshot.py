"""How a run stands, from a snapshot and what follows it in the log: the same as from the whole log."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.event_dicts import lines, project
from kit.event_dicts import lines as log_lines

from ensemble.reporting import RunProjection, status_rows
from ensemble.store import RunDir, RunStatus

Event = dict[str, Any]


@pytest.fixture(autouse=True)
def every_event_is_worth_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ensemble.store.snapshot.GROWN_BYTES", 1)
    monkeypatch.setattr("ensemble.meter.ledger_view.MARGIN_S", 2.0)


def rows_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return status_rows(project(events))


def rows(standing: RunStatus) -> list[dict[str, Any]]:
    return status_rows(RunProjection.from_status(standing))


def a_run(seed: int, members: int = 6) -> list[Event]:
    """Members that finish, fail, are tried again, on a node with a GPU and a meter; stopped once and resumed."""
    rng, events, t = random.Random(seed), list[Event](), 1000.0
    cpu: dict[int, float] = {}

    def add(type: str, **fields: Any) -> None:
        events.append({"v": 2, "t": t, "type": type, **fields})

    def power() -> None:
        parts = [
            {
                "name": kind,
                "kind": kind,
                "device": device,
                "energy_j": rng.randrange(2**24) / 2**20,
                "origin": origin,
            }
            for kind, device, origin in (("cpu", None, "estimated"), ("gpu", 0, "measured"))
        ]
        energy = {"energy_j": sum(part["energy_j"] for part in parts), "watts": 1.0, "origin": "estimated"}
        add("power", node="n", **energy, source="s", interval_s=1.0, busy_s=rng.random() * 4, parts=parts)

    def usage(role: str, member: str | None, pid: int) -> None:
        cpu[pid] = cpu.get(pid, 0.0) + rng.random()
        add("usage", node="n", role=role, member=member, rank=0, pid=pid, cpu_s=cpu[pid], origin="measured")

    for start in range(2):
        cpu.clear()
        add("run_started", name="r", executor="local", objective="accuracy", epochs=4, members=members)
        add("node", node="n", cpus=4.0, gpus=[0])
        if not start:
            for n in range(members):
                add(
                    "member",
                    member=f"member-{n}",
                    number=n,
                    epochs=4,
                    workers=1,
                    gpus_per_worker=0.5,
                    params={"lr": n},
                    lineage={"from": "member-0", "warm": True, "epoch": 3} if n % 2 else None,
                )
        for n in range(members // 2 * start, members // 2 * (start + 1)):
            who = {"member": f"member-{n}"}
            attempt, first = 0, 0
            while attempt < 2:
                t += 0.5
                add("placed", **who, attempt=attempt, node="n", devices=[0], cohort=0, feeder=None, first_epoch=0)
                add("started", **who, attempt=attempt, epoch=first, step=0)
                again = attempt == 0 and rng.random() < 0.5
                for epoch in range(first, 2 if again else 4):
                    for _ in range(3):
                        t += 1.0
                        power()
                        usage("feed", None, 1)
                    metrics = {"accuracy": rng.random(), "loss": rng.random()}
                    add(
                        "epoch",
                        **who,
                        attempt=attempt,
                        epoch=epoch,
                        metrics=metrics,
                        samples=100,
                        samples_per_s=rng.random() * 9,
                        wall_s=3.0,
                    )
                    usage("train", f"member-{n}", 10 + n)
                if again:
                    add("failed", **who, attempt=attempt, error="x", reason="error", retry=True)
                    first, attempt = 1, 1  # its checkpoint is an epoch old
                    continue
                add("finished", **who, attempt=attempt, epoch=3, metrics=metrics)
                attempt = 2
        t += 5.0
        add("run_finished" if start else "run_stopped", reason="asked to")
        t += 100.0
    return events


def write(path: Path, events: list[Event]) -> RunDir:
    run_dir = RunDir(path)
    run_dir.events.write_bytes(lines(events))
    return run_dir


JOULES = ("energy_j", "full_energy_j", "mean_w")


def same(found: list[Event], expected: list[Event]) -> bool:
    """The same rows; energy and power to a hundred-thousandth of a joule and watt."""
    for row, other in zip(found, expected, strict=True):
        for name in other:
            approximate = name in JOULES and other[name] is not None
            assert row[name] == (pytest.approx(other[name], abs=1e-5) if approximate else other[name]), name
    return True


@pytest.mark.parametrize("seed", range(4))
def test_a_snapshot_and_what_follows_is_the_whole_log(tmp_path: Path, seed: int) -> None:
    events = a_run(seed)
    keeper = RunStatus(RunDir(tmp_path))
    for end in (*range(20, len(events), 37), len(events)):
        run_dir = write(tmp_path, events[:end])
        found = RunStatus.load(run_dir)  # from the snapshot of the round before
        assert (found.offset > 0 and same(rows(found), rows_of(events[:end]))) and found.state.finished == {}
        keeper.save_if_grown()
        found = RunStatus.load(run_dir)
        assert same(rows(found), rows_of(events[:end]))
    run_dir.snapshot.unlink()
    assert same(rows(RunStatus.load(run_dir)), rows_of(events)), "deleting it loses nothing"
    other = RunStatus(run_dir)
    other.save_if_grown()
    assert all(member.history == [] for member in other.state.members.values()), "it is lean"


def test_a_snapshot_that_another_controller_wrote_is_gone_on_from(tmp_path: Path) -> None:
    events = a_run(7)
    run_dir = write(tmp_path, events[:100])
    RunStatus(run_dir).save_if_grown()
    first = run_dir.snapshot.read_bytes()
    write(tmp_path, events)
    RunStatus(run_dir).save_if_grown()
    assert run_dir.snapshot.read_bytes() != first
    assert same(rows(RunStatus.load(run_dir)), rows_of(events))


def damaged(path: Path, how: str) -> None:
    content = path.read_bytes()
    head, _, body = content.partition(b"\n")
    match how:
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "empty":
            path.write_bytes(b"")
        case "flipped":
            path.write_bytes(content.replace(b"accuracy", b"occuracy", 1))
        case "newer":
            path.write_bytes(json.dumps({**json.loads(head), "v": 99}).encode() + b"\n" + body)
        case "no header":
            path.write_bytes(body)
        case "deep":
            path.write_bytes(b"[" * 100_000)
        case "beyond the log":
            path.write_bytes(json.dumps({**json.loads(head), "offset": 10**9}).encode() + b"\n" + body)
        case "directory":
            path.unlink()
            path.mkdir()


@pytest.mark.parametrize(
    "how", ["cut", "empty", "flipped", "newer", "no header", "deep", "beyond the log", "directory"]
)
def test_a_damaged_snapshot_is_not_used(tmp_path: Path, how: str) -> None:
    events = a_run(1)
    run_dir = write(tmp_path, events)
    RunStatus(run_dir).save_if_grown()
    damaged(run_dir.snapshot, how)
    found = RunStatus(run_dir)
    found._load_snapshot()
    assert found.offset == 0 and found.state.members == {}
    assert same(rows(RunStatus.load(run_dir)), rows_of(events))


def test_a_snapshot_of_another_log_is_not_used(tmp_path: Path) -> None:
    run_dir = write(tmp_path, a_run(1))
    RunStatus(run_dir).save_if_grown()
    events = a_run(2)
    write(tmp_path, events)
    assert same(rows(RunStatus.load(run_dir)), rows_of(events))


def test_a_member_that_ended_and_trains_again_after_all_is_counted_right(tmp_path: Path) -> None:
    events = a_run(1)
    run_dir = write(tmp_path, events)
    RunStatus(run_dir).save_if_grown()
    again = {"v": 2, "t": events[-1]["t"], "type": "epoch", "member": "member-0", "attempt": 5, "epoch": 1}
    events.append({**again, "metrics": {"accuracy": 0.25}, "samples": 10, "samples_per_s": 1.0})
    write(tmp_path, events)
    assert same(rows(RunStatus.load(run_dir)), rows_of(events))


@pytest.mark.slow
def test_the_status_of_ten_thousand_members_takes_a_second_and_300_mb(tmp_path: Path) -> None:
    """The log of a run that has finished, 20 epochs each; memory is the whole command's."""
    with open(tmp_path / "events.jsonl", "w") as file:
        file.write(log_lines(a_run(3, members=2)[:2]).decode())
        for n in range(10_000):
            t = 2000.0 + n
            lines = [{"type": "member", "number": n, "epochs": 20, "params": {"lr": 0.1 * n}}]
            lines += [{"type": "placed", "attempt": 0, "node": "n", "devices": [None], "cohort": 0}]
            for e in range(20):
                told = {
                    "metrics": {"accuracy": 0.5, "loss": 0.1},
                    "samples": 100,
                    "samples_per_s": 9.0,
                    "wall_s": 3.0,
                }
                lines += [{"type": "epoch", "attempt": 0, "epoch": e, **told, "padding": "x" * 400}]
                count = {"node": "n", "role": "train", "rank": 0, "pid": n, "cpu_s": 0.5 * e, "origin": "measured"}
                lines += [{"type": "usage", **count}]
            lines += [{"type": "finished", "attempt": 0, "epoch": 19, "metrics": {"accuracy": 0.5}}]
            file.write(log_lines([{"t": t, "member": f"member-{n}", **line} for line in lines]).decode())
    RunStatus(RunDir(tmp_path)).save_if_grown()
    code = f"""
import contextlib, os, resource, subprocess, sys
done = subprocess.run([sys.executable, "-m", "ensemble.cli", "status", {str(tmp_path)!r}], stdout=subprocess.PIPE)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(done.stdout.count(b"finished"), used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    finished, cpu_s, most_mib = map(float, done.stdout.split())
    assert finished == 10_000
    assert most_mib < 300 and cpu_s < 3, "CPU time: one second on a machine that has nothing else to do"
