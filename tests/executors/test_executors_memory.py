"""A worker is held to the memory that its member was granted; one that takes more gets more, and harms nobody."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from execute_members import an_ensemble

import ensemble
from ensemble import Member
from ensemble.store import RunState, fold, read_events

LIMITED = """
import json, mmap, os, threading
import numpy as np, torch
from ensemble.executors.limits import limit_memory
from ensemble.meter.memory import data_gb
from ensemble.train.worker import classify
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
    run = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert said.pop("as before") is True
    assert said == {way: ["oom", True] for way in ("numpy", "torch", "python", "backward")}


def state_of(run_dir: Path) -> RunState:
    return fold(read_events(run_dir / "events.jsonl"))


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a member that takes 400 MB more than it was granted, at first, beside one that does not."""
    path = tmp_path_factory.mktemp("greedy") / "run"
    members = [
        Member({"lr": 0.1}, memory_gb=0.5, cpus_per_worker=0.5),
        Member({"lr": 0.2, "hold_mb": 700}, memory_gb=0.25, cpus_per_worker=0.5),
    ]
    ensemble.submit(an_ensemble(members, retries=0), path, "local").wait()
    return path


def test_a_member_that_takes_too_much_is_tried_again_with_more_room(greedy: Path) -> None:
    state = state_of(greedy)
    assert {member.id: member.state for member in state.members.values()} == dict.fromkeys(
        ("member-0", "member-1"), "finished"
    )
    assert state.members["member-1"].attempts == 3 and state.members["member-1"].reason == "oom"
    assert [event["memory_gb"] for event in state.rooms] == [0.5, 1.0], "counted against none of its 0 retries"
    assert state.members["member-0"].attempts == 1


def test_its_neighbour_learns_what_it_learns_alone(greedy: Path, tmp_path: Path) -> None:
    ensemble.submit(an_ensemble([{"lr": 0.1}]), tmp_path / "alone", "inline").wait()
    alone = state_of(tmp_path / "alone").members["member-0"].weights_sha256
    assert alone is not None and state_of(greedy).members["member-0"].weights_sha256 == alone
