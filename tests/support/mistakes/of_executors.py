"""Mistakes in where and how members run: executors, resources, limits."""

from __future__ import annotations

from pathlib import Path

from kit.execute_members import an_ensemble
from kit.mistakes import Mistake

import ensemble
from ensemble import Resources, SpecError
from ensemble.executors import make_executor


def submit_too_wide(folder: Path) -> None:
    ensemble.submit(an_ensemble(resources=Resources(cpus_per_worker=4096)), folder / "run", "local")


def submit_beyond_limits(folder: Path) -> None:
    wide = Resources(cpus_per_worker=2.0, gpus_per_worker=0.0, memory_gb=0.5)
    ensemble.submit(an_ensemble(resources=wide, limits={"cpus": 1}), folder / "run", "inline")


ROWS = [
    Mistake(
        "a mistyped name of the package",
        lambda: ensemble.sumbit,
        AttributeError,
        ("'ensemble' has no attribute 'sumbit'", "submit"),
    ),
    Mistake(
        "a mistyped executor",
        lambda: make_executor("lokal"),
        SpecError,
        ("did you mean 'local'", "inline, local, ray"),
    ),
    Mistake(
        "several workers in this process",
        lambda: an_ensemble(resources=Resources(workers=2)),
        SpecError,
        ("asks for 2 workers", "executor='local'"),
        "submit",
    ),
    Mistake(
        "more cores than any node has",
        submit_too_wide,
        SpecError,
        ("the largest that would fit is cpus_per_worker",),
    ),
    Mistake(
        "a limit of nothing known",
        lambda: an_ensemble(limits={"gpu": 1}),
        SpecError,
        ("a limit of Ensemble.limits",),
    ),
    Mistake(
        "a limit of half a GPU",
        lambda: an_ensemble(limits={"gpus": 1.5}),
        SpecError,
        ("Ensemble.limits['gpus'] must be an integer",),
    ),
    Mistake(
        "a limit of no core",
        lambda: an_ensemble(limits={"cpus": 0}),
        SpecError,
        ("Ensemble.limits['cpus'] must be above 0",),
    ),
    Mistake(
        "limits that are a number",
        lambda: an_ensemble(limits=4),
        SpecError,
        ("Ensemble.limits must be a dict of one or more of gpus, cpus",),
    ),
    Mistake(
        "a member beyond the limits",
        submit_beyond_limits,
        SpecError,
        ("member-0 needs 2 cores, and limits allow 1",),
    ),
    Mistake(
        "an unknown way to verify what is shared",
        lambda: an_ensemble(verify_sharing="never"),
        SpecError,
        ("verify_sharing must be 'alone', 'fail' or False, got 'never'",),
    ),
]
