"""A driver whose run is watched: it trains four slow members on one pipeline, or goes on with them.

python live_driver.py RUN_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "executors"))

from execute_members import an_ensemble, faulty_model, loss, momentum

import ensemble
from ensemble import Recipe, Resources

RATES = (0.05, 0.1, 0.2, 0.3)
EPOCHS = 2000  # more than a test waits for: it is stopped

if __name__ == "__main__":
    run_dir = Path(sys.argv[1])
    if (run_dir / "events.jsonl").exists():
        ensemble.resume(run_dir, executor="local").wait()
    else:
        declared = an_ensemble(
            [{"lr": rate, "width": 8, "step_s": 0.1} for rate in RATES],
            name="watched",
            recipe=Recipe(model=faulty_model, loss=loss, optimizer=momentum),
            epochs=EPOCHS,
            resources=Resources(cpus_per_worker=0.2, gpus_per_worker=0.0, memory_gb=0.2),
        )
        ensemble.submit(declared, run_dir, executor="local").wait()
