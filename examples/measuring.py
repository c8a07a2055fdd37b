"""What the scripts that measure examples have in common: what a command needs, and on which machine.

Seconds, CPU-seconds and memory are of the whole process tree, from the start of Python to its end: CPU time as the
kernel adds it up when processes end, orphans included; memory as the highest sum of PSS (each page divided by the
processes that share it), looked at twice a second.
"""

import contextlib
import ctypes
import difflib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def count_changes(plain, port):
    """Lines of a port that are not in the plain script, and lines of that which are gone; without empty ones."""
    sides = [[x for x in file.read_text(encoding="utf-8").splitlines() if x.strip()] for file in (plain, port)]
    changes = [line[0] for line in difflib.ndiff(*sides)]
    return changes.count("+"), changes.count("-")


def sum_memory():
    """MiB of all processes below this one."""
    total = 0
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            total += each.memory_full_info().pss
    return total / 2**20


def run(command):
    """What a command needs in processes of its own: seconds, CPU-seconds, peak memory; and what it prints."""
    before, began, peak = os.times(), time.monotonic(), 0.0
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
                    break
                peak = max(peak, sum_memory())
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGTERM)
        seconds = time.monotonic() - began
        log.seek(0)
        printed = log.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{printed}")
    with contextlib.suppress(ChildProcessError):
        while True:  # those that it leaves are ours: their time counts when we have waited for them
            os.wait()
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": seconds, "cpu_s": cpu_s, "pss_mib": peak}, printed


def prepare_to_measure():
    """Let processes that a run leaves be waited for here; a SIGTERM ends what is running."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped: the runs that have ended are in the file"))


def describe_machine():
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cores = len(os.sched_getaffinity(0))
    return {
        "cpu": model,
        "cores": cores,
        "gpu": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
