"""Mistakes in where and how members run: executors, resources, limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit.execute_members import an_ensemble
from kit.mistakes import Mistake

import ensemble
from ensemble import Resources, SpecError
from ensemble.executors import make_executor
from pipelines import PipelineError


def submit_too_wide(folder: Path) -> None:
    ensemble.submit(an_ensemble(resources=Resources(cpus_per_worker=4096)), folder / "run", "local")


def submit_beyond_limits(folder: Path) -> None:
    wide = Resources(cpus_per_worker=2.0, gpus_per_worker=0.0, memory_gb=0.5)
    ensemble.submit(an_ensemble(resources=wide, limits={"cpus": 1}), folder / "run", "inline")


def submit_with_cache(folder: Path) -> None:
    ensemble.submit(an_ensemble(cache="memory"), folder / "run", "local")


def wrong(what: str, do: Any, *words: str) -> Mistake:
    return Mistake(what, do, SpecError, words)


ROWS = [
    Mistake(
        "a mistyped name of the package",
        lambda: ensemble.sumbit,
        AttributeError,
        ("'ensemble' has no attribute 'sumbit'", "submit"),
    ),
    wrong("a mistyped executor", lambda: make_executor("lokal"), "did you mean 'local'", "inline, local, ray"),
    Mistake(
        "several workers in this process",
        lambda: an_ensemble(resources=Resources(workers=2)),
        SpecError,
        ("asks for 2 workers", "executor='local'"),
        "submit",
    ),
    wrong("more cores than any node has", submit_too_wide, "the largest that would fit is cpus_per_worker"),
    Mistake("a cache of raw samples", submit_with_cache, PipelineError, ("be cached", "it has no stages")),
    wrong("a member beyond the limits", submit_beyond_limits, "member-0 needs 2 cores, and limits allow 1"),
    *(
        wrong(f"{option}={value}", lambda option=option, value=value: an_ensemble(**{option: value}), words)
        for option, value, words in (
            ("limits", {"gpu": 1}, "a limit of Ensemble.limits"),
            ("limits", {"gpus": 1.5}, "Ensemble.limits['gpus'] must be an integer"),
            ("limits", {"cpus": 0}, "Ensemble.limits['cpus'] must be above 0"),
            ("limits", 4, "Ensemble.limits must be a dict of one or more of gpus, cpus"),
            ("verify_sharing", "never", "verify_sharing must be 'alone', 'fail' or False, got 'never'"),
        )
    ),
]
