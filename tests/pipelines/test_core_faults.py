"""Processes die, leave and come back: whoever goes on reads what it would have read anyway."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import core_pipes as pipes
import psutil
import pytest
from core_pipes import Feeder, Job, N, leaves_nothing, pipe  # noqa: F401

from pipelines import Pipeline, PipelineError, attach, sources
from pipelines.feeder.process import spawn
from pipelines.ipc.child_processes import child_environment


def talkative(sample: dict[str, Any]) -> dict[str, Any]:
    print("a stage prints", flush=True)
    return sample


def test_what_a_stage_prints_does_not_reach_the_reports_and_a_killed_feeder_leaves_no_directory() -> None:
    made = Pipeline(pipe("plain").source).map(talkative)
    process = spawn(made, every_s=0.02)
    assert len(list(attach(process.address, made, N))) == 1
    reports = [*(process.read() or []), *process.stop()]
    assert reports[-1]["prepared"] == N and {r["type"] for r in reports} == {"feeder"}
    assert set(reports[-1]["cpu"]) == {"feed", "prepare"} and reports[-1]["cpu"]["prepare"] > 0
    assert process.stop() == []
    killed = spawn(pipe("plain"))
    killed.kill()
    killed.stop()
    assert not os.path.exists(os.path.dirname(killed.address))


def test_a_killed_feeder_is_done_without_until_another_takes_its_address(tmp_path: Path) -> None:
    address, over = tmp_path / "s" / "feeder", threading.Event()
    slow: dict[str, Any] = {"epochs": (0, 1 << 20), "pause_s": 0.01}
    jobs = [Job(**slow), *(Job(batch_size=7, rank=r, world=2, **slow) for r in range(2))]
    first = spawn(pipe("numpy"), capacity=24, address=address, every_s=0.02)
    loaders = [job.attach(str(address)) for job in jobs]
    pids = [first.pid]

    def wait_for_more(which: str) -> None:
        before = [loader.stats()[which] for loader in loaders]
        pipes.wait_until(lambda: all(loader.stats()[which] > n for loader, n in zip(loaders, before, strict=True)))

    def kill_and_replace() -> None:
        wait_for_more("shared_batches")
        pids.extend(child.pid for child in psutil.Process(first.pid).children())
        assert len(pids) > 1
        first.kill()
        wait_for_more("private_batches")
        with Feeder(pipe("numpy"), capacity=24, address=address) as second:
            first.stop()  # finds that the address is another's now
            assert os.path.exists(address)
            wait_for_more("shared_batches")
            over.set()
            pipes.wait_until(lambda: second.stats()["members"] == 0)

    running = [partial(pipes.read_until, over, job, loader) for job, loader in zip(jobs, loaders, strict=True)]
    _, *results = pipes.together([kill_and_replace, *running])
    pipes.check_until(results, jobs)
    for records, counts in results:
        assert counts["private_batches"] + counts["shared_batches"] == len(records)
    pipes.wait_until(lambda: all(map(pipes.gone, pids)))
    assert list(address.parent.iterdir()) == []


def test_a_loader_says_that_its_feeder_is_gone_also_between_two_epochs() -> None:
    with Feeder(pipe("numpy")) as feeder:
        loader = Job(epochs=(0, 2)).attach(feeder.address)
        epochs = loader.epochs()
        first = iter(next(epochs))
        for _ in range(loader.steps_per_epoch):
            next(first)
        feeder.close()
        with pytest.warns(UserWarning, match="goes on alone from epoch 1, step 0"):
            assert next(first, None) is None
        assert len(list(next(epochs))) == loader.steps_per_epoch == loader.stats()["private_batches"]


ENDS_WITH_PARENT = """if True:
    import sys, time
    from core_pipes import pipe
    from pipelines.feeder.process import spawn
    process = spawn(pipe("plain"), workers=2, every_s=0.02)
    while not (reports := process.read()):
        time.sleep(0.01)
    print(process.address, process.pid, *reports[0]["pids"]["prepare"], flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("ending", [pytest.param("SIGTERM", marks=pytest.mark.more), "end of the parent"])
def test_a_feeder_that_is_told_to_end_leaves_nothing(ending: str) -> None:
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command, folder = [sys.executable, "-c", ENDS_WITH_PARENT], Path(__file__).parent
    with subprocess.Popen(command, cwd=folder, env=child_environment(), **streams) as parent:
        assert parent.stdout is not None
        address, *pids = parent.stdout.readline().split()
        assert os.path.exists(address) and len(pids) == 3
        if ending == "SIGTERM":
            os.kill(int(pids[0]), signal.SIGTERM)
        else:
            parent.kill()
        pipes.wait_until(lambda: all(pipes.gone(int(pid)) for pid in pids))
        assert not os.path.exists(os.path.dirname(address))
        parent.kill()


def test_closing_twice_writes_into_nobodys_file() -> None:
    feeder = Feeder(pipe("plain"))
    feeder.close()
    taken = [os.pipe() for _ in range(20)]  # take the numbers that the feeder had
    feeder.close()
    for reading, writing in taken:
        os.close(writing)
        assert os.read(reading, 1) == b""
        os.close(reading)


def test_a_member_at_work_goes_on_when_the_next_feeder_does_not_fit_it(tmp_path: Path) -> None:
    address, job = tmp_path / "feeder", Job(epochs=(0, 8))
    with Feeder(pipe("numpy"), capacity=24, address=address):
        batches = iter(job.attach(str(address)))
        records = [pipes.record(next(batches)) for _ in range(3)]
    with Feeder(pipe("torch"), capacity=24, address=address), pytest.warns(UserWarning, match="stages at the"):
        records += map(pipes.record, batches)
    assert records == pipes.alone(job)


def test_two_consumers_of_one_name_do_not_disturb_each_other() -> None:
    job = Job(epochs=(0, 4), name="member-0")
    with Feeder(pipe("numpy"), capacity=16, expect=1, workers=2) as feeder:
        old = job.attach(feeder.address)
        batches = iter(old)
        held = [pipes.record(next(batches))]
        # A new life of the member, while the old one has not been noticed to be gone.
        new = job.attach(feeder.address)
        slow = partial(pipes.read, new, Job(pause_s=0.001))
        later, records = pipes.together([lambda: [*map(pipes.record, batches)], slow])
    assert [*held, *later] == records == pipes.alone(job)
    assert old.stats()["private_batches"] == new.stats()["private_batches"] == 0


@pytest.mark.filterwarnings("ignore:working alone")
def test_a_feeder_without_descriptors_refuses_newcomers_and_serves_the_others() -> None:
    process, jobs = spawn(pipe("numpy"), capacity=24), [Job(epochs=(0, 1)), Job(epochs=(0, 2), name="late")]
    hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[1]
    try:
        early = jobs[0].attach(process.address)
        used = {int(fd) for fd in os.listdir(f"/proc/{process.pid}/fd")}
        free = min(set(range(len(used) + 1)) - used)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (free, hard))
        late = jobs[1].attach(process.address)
        assert not late.shared
        assert pipes.read(early, jobs[0]) == pipes.alone(jobs[0]) and early.stats()["private_batches"] == 0
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (hard, hard))
        assert pipes.read(late, jobs[1]) == pipes.alone(jobs[1])
        assert late.stats()["shared_batches"] > 0, "it has come in later"
    finally:
        process.stop()


SCRIPT = """
import os, sys
import numpy as np
from pipelines import Feeder, Pipeline, attach, sources

OFFSET = 5.0
def mine(sample, rng):
    return {**sample, "x": sample["x"] + OFFSET + rng.random(), "pid": os.getpid()}
class Doubled:
    def __call__(self, sample):
        return {**sample, "x": sample["x"] * 2}

print("started")
pipe = Pipeline(sources.arrays(x=np.arange(20.0))).map(mine).map(Doubled())
feeder = Feeder(pipe)                                # never closed, and no `if __name__` anywhere
shared = [b for b in attach(feeder.address, pipe, 6, range(2), copy=True)]
alone = list(pipe.loader(6, range(2)))
assert all(np.array_equal(a["x"], b["x"]) for a, b in zip(shared, alone, strict=True))
assert os.getpid() not in shared[0]["pid"].tolist()
print(os.path.dirname(feeder.address), *feeder.stats()["workers"])
"""


def test_stages_of_a_script_reach_the_workers_and_a_forgotten_feeder_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "types.py").write_text("raise ImportError('a file of the working directory in the way')")
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": pipes.LIMIT_S, "cwd": elsewhere}
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, tmp_path / "script.py"], env=environment, **options)
    assert (done.returncode, done.stderr) == (0, "")
    started, last = done.stdout.splitlines()
    directory, *pids = last.split()
    assert started == "started" and not os.path.exists(directory)
    pipes.wait_until(lambda: all(pipes.gone(int(pid)) for pid in pids))


def test_a_full_ring_and_idle_consumers_use_no_cpu() -> None:
    process = spawn(pipe("numpy"), capacity=16, every_s=60.0, workers=2)
    loader = Job(epochs=(0, 9)).attach(process.address)
    try:
        next(batches := iter(loader))
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]

        def is_idle() -> bool:
            before = sum(sum(p.cpu_times()[:2]) for p in family)
            time.sleep(1.0)
            return sum(sum(p.cpu_times()[:2]) for p in family) - before <= 0.03

        pipes.wait_until(is_idle)  # as soon as the ring is full: one that polls would never be
        assert len(family) == 3 and batches is not None
    finally:
        loader.close()
        process.stop()


def test_the_sources_of_a_failed_start_are_given_back(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"did not start: SampleError: sample 0 .*no field 'nothing'"):
        spawn(Pipeline(sources.arrays(x=[1.0])).map(pipes.slowly, field="nothing"))
    (tmp_path / "file").touch()
    for name in ("file", "long" * 40):
        with pytest.raises(PipelineError, match=f"cannot listen at .*{name[:4]}"):
            Feeder(pipe("plain"), resident={"still": pipe("still")}, address=tmp_path / name)
    with Feeder(pipe("plain"), address=tmp_path / "a"):
        with pytest.raises(PipelineError, match=r"a feeder is listening at .* already"):
            Feeder(pipe("plain"), address=tmp_path / "a")
        assert pipes.shared(Job(kind="plain"), str(tmp_path / "a"))[1]["private_batches"] == 0
    assert (tmp_path / "file").exists()
