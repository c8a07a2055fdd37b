"""AutoGluon on the arrays of a task: a program for an interpreter that has AutoGluon; it imports nothing of ours.

`PYTHON automl.py ARRAYS.npz CPU_SECONDS` prints what a cell has of it as one line of JSON. The arrays are x_train,
label_train and so on. Its clock is the CPU time of the process, so that its time limit is one of CPU-seconds.
"""

import json
import sys
import tempfile
import time
from typing import Any

import numpy as np


def fit(arrays: dict[str, Any], limit_s: float, folder: str) -> tuple[Any, Any]:
    """Fit to the training split, choosing by the validation split; returns the predictor and the test table."""
    import pandas as pd
    from autogluon.tabular import TabularPredictor

    def frame(split: str) -> pd.DataFrame:
        return pd.DataFrame(arrays[f"x_{split}"]).add_prefix("c").assign(label=arrays[f"label_{split}"])

    kind = "binary" if arrays["label_train"].max() == 1 else "multiclass"
    predictor = TabularPredictor("label", problem_type=kind, eval_metric="log_loss", path=folder, verbosity=0)
    predictor.fit(frame("train"), tuning_data=frame("valid"), time_limit=limit_s, num_cpus=1, num_gpus=0)
    return predictor, frame("test")


def main() -> None:
    """Run it."""
    began = time.time()
    time.time = lambda: began + time.process_time()
    arrays, limit_s = dict(np.load(sys.argv[1])), float(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        few = {name: values[:100] for name, values in arrays.items()}
        fit(few, 60.0, f"{folder}/warm-up")  # which imports what it needs
        before_s = time.process_time()
        predictor, test = fit(arrays, limit_s, f"{folder}/models")
        found = predictor.predict_proba(test.drop(columns="label"))
        work_cpu_s = time.process_time() - before_s
        models = predictor.leaderboard()
    at = [list(found.columns).index(label) for label in test["label"]]
    own = np.clip(found.to_numpy()[np.arange(len(at)), at], 1e-12, None)
    right = found.to_numpy().argmax(1) == at
    made = {"nll": float(-np.log(own).mean()), "accuracy": float(right.mean()), "work_cpu_s": work_cpu_s}
    print(json.dumps({**made, "trained": int((models["stack_level"] == 1).sum())}))


if __name__ == "__main__":
    main()
