"""Scans files for another process: `python -m pipelines.sources.scan_main MODULE FUNCTION OPTIONS`.

Each line of standard input is a `File` in JSON; the answer is the length of what `scan_one` returns, and that.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys

from pipelines.ipc.child_processes import end_with_parent
from pipelines.sources._files import from_row
from pipelines.sources._scan import scan_one


def main(arguments: list[str]) -> None:
    """Scan until the input ends; of a file that cannot be scanned the answer is empty."""
    module, function, options = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    end_with_parent()
    scan, given = getattr(importlib.import_module(module), function), json.loads(options)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            blob = scan_one(scan, from_row(json.loads(line)), given)
        except Exception:  # the parent scans it again, and raises what is wrong
            blob = b""
        output.write(b"%d\n%b" % (len(blob), blob))
        output.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
