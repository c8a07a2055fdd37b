"""What a node offers of its host memory, beside real processes of others; control groups bound what they take."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.control_groups import make_control_group
from kit.finished_runs import of_kind

from ensemble.executors.memory_offers import MemoryOffers

HERE = Path(__file__).parent
MIB = 2**20
LIMIT_MIB = 2500
JOIN = "import os, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
#: A process of somebody else, which the kernel does not choose where memory is short.
HOLDS = """
open("/proc/self/oom_score_adj", "w").write("-900")
held = bytearray(b"1") * (int(sys.argv[2]) << 20)
print(flush=True)
sys.stdin.read()
"""
#: Says after each step what others leave, as seen by a process that holds much itself, in each way there is.
LOOKS = """
import mmap, subprocess, tempfile
from ensemble.executors.memory_offers import MemoryOffers
from ensemble.schedule.needs import Node
from pipelines.environment.machine_limits import limit_bytes

offers, GIB = MemoryOffers(), 2**30
def look(what):
    left = offers.offer(Node("a", 1.0, (), limit_bytes() / GIB, "a"))
    print(what, None if left is None else round(left * 1024), flush=True)

look("nothing")
own = bytearray(b"1") * (100 << 20)
look("own")
ring = os.memfd_create("ring")
os.ftruncate(ring, 100 << 20)
with mmap.mmap(ring, 100 << 20) as mapped:
    mapped[:] = bytes(100 << 20)
look("ring")
child = subprocess.Popen(
    [sys.executable, "-c", "held = bytearray(b'1') * (100 << 20); print(flush=True); input()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
)
child.stdout.readline()
look("child")
with tempfile.NamedTemporaryFile(dir=sys.argv[2]) as file:
    file.write(bytes(100 << 20))
    file.flush()
    os.fsync(file.fileno())
    look("cache")
input()
look("others")
child.communicate(b"\\n")
"""
RUNS = f"""
sys.path.insert(0, {str(HERE.parent / "support")!r})
import logging
import ensemble
from ensemble import Resources
from kit.execute_members import an_ensemble

logging.basicConfig(level=logging.WARNING)
if __name__ == "__main__":
    needs = Resources(cpus_per_worker=0.5, gpus_per_worker=0.0, memory_gb=1.0)
    members = [{{"lr": 0.1, "hold_mb": 400}}, {{"lr": 0.2, "hold_mb": 400}}]
    ensemble.submit(an_ensemble(members, resources=needs, retries=0), *sys.argv[2:]).wait()
"""


@contextlib.contextmanager
def make_group(limit_mib: int) -> Iterator[Path]:
    with make_control_group(limit_mib) as made:
        if made is None:
            pytest.skip("no control group can be made here")
        yield made


@contextlib.contextmanager
def others_hold(group: Path, mib: int) -> Iterator[None]:
    command = [sys.executable, "-c", JOIN + HOLDS, str(group), str(mib)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield
        process.stdin.close()


def test_only_what_others_hold_is_left_to_them(tmp_path: Path) -> None:
    seen, script, pipe = dict[str, str](), tmp_path / "looks.py", subprocess.PIPE
    script.write_text(JOIN + LOOKS)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(make_group(1000))
        command = [sys.executable, str(script), str(group), str(tmp_path)]
        process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        assert process.stdin is not None and process.stdout is not None
        for what in ("nothing", "own", "ring", "child", "cache"):
            seen |= [process.stdout.readline().split()]
            assert seen.get(what) == "None", "what the run itself holds, and page cache, are nobody else's"
        with others_hold(group, 300):
            process.stdin.write("\n")
            process.stdin.flush()
            what, left = process.stdout.readline().split()
        assert what == "others" and 620 <= int(left) <= 710


@pytest.mark.more
@pytest.mark.parametrize("executor", ["local", "inline"])
def test_members_wait_while_others_hold_the_memory_and_start_when_it_is_given_back(
    executor: str, tmp_path: Path
) -> None:
    run, script = tmp_path / "run", tmp_path / "runs.py"
    script.write_text(JOIN + RUNS)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(make_group(LIMIT_MIB))
        with others_hold(group, 1750):
            command = [sys.executable, str(script), str(group), str(run), executor]
            process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
            assert process.stderr is not None
            said = process.stderr.readline()
            assert "no member can start now: member-0 asks for 1 worker x 0.5 cpus, 1 GiB" in said
            assert not of_kind(run, "placed")
        assert process.wait() == 0, process.stderr.read()
    first, later = of_kind(run, "node")
    assert first["memory_left_gb"] < 1.0 and later["memory_left_gb"] is None
    assert len(of_kind(run, "finished")) == 2 and not of_kind(run, "failed")
    assert all(event["t"] >= later["t"] for event in of_kind(run, "placed"))
    assert [bool(event["detail"]) for event in of_kind(run, "memory_awaited")] == [True, False]
    rings = [event["ring_bytes"] for event in of_kind(run, "feeder")] or [0]
    offered, limit = first["memory_gb"] * 2**30, LIMIT_MIB * MIB
    assert (max(rings) > 0) == (executor == "local") and max(rings) <= limit / 16
    assert offered + max(rings) <= limit < 1.1 * offered, "members and rings together"


def test_what_is_seen_in_one_look_only_changes_no_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([50.0, None, 50.0, 50.0])
    offers, found = MemoryOffers(), []
    offers._total_gb = 100.0
    monkeypatch.setattr(offers, "_read", lambda: next(looks))
    for _ in range(4):
        offers._next_look = 0.0
        found.append(offers.find_change())
    assert found == [None, None, None, (50.0,)]
