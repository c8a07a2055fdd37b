"""Memory: a worker is held to what its member was granted; a node offers what real processes of others leave."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.control_groups import make_control_group
from kit.finished_runs import of_kind

from ensemble.executors.limits import find_memory_room, raise_memory_limit
from ensemble.executors.memory_offers import MemoryOffers

LIMITED = """
import json, mmap, os, threading
import numpy as np, torch
from ensemble.executors.limits import limit_memory
from ensemble.meter.memory import data_gb
from ensemble.train.worker import classify
from pipelines import Pipeline, sources
from pipelines.shm.private_mapping import PrivateMapping

ballast = bytearray(200 << 20)                        # as what is inherited from the fork server
assert limit_memory(None, "cpu") is None and limit_memory(1.0, "cuda:0") is None
limit = limit_memory(0.25, "cpu")
kept = np.ones(100 << 20, np.uint8)                   # within the grant
shared = os.memfd_create("ring")
os.ftruncate(shared, 400 << 20)
public = mmap.mmap(shared, 400 << 20)                 # shared memory is nobody's
private = [PrivateMapping(shared, [(0, 400 << 20)] * 2) for _ in range(2)]
more = np.ones(50 << 20, np.uint8)                    # still within the grant, beside 1.6 GB of private mappings
ways = {
    "numpy": lambda: np.ones(200 << 20, np.uint8),
    "torch": lambda: torch.ones(50 << 20),
    "python": lambda: bytearray(200 << 20),
    "backward": lambda: torch.nn.Linear(10_000, 5_000)(torch.ones(1, 10_000)).sum().backward(),
}
def prepare(function):
    return next(iter(Pipeline(sources.arrays(x=np.ones(1))).map(function).loader(1, range(1))))
def take_numpy(sample):
    return {"x": np.ones(200 << 20, np.uint8)[:1]}
def take_python(sample):
    return {"x": np.frombuffer(bytearray(200 << 20), np.uint8)[:1]}
ways |= {f"stage, {kind}": lambda f=f: prepare(f) for kind, f in (("numpy", take_numpy), ("python", take_python))}
said = {}
for name, take in ways.items():
    try:
        take()
        said[name] = "nothing"
    except Exception as error:
        said[name] = classify(error)
del private
import gc, resource; gc.collect()
said["as before"] = resource.getrlimit(resource.RLIMIT_DATA)[0] == limit
print(json.dumps(said))
"""


def test_what_goes_over_the_grant_is_refused_and_shared_memory_does_not_count() -> None:
    run = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert said.pop("as before") is True
    ways = ("numpy", "torch", "python", "backward", "stage, numpy", "stage, python")
    assert said == {way: ["oom", True] for way in ways}


GROWING = """
import sys
import numpy as np
from ensemble.executors.limits import limit_memory
limit_memory(0.05, "cpu")
for line in sys.stdin:
    try:
        np.ones(200 << 20, np.uint8)
        print("enough", flush=True)
    except MemoryError:
        print("too little", flush=True)
"""


def test_a_limit_is_raised_from_outside_and_never_lowered() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GROWING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        answers = []
        for room_gb in (0.0, 0.5, 0.0):
            process.stdin.write("\n")
            process.stdin.flush()
            answers.append(process.stdout.readline().strip())
            raise_memory_limit(process.pid, room_gb)
    assert answers == ["too little", "too little", "enough"]
    assert find_memory_room(4) == pytest.approx(find_memory_room(1) / 4, rel=0.2)


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
