"""One data pipeline for many training processes.

A `Pipeline` says where samples come from and what is done to each. It is read alone (`pipe.loader`), or
prepared once by a `Feeder` and read by any number of processes that `attach` to it; both give bitwise the
same batches.
"""

from pipelines import sampling, sources, stages, weights
from pipelines.errors import PipelineError, SampleError
from pipelines.feeder.server import Feeder
from pipelines.loader.attach import attach
from pipelines.loader.batch import Batch
from pipelines.loader.collate import from_samples
from pipelines.loader.loader import Loader
from pipelines.loader.ragged import Ragged
from pipelines.loader.resident import Resident, resident
from pipelines.multinode.rendezvous import Peers
from pipelines.pipeline import Pipeline
from pipelines.shared_stages import find_shared_stages

__all__ = [
    "Batch",
    "Feeder",
    "Loader",
    "Peers",
    "Pipeline",
    "PipelineError",
    "Ragged",
    "Resident",
    "SampleError",
    "attach",
    "find_shared_stages",
    "from_samples",
    "resident",
    "sampling",
    "sources",
    "stages",
    "weights",
]
