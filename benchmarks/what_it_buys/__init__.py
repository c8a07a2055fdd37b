"""`python -m benchmarks what_it_buys`: what a CPU-second buys, in quality of the final model.

Ensembles of ray-ensemble, by search methods, against what people use now: Optuna and a training loop of one's own.
Each method has the same CPU-seconds for everything that it does, the same space, splits and training.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.options import check_names, count, directory, option, words
from benchmarks.results import Outcome, Report, Study
from ensemble.spec.validation import SpecError

_TASKS = ("wine", "cancer", "digits", "imdb", "cifar10")
_METHODS = ("optuna", "gain", "metric", "random", "pbt", "deep")


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    shown = "holds cifar10/ and imdb/, each with train.parquet (default: only tasks that scikit-learn ships)"
    option(parser, "--data", None, shown, type=directory, metavar="DIR")
    option(parser, "--tasks", None, f"of {', '.join(_TASKS)} (default: all whose data there are)", type=words)
    option(parser, "--methods", ",".join(_METHODS), "which", type=words)
    option(parser, "--seeds", 5, "each with samples, a split and a search of its own", type=count)
    option(
        parser, "--large-seeds", None, "of the largest budget of imdb and cifar10 (default: as many)", type=count
    )
    shown = "per cent of the usual budgets of CPU-seconds"
    option(parser, "--scale", 100, shown, type=count)
    shown = "JSON lines of finished cells: what is in it is not measured again (default: nothing is kept)"
    option(parser, "--cells", None, shown, metavar="FILE")


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`.

    Raises:
        SpecError: there is no such task or method, or its data are missing.
    """
    from benchmarks.what_it_buys.analysis import show
    from benchmarks.what_it_buys.cells import plan, run_cells
    from benchmarks.what_it_buys.tasks import TABLES

    tasks = options.tasks or [name for name in _TASKS if options.data or name in TABLES]
    check_names("--tasks", tasks, _TASKS)
    check_names("--methods", options.methods, _METHODS)
    if options.seeds < 2:
        raise SpecError("--seeds must be at least 2: an interval over one seed says nothing")
    if missing := [name for name in tasks if name not in TABLES and options.data is None]:
        raise SpecError(f"{', '.join(missing)}: give --data, a directory with {missing[0]}/train.parquet")
    large = options.large_seeds or options.seeds
    planned = plan(tasks, options.methods, options.seeds, large, options.scale / 100)
    with tempfile.TemporaryDirectory(prefix="buys-") as folder:
        path = Path(options.cells or f"{folder}/cells.jsonl")
        cells = run_cells(planned, path, options.data, report)
    return show(cells)


STUDY = Study(
    name="what_it_buys",
    summary="quality of the final model over CPU-seconds, against what people use now",
    description="Ensembles by several search methods against Optuna and a plain training loop, by CPU-seconds.",
    add_options=add_options,
    run=run,
)
