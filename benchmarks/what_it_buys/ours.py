"""The methods that ray-ensemble has, each with one budget of CPU-seconds for its search and all its models."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from typing import TYPE_CHECKING, Any

from benchmarks.what_it_buys.plain import used_cpu_s
from benchmarks.what_it_buys.tasks import SHAPE, Arrays, Task, build, make_pipelines
from ensemble.spec import Ensemble, Recipe, Search

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble.result import Result

GENERATIONS = 3
_SPARE = 1.15  # of a population: more than it is thought to take
_SAMPLERS: dict[str, dict[str, Any]] = {
    "gain": {"objective": "gain"},
    "metric": {},
    "random": {"sampler": "random"},
}


def search(method: str, task: Task, arrays: Arrays, seed: int, budget_s: float) -> dict[str, Any]:
    """Train and combine by a method; returns what `Cell` has of it.

    Raises:
        RuntimeError: no model was trained to its end.
    """
    began = used_cpu_s()
    pruner: dict[str, Any] = {"pruner": "none", "seed": seed}
    if method == "deep":
        result = _run(declare(task, arrays, seed, Search(task.suggest, budget=_limit(budget_s / 2), **pruner)))
        best = dict(result.best["params"]) if result.best is not None else {}
        remaining_s = _limit(budget_s - (used_cpu_s() - began))
        again = Search(best, sampler="random", budget=remaining_s, **pruner)
        members = dataclasses.replace(
            declare(task, arrays, seed, again), combine="average", seed=1000 * seed + 500
        )
        return _run_and_describe(members, already=len(_finished(result)))
    if method == "pbt":
        size = max(2, int(budget_s / task.member_cpu_s / _SPARE))
        options = {"name": "pbt", "population": size, "generations": GENERATIONS, "inherit": [SHAPE[task.name]]}
        chosen = Search(task.suggest, sampler=options, seed=seed, budget=_limit(budget_s))
    else:
        chosen = Search(task.suggest, budget=_limit(budget_s), **pruner, **_SAMPLERS[method])
    return _run_and_describe(declare(task, arrays, seed, chosen))


def declare(task: Task, arrays: Arrays, seed: int, chosen: Search) -> Ensemble:
    """The run: models as the plain script trains them, ranked by their validation NLL."""
    pipelines: dict[str, Any] = dict(make_pipelines(task, arrays))
    return Ensemble(
        name=task.name,
        recipe=Recipe(model=build, loss="cross_entropy", objective="loss"),
        **pipelines,
        search=chosen,
        optimizer="adamw",
        schedule="cosine",
        epochs=task.epochs,
        batch_size=task.batch_size,
        seed=1000 * seed,
        checkpoint_every=task.epochs,
        allow_overlap=True,  # some records of the tables are alike
    )


def _limit(budget_s: float) -> dict[str, float]:
    return {"cpu_hours": max(budget_s, 0.1) / 3600}


def _run(declared: Ensemble, folder: str | None = None) -> Result:
    import ensemble

    with contextlib.ExitStack() as stack:
        kept = folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="buys-"))
        return ensemble.submit(declared, f"{kept}/run", executor="inline").wait()


def _finished(result: Result) -> Sequence[Any]:
    return [row for row in result.members if row["state"] == "finished"]


def _run_and_describe(declared: Ensemble, already: int = 0) -> dict[str, Any]:
    """What `Cell` has of a run, and in "ended_s" the CPU time at its end.

    Args:
        already: models that were trained before it.
    """
    with tempfile.TemporaryDirectory(prefix="buys-") as folder:
        result = _run(declared, folder)
        ended_s = used_cpu_s()
        if result.combined is None or result.combined["metrics"] is None:
            raise RuntimeError(f"nothing was combined of {len(result.members)} members: {result.stopped}")
        raw = _run(dataclasses.replace(declared, calibrate=False), folder)  # combined again, not trained
    metrics, weights = result.combined["metrics"], result.combined["weights"]
    own, best = metrics["ensemble"], metrics["best"]
    assert raw.combined is not None
    return {
        "nll": own["nll"],
        "accuracy": own["accuracy"],
        "scaled_nll": own["nll"],
        "raw_nll": raw.combined["metrics"]["ensemble"]["nll"],
        "best_nll": best["nll"],
        "best_accuracy": best["accuracy"],
        "trained": already + len(_finished(result)),
        "combined": sum(map(bool, weights.values())),
        "ended_s": ended_s,
    }
