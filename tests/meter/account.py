"""An account of CPU time that owes nothing to the package: `account.py FILE COMMAND ...` writes it as JSON.

`cpu_s` has the command's whole tree: this process adopts those whose parents have gone (PR_SET_CHILD_SUBREAPER),
waits for all, and reads RUSAGE_CHILDREN. Children of a process that ignores SIGCHLD, as Ray's raylet does, nobody
waits for: these are looked at every few milliseconds. `own_s` is what this process used.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
FIND_S, LOOK_S = 0.1, 0.005  # between two looks at all processes, and at those that nobody waits for
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Watch(threading.Thread):
    """Looks at the children of those that do not wait for them."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.last: dict[tuple[int, int], float] = {}  # (pid, start) -> CPU-seconds, of those that nobody waits for

    def run(self) -> None:
        find_at = 0.0
        while not self.over.wait(LOOK_S):
            if time.monotonic() >= find_at:
                self._find()
                find_at = time.monotonic() + FIND_S
            for pid, start in self.last:
                fields = stat(pid)
                if fields is not None and fields[19] == start:
                    self.last[pid, start] = sum(fields[11:15]) * TICK_S

    def _find(self) -> None:
        table = {
            pid: fields for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if (fields := stat(pid))
        }
        mine = {os.getpid()}
        for pid in sorted(table, key=lambda pid: table[pid][19]):  # parents are older, but for those we adopt
            if table[pid][1] in mine:
                mine.add(pid)
        ignoring = {pid for pid in mine & set(table) if ignores_children(pid)}
        for pid in mine & set(table):
            self.last.pop((pid, table[pid][19]), None)
            if table[pid][1] in ignoring:
                self.last[pid, table[pid][19]] = sum(table[pid][11:15]) * TICK_S


def stat(pid: int) -> list[int] | None:
    """Fields of /proc/pid/stat after the name: 1 is the parent, 11 to 14 times, 19 the start (proc(5), less 3)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    state, *numbers = text[text.rindex(")") + 2 :].split()
    return [ord(state), *map(int, numbers)]


def ignores_children(pid: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    ignored = next((int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:")), 0)
    return bool(ignored >> (signal.SIGCHLD - 1) & 1)


def main(file: str, *command: str) -> int:
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("this kernel has no subreapers")
    watch = Watch()
    watch.start()
    process = subprocess.Popen(command)
    status, adopted = 0, set[int]()
    while True:
        try:
            pid, ended = os.wait()
        except ChildProcessError:
            break
        adopted.add(pid)
        if pid == process.pid:
            status = process.returncode = os.waitstatus_to_exitcode(ended)
    watch.over.set()
    watch.join()
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    # One whose parent has ended just before itself was waited for here after all.
    never_waited = sum(used_s for (pid, _), used_s in watch.last.items() if pid not in adopted)
    cpu_s = waited.ru_utime + waited.ru_stime + never_waited
    Path(file).write_text(json.dumps({"cpu_s": cpu_s, "own_s": time.process_time(), "status": status}))
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
