"""The cases of `tests/gpu/run.sh`, the most valuable first.

A case is a module of this package. Its `run(setting)` yields *rows*: dicts with a label `what`, figures with units
in their names, and for each figure that is None the reason in `reasons`. A row with `passed` is a check.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: of the module in this package.
        summary: what it measures.
        limit_s: seconds after which it is killed on a GPU; a case plans for half of them.
    """

    name: str
    summary: str
    limit_s: float


CASES = (
    Case("environment", "driver, libraries, NVML and its energy counter under load", 60),
    Case("precision", "training steps in fp32, bf16 and fp16: samples/s, memory, energy", 120),
    Case("loss_scaling", "a member trains in fp16 to a falling loss; an overflow skips a step", 45),
    Case("codecs", "the codecs' bits are the CPU's; GB/s", 60),
    Case("nccl", "a communicator over NCCL with one rank", 40),
    Case("packing", "1 to 16 members on one GPU: models/min, samples/s, joules a model", 150),
    Case("sharing", "four members on a shared pipeline and on pipelines of their own", 80),
    Case(
        "adapters", "low-rank adapters of 8 members on one frozen base and on a copy each: memory, samples/s", 300
    ),
    Case("prefix", "8 heads on a frozen network: as a batch stage once for all, and in each member", 150),
    Case(
        "images", "JPEG files to four CNNs: prepared once and augmented on the GPU, and by a DataLoader each", 150
    ),
    Case("copies", "batches to the GPU: pinned and asynchronous against blocking", 30),
    Case("mps", "members on one GPU with the Multi-Process Service", 80),
    Case("fused", "members of one architecture: processes against stacked weights in one process", 360),
)
