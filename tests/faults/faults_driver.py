"""A driver that is to be hit: runs what a JSON object on its command line says, or goes on with it.

Exits with 0 when the run has come to its end, else as the signal says that ended it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from faults_members import declared, declared_resources

import ensemble


def main(run_dir: Path, told: dict[str, Any]) -> None:
    if told.pop("resumes", False):
        ensemble.resume(run_dir).wait()
        return
    executor, mirror = told.pop("executor"), told.pop("mirror", None)
    of_member = {int(number): fields for number, fields in (told.pop("of_member", None) or {}).items()}
    if "cpus" in told:
        told["resources"] = declared_resources(told.pop("cpus"))
    made = declared(run_dir.parent / "account", **told, of_member=of_member)
    ensemble.submit(made, run_dir, executor, mirror=mirror).wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
