"""A driver on a cluster that others use, too: its members have two workers of a core each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from execute_members import an_ensemble

import ensemble
from ensemble import Ensemble, Resources


def declared(members: list[dict[str, Any]], epochs: int = 2, **options: Any) -> Ensemble:
    resources = Resources(workers=2, cpus_per_worker=1.0, gpus_per_worker=0.0, memory_gb=0.5)
    return an_ensemble(members, epochs=epochs, gate_timeout_s=240.0, resources=resources, **options)


if __name__ == "__main__":
    run_dir, options = sys.argv[1:]
    ensemble.submit(declared(**json.loads(options)), run_dir, executor="ray").wait()
