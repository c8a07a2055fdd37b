"""A fork server whose workers only report: `python -m ensemble.bench.energy.metered_ranks N`.

It takes the place of `ensemble.executors.forkserver` in the overhead study. A worker sleeps and reports its usage
once a second, as one does whose epochs take one second. Its commands:

- "age" makes it `age_s` older; its figures begin at zero. Its last report is then as old as `share` of the time
  between two reports, so that those of all workers can be spread evenly. It answers with the event `aged`.
- "meter": it answers with the event `metered`, how often it has reported and the CPU-seconds that this took.
- "stop".
"""

from __future__ import annotations

import json
import select
import signal
import socket
import sys
import time

from ensemble.executors.base import make_exited
from ensemble.executors.forkserver import serve
from ensemble.executors.worker_main import make_sender
from ensemble.interrupts import exit_process
from ensemble.meter.cpu import CpuClock, report_interval_s
from ensemble.train.job import Job
from ensemble.train.reporter import LEAST_S, EventReporter

EVERY_S = 1.0


def main(descriptor: int) -> int:
    """Fork workers on request; in a worker, report.

    Args:
        descriptor: of the socket to the executor.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the executor decides when this process ends
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    worker = serve(control)
    if worker is not None:
        _work(socket.socket(fileno=worker[0]))
    return 0


def _work(connection: socket.socket) -> None:
    """Report for the job that arrives first, until it is stopped."""
    with connection.makefile("r", encoding="utf-8") as lines:
        job, send, older_s = Job.from_json(lines.readline()), make_sender(connection), 0.0
        reporter = EventReporter(job, send, CpuClock(), lambda: time.monotonic() + older_s)
        reporter.usage()
        reporter.training_begins(0.0)
        calls, cpu_s, at = 0, 0.0, time.monotonic()
        while True:
            if select.select([connection], [], [], max(0.0, at - time.monotonic()))[0]:
                command = json.loads(lines.readline() or '{"command": "stop"}')
                if command["command"] == "stop":
                    break
                if command["command"] == "age":
                    age_s = command["age_s"]
                    older_s = age_s - command["share"] * max(LEAST_S, report_interval_s(age_s))
                    reporter.usage(is_last=True)
                    calls, cpu_s, older_s = 0, 0.0, age_s
                    send({"type": "aged", "member": job.identity.member})
                else:
                    send({"type": "metered", "member": job.identity.member, "calls": calls, "cpu_s": cpu_s})
                continue
            start_s = time.thread_time()
            reporter.usage()
            calls, cpu_s, at = calls + 1, cpu_s + time.thread_time() - start_s, at + EVERY_S
        send(make_exited(job, "stopped"))


if __name__ == "__main__":
    exit_process(main(int(sys.argv[1])))
