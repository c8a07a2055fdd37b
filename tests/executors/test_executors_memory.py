"""A worker is held to the memory that its member was granted; runs of such members: test_executors_runs.py."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ensemble.executors.limits import find_memory_room, raise_memory_limit

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
