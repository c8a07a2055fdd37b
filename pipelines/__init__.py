"""One data pipeline for many training processes.

A `Pipeline` says where samples come from and what is done to each. It is read alone (`pipe.loader`), or
prepared once by a `Feeder` and read by any number of processes that `attach` to it; both give bitwise the
same batches.
"""

from pipelines import sources, stages, weights
from pipelines.batch import Batch
from pipelines.errors import PipelineError, SampleError
from pipelines.feeder.server import Feeder
from pipelines.loader import Loader, attach
from pipelines.pipeline import Pipeline
from pipelines.prepare.prefix import common_prefix
from pipelines.rendezvous import Peers
from pipelines.resident import Resident, resident

__all__ = [
    "Batch",
    "Feeder",
    "Loader",
    "Peers",
    "Pipeline",
    "PipelineError",
    "Resident",
    "SampleError",
    "attach",
    "common_prefix",
    "resident",
    "sources",
    "stages",
    "weights",
]
