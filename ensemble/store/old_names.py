"""Unpickles declarations that an earlier version wrote: its modules had other names.

A pickle names classes and functions by module. This table is the only trace of the earlier names.
"""

from __future__ import annotations

import pickle
from typing import Any

#: Earlier module to the one that holds the same names today.
MODULES = {
    "ensemble.checks": "ensemble.spec.validation",
    "ensemble.handles": "ensemble.run",
    "ensemble.identity": "ensemble.spec.identity",
    "ensemble.objectives": "ensemble.spec.objectives",
    "ensemble.options": "ensemble.spec.options",
    "ensemble.space": "ensemble.spec.search_space",
    "ensemble.spec.resources": "ensemble.spec.member",
    "ensemble.store.kept": "ensemble.store.kept_code",
    "ensemble.streams": "ensemble.spec.member_pipelines",
    "ensemble.weighting": "ensemble.spec.sample_weights",
    "ensemble.words": "ensemble.spec.options",
    "pipelines.batch": "pipelines.loader.batch",
    "pipelines.feeder": "pipelines.feeder.server",
    "pipelines.fields": "pipelines.prepare.fields",
    "pipelines.poison_records": "pipelines.prepare.poison_records",
    "pipelines.loader": "pipelines.loader.loader",
    "pipelines.pictures": "pipelines.stages._pictures",
    "pipelines.rendezvous": "pipelines.multinode.rendezvous",
    "pipelines.resident": "pipelines.loader.resident",
}

#: Earlier (module, name), with the module's name of today, to the module and name of today.
NAMES = {
    ("ensemble.combine.errors", "CombineError"): ("ensemble.combine.metrics", "CombineError"),
    **{
        (f"ensemble.combine.{module}", name): (f"ensemble.combine.tasks.{today}", name)
        for module, today, names in (
            ("metrics", "classification", "accuracy all_metrics brier ece nll reliability"),
            ("calibrate", "classification", "apply_temperature fit_temperature"),
            ("methods", "classification", "greedy_weights weighted_weights"),
            ("stack", "classification", "fit_stack"),
            ("stack", "stacks", "Stacker"),
        )
        for name in names.split()
    },
    ("ensemble.store.kept_code", "_cached"): ("pipelines.memory_pickle", "restore_cached"),
    ("pipelines.pipeline", "Stage"): ("pipelines.stage", "Stage"),
    ("pipelines.prepare.poison_records", "PoisonRecords"): ("pipelines.prepare.poison_records", "PoisonRecords"),
}


class Unpickler(pickle.Unpickler):
    """Finds classes and functions by their names of today or of an earlier version."""

    def find_class(self, module: str, name: str) -> Any:
        """The object that a pickle calls `module.name`."""
        today = MODULES.get(module, module), name
        return super().find_class(*NAMES.get(today, today))
