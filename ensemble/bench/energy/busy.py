"""A member of a synthetic node: `python -m ensemble.bench.energy.busy NAME NODE DUTY [CORE]`.

It keeps a core busy for that share of the time, or rests, as its standard input says with a line for each change:
`work` or `rest`. Each second, and at each change, it reports its CPU time as a member of a run does, in a `usage`
event as one line of JSON; after a change, and once it has started, the line `ok` follows. It ends when its input
ends.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time

_EVERY_S = 1.0
_NAP_S = 0.004


def main() -> int:
    """Runs until the input ends."""
    name, node, duty = sys.argv[1], sys.argv[2], float(sys.argv[3])
    if len(sys.argv) > 4:
        os.sched_setaffinity(0, {int(sys.argv[4])})
    startup_s = time.process_time()
    _report(name, node, "startup", startup_s)
    print("ok", flush=True)
    working, began, began_s = False, 0.0, 0.0
    next_report = time.monotonic() + _EVERY_S
    while True:
        # behind its share of the time (others had its core), it works until it has made that good
        if working and time.process_time() - began_s < duty * (time.monotonic() - began):
            wait_s: float | None = 0.0
        else:
            wait_s = _NAP_S if working else max(0.0, next_report - time.monotonic())
        if select.select([0], [], [], wait_s)[0]:
            line = os.read(0, 1024).decode()
            if not line:
                return 0
            working, began, began_s = line.split()[-1] == "work", time.monotonic(), time.process_time()
            _report(name, node, "train", began_s - startup_s)
            print("ok", flush=True)
        if time.monotonic() >= next_report:
            _report(name, node, "train", time.process_time() - startup_s)
            next_report += _EVERY_S


def _report(name: str, node: str, role: str, cpu_s: float) -> None:
    who = {"node": node, "role": role, "member": name, "rank": 0, "pid": os.getpid()}
    print(json.dumps({"type": "usage", **who, "cpu_s": cpu_s, "origin": "measured"}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
