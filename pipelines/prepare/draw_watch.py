"""Detects, while samples are prepared, that a generator was drawn from that is not seeded."""

from __future__ import annotations

import threading
from typing import Any

from pipelines.description import PipelineDescription
from pipelines.prepare import global_generators, own_generators

_ALL = frozenset((global_generators.PYTHON, global_generators.NUMPY, global_generators.TORCH))


def find_own_generators(pipeline: PipelineDescription) -> dict[str, Any]:
    """Returns name -> generator of those that source and stages hold, without those seeded for each sample."""
    found = own_generators.find_generators(pipeline.source)
    for stage in pipeline.stages:
        if stage.random != "own":
            found.update(own_generators.find_generators(stage.call))
    return found


class DrawWatch:
    """Compares the states of generators before and after many samples, which costs little per sample.

    The first sample of a pipeline shows most undeclared draws; this shows those for some samples only.
    Only the main thread watches: beside other threads that draw, a change says nothing.

    Args:
        pipeline: whose source and stages are watched.
        seeded: names of global generators that are seeded for a stage, and are not watched.
    """

    def __init__(self, pipeline: PipelineDescription, seeded: frozenset[str]) -> None:
        self._names = _ALL - seeded
        self._own = find_own_generators(pipeline)
        self._before: global_generators.States | None = None

    def start(self) -> None:
        """Notes the states."""
        is_alone = threading.current_thread() is threading.main_thread()
        self._before = global_generators.read_marks(self._names, self._own) if is_alone else None

    def find_changes(self) -> set[str]:
        """Returns the names of the generators whose states differ from those at the last `start`."""
        if self._before is None:
            return set()
        return global_generators.find_changes(self._before, global_generators.read_marks(self._names, self._own))

    def ignore(self, names: set[str]) -> None:
        """Leaves generators out from now on: they change, but no sample depends on them."""
        self._names -= names
        self._own = {name: generator for name, generator in self._own.items() if name not in names}
