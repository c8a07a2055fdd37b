"""Forks of a run: after the imports, before CUDA begins (NVML is a stand-in); where they look for modules."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gpu_child import make_machine
from kit.event_dicts import fold, read_events
from kit.leftovers import wait_until

import ensemble
from ensemble.executors import EXECUTORS, make_executor
from ensemble.executors.spawn import ForkServer, make_worker_command
from ensemble.store import RunDir
from pipelines.ipc.child_processes import child_environment

#: A `sitecustomize` for which ranks do not train: they say what they are and what they see. If there is a library
#: named as CUDA's, the fork server loads it, as torch 2.11 for CUDA 13 was seen to do.
SITE = """
import ctypes, os, sys, types

def run(job, ensemble, send, inbox, clock):
    import json, torch
    from pathlib import Path

    def name(command):
        return next(word for word in command if word.startswith("ensemble.executors."))

    parent = Path(f"/proc/{os.getppid()}")
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    print(json.dumps({
        "interpreter": name(sys.orig_argv),
        "parent": name(parent.joinpath("cmdline").read_text().split("\\0")),
        "variable": libc.getenv(b"CUDA_VISIBLE_DEVICES").decode(),
        "devices": torch.cuda._parse_visible_devices(),
        "begun": torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork(),
        "cuda in parent": "libcuda" in parent.joinpath("maps").read_text(),
        "nvml in parent": "libnvidia" in parent.joinpath("maps").read_text(),
        "cuda": "libcuda" in Path("/proc/self/maps").read_text(),
        "asks nvml": os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"),
    }), flush=True)
    who = {"member": job.identity.member, "attempt": job.attempt}
    send({"type": "started", **who, "first_epoch": 0})
    send({"type": "finished", **who, "epoch": 1, "metrics": {}, "weights_sha256": "0" * 64})
    return "finished"

if {"ensemble.executors.forkserver", "ensemble.executors.worker_main"} & {*sys.orig_argv}:
    sys.modules["ensemble.train.worker"] = types.SimpleNamespace(run=run)
if "ensemble.executors.forkserver" in sys.orig_argv and "LOADS" in os.environ:
    ctypes.CDLL(os.environ["LOADS"])
"""
RUNS = """
import sys
import time
from kit.execute_members import an_ensemble
import ensemble
from ensemble import Resources

needs = Resources(cpus_per_worker=0.1, gpus_per_worker=1.0, memory_gb=0.5)
made = an_ensemble(resources=needs, devices="cuda", sharing="independent", valid=None)
ensemble.submit(made, sys.argv[1], "local").wait()
"""


def show_ranks(folder: Path, **more: str) -> dict[str, dict[str, Any]]:
    """GPU -> what the rank says that was placed there, on a machine with two GPUs."""
    environment = {**make_machine(folder, "A100:80,A100:80"), **more}
    (folder / "sitecustomize.py").write_text(SITE)
    command = [sys.executable, "-c", RUNS, str(folder / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    events = read_events(folder / "run" / "events.jsonl")
    said = {}
    for member in fold(events).members.values():
        assert (member.state, member.attempts) == ("finished", 1), member.error
        [placed] = [event for event in events if (event["type"], event.get("member")) == ("placed", member.id)]
        said[placed["devices"][0]] = json.loads(RunDir(folder / "run").log(member.id).read_text().splitlines()[0])
    assert set(said) == {"GPU-0", "GPU-1"}
    return said


def test_ranks_on_gpus_are_forked_and_see_their_own_gpu_before_torch_asks_for_any(tmp_path: Path) -> None:
    for gpu, rank in show_ranks(tmp_path).items():
        assert rank["interpreter"] == rank["parent"] == "ensemble.executors.forkserver"
        assert (rank["variable"], rank["devices"]) == (gpu, [gpu])
        assert not rank["cuda in parent"] and not rank["nvml in parent"] and not rank["begun"]
        assert rank["asks nvml"] is None, "that holds for the fork server alone"


ASKS = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); from ensemble.executors import forkserver as server; "


@pytest.mark.more
def test_where_cuda_has_begun_before_the_fork_ranks_on_gpus_are_new_interpreters(tmp_path: Path) -> None:
    for body, begun in (("{ return 3; }", False), (";", True), ("{ *count = 2; return 0; }", True)):
        library = tmp_path / str(len(body)) / "libcuda.so.1"
        library.parent.mkdir()
        compiles = ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(library), "-"]
        source = f"int cuDeviceGetCount(int *count){body}"
        if subprocess.run(compiles, input=source, text=True, capture_output=True).returncode:
            pytest.skip("no C compiler")
        asks = [sys.executable, "-c", ASKS + "print(server.has_begun_cuda())", str(library)]
        assert subprocess.run(asks, capture_output=True, text=True, check=True).stdout == f"{begun}\n"
    for gpu, rank in show_ranks(tmp_path, LOADS=str(library)).items():
        assert rank["interpreter"] == "ensemble.executors.worker_main"
        assert rank["parent"] == "ensemble.executors.forkserver"
        assert (rank["variable"], rank["devices"]) == (gpu, [gpu])
        assert rank["cuda in parent"] and not rank["cuda"]


STALLED = """
import os, time
from pathlib import Path
Path(os.environ["BEGUN"]).write_text(str(os.getpid()))
while True:
    time.sleep(0.01)
"""
STARTS = """
import sys, time
from pathlib import Path
from ensemble.executors.spawn import ForkServer
server = ForkServer(Path(sys.argv[1]))
time.sleep(600)
"""


def test_a_fork_server_whose_executor_is_killed_ends_amid_its_imports(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(STALLED)
    begun = tmp_path / "begun"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "BEGUN": str(begun)}
    with subprocess.Popen([sys.executable, "-c", STARTS, str(tmp_path)], env=environment) as executor:
        while not (begun.exists() and begun.read_text()) and executor.poll() is None:
            time.sleep(0.01)
        server = os.pidfd_open(int(begun.read_text()))
        executor.kill()
    ended = select.poll()
    ended.register(server, select.POLLIN)
    assert ended.poll(60_000)
    os.close(server)


def end_of_fork_server(log: Path) -> int:
    server = ForkServer(log.parent)
    maps = Path(f"/proc/{server.process.pid}/maps")
    wait_until(lambda: "libtorch" in maps.read_text(), "it imports")  # once its executor is gone, it ends
    server.control.close()
    return server.process.wait(timeout=120)


def end_of_worker(log: Path) -> int:
    ours, theirs = socket.socketpair()
    with theirs, open(log, "wb") as output:
        command, fds = make_worker_command(theirs.fileno(), os.getpid()), (theirs.fileno(),)
        process = subprocess.Popen(command, pass_fds=fds, env=child_environment(), stderr=output)
    ours.close()
    process.wait(timeout=120)
    return "before it sent a job" not in log.read_text()


@pytest.mark.parametrize("end_of", [end_of_fork_server, end_of_worker])
def test_a_module_in_the_working_directory_takes_no_other_ones_place(
    end_of: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert callable(end_of) and end_of(tmp_path / "log") == 0
    assert not (tmp_path / "executed").exists()


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = ("torch", "ray", "optuna", "pyarrow", "cv2", "sklearn", "rich", "numpy")
    uses = "import sys, ensemble; ensemble.Ensemble, ensemble.Search"
    script = f"{uses}; print([m for m in {heavy!r} if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_every_public_name_is_there_and_executors_are_made_by_their_names() -> None:
    for name in ensemble.__all__:
        assert getattr(ensemble, name) is not None
    assert set(ensemble.__all__) <= set(dir(ensemble))
    assert make_executor("inline").name == "inline" and EXECUTORS.names() == ["inline", "local", "ray"]
