"""What others hold of GPUs, and which are broken, by a stand-in for NVIDIA's library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forked_programs import Programs

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
    """A process with a `GpuWatch`, for which GPU-0 is in use."""

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
