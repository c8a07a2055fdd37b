"""One data pipeline for many training processes.

A `Pipeline` says where samples come from and what is done to each. It is read alone (`pipe.loader`), or
prepared once by a `Feeder` and read by any number of processes that `attach` to it; both give bitwise the
same batches.

Everything named here is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines import sampling, sources, stages, weights
    from pipelines.errors import PipelineError, SampleError
    from pipelines.feeder.peers import Peers
    from pipelines.feeder.server import Feeder
    from pipelines.loader.attach import attach
    from pipelines.loader.batch import Batch
    from pipelines.loader.collate import from_samples
    from pipelines.loader.loader import Loader
    from pipelines.loader.ragged import Ragged
    from pipelines.loader.resident import Resident, resident
    from pipelines.pipeline import Pipeline
    from pipelines.shared_stages import find_shared_stages

_MODULES = ("sampling", "sources", "stages", "weights")
_HOME_OF = {
    "Batch": "pipelines.loader.batch",
    "Feeder": "pipelines.feeder.server",
    "Loader": "pipelines.loader.loader",
    "Peers": "pipelines.feeder.peers",
    "Pipeline": "pipelines.pipeline",
    "PipelineError": "pipelines.errors",
    "Ragged": "pipelines.loader.ragged",
    "Resident": "pipelines.loader.resident",
    "SampleError": "pipelines.errors",
    "attach": "pipelines.loader.attach",
    "find_shared_stages": "pipelines.shared_stages",
    "from_samples": "pipelines.loader.collate",
    "resident": "pipelines.loader.resident",
}

__all__ = [
    "Batch", "Feeder", "Loader", "Peers", "Pipeline", "PipelineError", "Ragged", "Resident", "SampleError",
    "attach", "find_shared_stages", "from_samples", "resident", "sampling", "sources", "stages", "weights",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"pipelines.{name}")
    from pipelines.providers import find_attribute

    value = globals()[name] = find_attribute(__name__, _HOME_OF, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
