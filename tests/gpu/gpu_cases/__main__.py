"""Runs one case: `python -m gpu_cases NAME DEVICE LIMIT_S FILE` writes its rows to FILE, a line of JSON each.

The first line has the device. A row is on the disk before the next begins, so a crash loses one row at most.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from gpu_cases.common import Absent, Setting, name_device
from pipelines.ipc.child_processes import end_with_parent


def main(name: str, device: str, limit_s: float, path: Path) -> int:
    """Run the case; returns 1 if a check failed."""
    end_with_parent()
    failed = False
    torch.set_num_threads(1)  # as a member has
    with path.open("w", encoding="utf-8") as file:

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        try:
            write({"device": name_device(device)})
            for row in importlib.import_module(f"gpu_cases.{name}").run(Setting(device, limit_s / 2)):
                write(row)
                failed |= row.get("passed") is False
        except Absent as absent:
            write({"absent": str(absent)})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), Path(sys.argv[4])))
