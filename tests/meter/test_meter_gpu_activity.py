"""Who keeps GPUs busy, what others hold of them, and which are broken; NVIDIA's library is a stand-in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from forked_programs import Programs
from hypothesis import given
from hypothesis import strategies as st

from ensemble.meter.devices import RunProcess
from ensemble.meter.gpu_activity import (
    IN_USE,
    MIG,
    MPS,
    NO_SAMPLES,
    NONSENSE,
    NOT_LISTED,
    OTHER_NAMESPACE,
    GpuSample,
    select_samples,
    sum_by_owner,
)

ME = RunProcess("train", "member-0", "GPU-0")


@given(st.dictionaries(st.integers(1, 50), st.integers(1, 100), max_size=12), st.floats(0.1, 5))
def test_sm_seconds_are_utilization_times_the_interval(shares: dict[int, int], interval_s: float) -> None:
    run = {
        pid: RunProcess("profile" if pid % 5 == 0 else "train", None if pid % 5 == 0 else f"m{pid % 3}", "g")
        for pid in range(1, 30)
    }
    found = sum_by_owner([GpuSample(pid, 1, share) for pid, share in shares.items()], interval_s, run.get)
    assert sum(s for *_, s in found) == pytest.approx(sum(shares.values()) / 100 * interval_s, abs=1e-5)
    others = sum(share for pid, share in shares.items() if pid not in run) / 100 * interval_s
    assert sum(s for role, _, s in found if role == "other") == pytest.approx(others, abs=1e-5)
    owners = [(role, member) for role, member, _ in found]
    assert len(set(owners)) == len(owners), "one entry each"


def test_samples_that_cannot_be_are_refused_and_idle_processes_left_out() -> None:
    good, idle = GpuSample(7, 1500, 40), GpuSample(8, 3, 0)
    assert select_samples([good, idle], 1000, 2000) == [good]
    for bad in (GpuSample(7, 1500, 37100), GpuSample(7, 900, 40), GpuSample(7, 217_144_956_601_725, 5)):
        assert select_samples([good, bad], 1000, 2000) is None


READ = """
import json, os, subprocess, sys, time
from ensemble.meter.devices import RunProcess
from ensemble.meter.gpu_activity import GpuActivity
from ensemble.meter.devices import list_gpus
child = subprocess.Popen(["sleep", "1000"])
later_us = None
started_us = time.time_ns() // 1000
now = lambda: time.time_ns() // 1000 if later_us is None else started_us + later_us
activity = GpuActivity(list_gpus(), now_us=now)
print(json.dumps([os.getpid(), child.pid, started_us]), flush=True)
for line in sys.stdin:
    run, interval_s, later_us, readings = json.loads(line)
    run = {int(pid): RunProcess(*process) for pid, process in run.items()}
    for _ in range(readings):
        found = activity.sample(run, interval_s)
    print(json.dumps([found, activity.describe()]), flush=True)
activity.close()
child.kill()
"""


class Reader:
    def __init__(self, folder: Path, programs: Programs, gpus: str) -> None:
        self.state = folder / "state"
        self.state.write_text("")
        self.program = programs.start(READ, gpus, self.state)
        self.pid, self.child, self.started_us = json.loads(self.program.stdout.readline())
        self.busy = f"GPU-0 process {self.pid} 1", f"GPU-0 util {self.pid} 40"

    def say(self, *lines: str) -> None:
        """What befalls the GPUs now, in place of what did before."""
        self.state.write_text("".join(line + "\n" for line in lines))

    def read(self, run: Any = None, interval_s: float = 1.0, at_s: float | None = None, times: int = 1) -> Any:
        """The activity by GPU, and the line that says how it is known; read now, or so long after the start."""
        run = {self.pid: ME} if run is None else run
        return json.loads(self.program.ask(json.dumps([run, interval_s, at_s and round(at_s * 1e6), times])))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.program.end()


def test_members_their_children_and_others_have_what_they_used(tmp_path: Path, programs: Programs) -> None:
    with Reader(tmp_path, programs, "A100:80,A100:80") as reader:
        other = os.getpid()
        ours = f"GPU-0 process {reader.pid} 1", f"GPU-0 util {reader.pid} 40", f"GPU-0 util {reader.child} 10"
        reader.say(*ours, f"GPU-0 util {other} 25", f"GPU-1 util {other} 100")
        on_first = [["other", None, 0.5], ["train", "member-0", 1.0]]
        assert reader.read(interval_s=2.0) == [{"GPU-0": on_first, "GPU-1": [["other", None, 2.0]]}, IN_USE]
        profile = {reader.pid: RunProcess("profile", None, "GPU-0")}
        assert reader.read(profile)[0]["GPU-0"] == [["other", None, 0.25], ["profile", None, 0.5]]


def test_a_sample_counts_once_and_covers_the_whole_interval(tmp_path: Path, programs: Programs) -> None:
    with Reader(tmp_path, programs, "A100:80") as reader:
        two = {reader.pid: ME, reader.child: RunProcess("train", "member-1", "GPU-0")}

        def sample(pid: int, percent: int, at_s: float) -> str:
            return f"GPU-0 util {pid} {percent} {reader.started_us + round(at_s * 1e6)}"

        # Of four samples of the first second two are of the one, one is of the other: nobody was there once.
        first = [sample(reader.pid, 80, 0.2), sample(reader.pid, 80, 0.4), sample(reader.child, 80, 0.6)]
        reader.say(f"GPU-0 process {reader.pid} 1", *first, sample(reader.child, 0, 0.8))
        expected = [["train", "member-0", 0.4], ["train", "member-1", 0.2]]
        assert reader.read(two, at_s=1.0)[0] == {"GPU-0": expected}
        assert reader.read(two, at_s=1.1)[0] == {"GPU-0": []}, "NOT_FOUND: there are no new ones"
        with reader.state.open("a") as state:
            state.write(sample(reader.child, 50, 0.95) + "\n")  # it was published late
        [[role, member, used_s]] = reader.read(two, at_s=2.0)[0]["GPU-0"]
        assert (role, member) == ("train", "member-1") and used_s <= 0.5
        assert reader.read(two, at_s=2.1)[0] == {"GPU-0": []}
        reader.say(f"GPU-0 process {reader.pid} 1")
        assert reader.read(two, at_s=0.5) == [{"GPU-0": []}, IN_USE], "a clock that was set back"
        reader.say(f"GPU-0 process {reader.pid} 1", sample(reader.pid, 70, 0.8))
        assert reader.read(two, at_s=1.0)[0] == {"GPU-0": [["train", "member-0", 0.7]]}


@pytest.mark.parametrize(
    ("code", "reason"),
    [(3, "does not support the utilization of processes"), (4, "does not permit to read"), (13, "is too old")],
)
def test_what_the_driver_refuses_is_asked_once(tmp_path: Path, programs: Programs, code: int, reason: str) -> None:
    with Reader(tmp_path, programs, "A100:80") as reader:
        reader.say(*reader.busy, f"GPU-0 fails {code}")
        found, how = reader.read()
        assert found == {} and how.startswith(f"the driver {reason}")
        reader.say(*reader.busy)
        assert reader.read() == [{}, how]


def test_a_lost_gpu_and_one_in_mig_mode_leave_the_others(tmp_path: Path, programs: Programs) -> None:
    with Reader(tmp_path, programs, "A100:80,A100:80") as reader:
        reader.say("GPU-1 lost 1", *reader.busy)
        lost = f"{IN_USE}; not on GPU-1: the driver says: GPU is lost"
        assert reader.read() == [{"GPU-0": [["train", "member-0", 0.4]]}, lost]
    with Reader(tmp_path, programs, "A100:80:2,A100:80") as reader:
        in_mig = f"MIG-0-0 process {reader.pid} 1", f"GPU-0 util {reader.pid} 90"
        reader.say(*in_mig, f"GPU-1 util {os.getpid()} 50")
        run = {reader.pid: ME._replace(gpu="MIG-0-0")}
        assert reader.read(run) == [{"GPU-1": [["other", None, 0.5]]}, f"{IN_USE}; not on GPU-0: {MIG}"]


def test_what_passes_is_no_reason_for_ever_and_said_after_a_while(tmp_path: Path, programs: Programs) -> None:
    with Reader(tmp_path, programs, "A100:80") as reader:
        reader.say(*reader.busy, "GPU-0 fails 999")
        assert reader.read() == [{}, IN_USE] and reader.read(times=40)[1].startswith("the driver says: ")
        reader.say(*reader.busy)
        assert reader.read() == [{"GPU-0": [["train", "member-0", 0.4]]}, IN_USE]
        reader.say(*reader.busy, "GPU-0 util 50554 37100")
        assert reader.read() == [{}, IN_USE] and reader.read(times=30) == [{}, NONSENSE]
        reader.say(*reader.busy)
        assert reader.read()[1] == IN_USE
    with Reader(tmp_path, programs, "A100:80") as reader:
        assert reader.read() == [{"GPU-0": []}, IN_USE] and reader.read(times=30) == [{"GPU-0": []}, NO_SAMPLES]
        reader.say(f"GPU-0 util {os.getpid()} 20")
        assert reader.read() == [{}, NOT_LISTED], "it may be a rank under another id"
        reader.say(f"GPU-0 util {os.getpid()} 20", f"GPU-0 process {reader.pid} 1")
        assert reader.read() == [{"GPU-0": [["other", None, 0.2]]}, IN_USE], "the rank is idle"


def test_a_multi_process_service_is_recognized(tmp_path: Path, programs: Programs) -> None:
    with Reader(tmp_path, programs, "A100:80") as reader:
        reader.say(*reader.busy, f"GPU-0 mps {reader.pid}")
        assert reader.read() == [{}, MPS]
    program = shutil.copy(shutil.which("sleep") or "", tmp_path / "nvidia-cuda-mps-server")
    server = subprocess.Popen([str(program), "1000"])
    try:
        comm = Path(f"/proc/{server.pid}/comm")
        while comm.read_text().strip() != "nvidia-cuda-mps":  # it is still this program until it has started
            time.sleep(0.01)
        with Reader(tmp_path, programs, "A100:80") as reader:
            reader.say(f"GPU-0 process {server.pid} 1", f"GPU-0 util {server.pid} 40")
            assert reader.read() == [{}, MPS]
    finally:
        server.kill()
        server.wait()


HOSTS = 5_000_000  # no process here has such an id


def test_the_ids_of_a_pods_host_are_not_used(tmp_path: Path, programs: Programs) -> None:
    with Reader(tmp_path, programs, "A100:80,A100:80") as reader:
        reader.say(f"GPU-0 process {HOSTS} 1", f"GPU-0 util {HOSTS} 40", f"GPU-1 util {HOSTS + 1} 50")
        found, how = reader.read()
        assert found == {"GPU-1": [["other", None, 0.5]]} and how == IN_USE, "no rank is on GPU-1"
        assert reader.read(times=30)[1] == f"{IN_USE}; not on GPU-0: {NOT_LISTED}"
        reader.say(*reader.busy, f"GPU-0 util {HOSTS} 30")
        on_first = [["other", None, 0.3], ["train", "member-0", 0.4]]
        assert reader.read() == [{"GPU-0": on_first, "GPU-1": []}, IN_USE]
    with Reader(tmp_path, programs, "A100:80,A100:80") as reader:  # an id that is the run's by chance
        reader.say(f"GPU-1 process {reader.pid} 1", f"GPU-1 util {reader.pid} 40")
        assert reader.read() == [{"GPU-0": []}, OTHER_NAMESPACE], "of the GPU that was read before"
        reader.say(*reader.busy)
        assert reader.read() == [{}, OTHER_NAMESPACE]


WATCH = """
import json, os, sys
from ensemble.meter.gpus import GpuWatch
from ensemble.meter.power.nvml import open_nvml
watch, power = GpuWatch(lambda pid: pid == os.getpid()), open_nvml()
for line in sys.stdin:
    with open(os.environ["STAND_IN_STATE"], "a") as state:
        state.write(line.replace("OWN", str(os.getpid())).replace("; ", "\\n"))
    faults = watch.find_faults()
    states = watch.read_states({"GPU-0"})
    held, modes = ({gpu: getattr(state, of) for gpu, state in states.items()} for of in ("held_gb", "mode"))
    print(json.dumps([faults, held, [reading.device for reading in power.read()], watch.lost, modes]), flush=True)
"""


class Watched:
    def __init__(self, programs: Programs, folder: Path, gpus: str, state: str, visible: str = "") -> None:
        (folder / "state").write_text(state)
        self.program = programs.start(WATCH, gpus, folder / "state", CUDA_VISIBLE_DEVICES=visible)

    def after(self, line: str) -> Any:
        """New faults, GiB that others hold, GPUs whose energy is read, those lost at the start, compute modes."""
        return json.loads(self.program.ask(line))

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.program.end()


def test_what_a_rank_holds_is_no_others_whether_it_is_listed_or_not(programs: Programs, tmp_path: Path) -> None:
    with Watched(programs, tmp_path, "A100:80,A100:80", "GPU-0 held 8\n") as watched:
        assert watched.after("GPU-1 held 2")[1] == {"GPU-0": 0.0, "GPU-1": 2.0}, "a rank may hold it by now"
        assert watched.after("GPU-0 process OWN 30")[1] == {"GPU-0": 8.0, "GPU-1": 2.0}
        assert watched.after("GPU-0 held 20")[1]["GPU-0"] == 20.0
        assert watched.after("GPU-0 process OWN 0")[1]["GPU-0"] == 20.0
        assert watched.after("GPU-0 held 50")[1]["GPU-0"] == 20.0, "not listed with a figure"
        assert watched.after("GPU-0 held 5")[1]["GPU-0"] == 5.0


def test_each_fault_is_found_once_and_other_gpus_are_still_measured(programs: Programs, tmp_path: Path) -> None:
    with Watched(programs, tmp_path, "A100:80,A100:80:2,A100:80", "GPU-0 xid 79\nGPU-2 ecc 3\n") as watched:
        faults, held, read, lost, _ = watched.after("GPU-0 xid 31")
        assert (faults, len(held), len(read), lost) == ({}, 4, 3, []), "what was before the start, or is no fault"
        faults, held, read, *_ = watched.after("GPU-1 lost 1")
        assert faults == {"GPU-1": "the driver says: GPU is lost"}
        assert (set(held), read) == ({"GPU-0", "GPU-2"}, ["GPU-0", "GPU-2"])
        assert watched.after("GPU-2 ecc 4")[0] == {"GPU-2": "1 uncorrectable ECC error"}
        assert watched.after("GPU-2 xid 48")[0] == {}, "it is known"
    with Watched(programs, tmp_path, "A100:80,A100:80", "GPU-0 lost 1\n") as watched:
        assert watched.after("GPU-1 held 0") == [{}, {"GPU-1": 0.0}, ["GPU-1"], ["0"], {"GPU-1": "default"}]


def test_a_gpu_whose_counter_goes_back_is_left_out_once_and_said(
    programs: Programs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Watched(programs, tmp_path, "A100:80,A100:80:2", "GPU-0 energy 9000\nGPU-1 energy 9000\n") as watched:
        assert watched.after("GPU-0 energy 9500; GPU-1 energy 9900")[2] == ["GPU-0", "GPU-1"]
        assert watched.after("GPU-1 lost 1")[2] == ["GPU-0"]
        assert watched.after("GPU-1 lost 0; GPU-1 energy 100")[2] == ["GPU-0"], "it was reset"
        assert watched.after("GPU-1 energy 600")[2] == ["GPU-0", "GPU-1"]
    assert capfd.readouterr().err.count("GPU GPU-1: its energy counter went back") == 1


def test_of_instances_that_are_named_the_gpu_is_watched(programs: Programs, tmp_path: Path) -> None:
    visible = "MIG-1-1,MIG-0-0,MIG-0-1"
    with Watched(programs, tmp_path, "A100:80:2,A100:80:2", "GPU-1 mode 3\n", visible) as watched:
        modes = {"MIG-1-1": "exclusive", "MIG-0-0": "default", "MIG-0-1": "default"}
        held = {"MIG-1-1": 0.0, "MIG-0-0": 0.0, "MIG-0-1": 3.0}
        assert watched.after("MIG-0-1 held 3") == [{}, held, ["GPU-1", "GPU-0"], [], modes]
        faults, held, *_ = watched.after("GPU-0 xid 79")
        assert faults == {"GPU-0": "XID 79: GPU has fallen off the bus"} and set(held) == {"MIG-1-1"}
