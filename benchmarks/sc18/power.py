"""The mean power that a node of Titan would draw with a member, by a model of published watts.

Pittman et al. metered cabinets of Titan, with a member on every node. A node's power goes by the share of this
machine's cores that were busy, and by the share of the time for which members waited for their accelerators.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.sc18.study import PipelineRow

TITAN = "Cray XK7"
# Opteron 6274: 115 W (AMD); without load 6.4 W, as AMD says of the 6276. Tesla K20X: 235 W (NVIDIA's board
# specification BD-06397), without load 25 W, as that of the K20 says (BD-06455). The rest: Titan's 8,209 kW under
# Linpack (TOP500, November 2012) are 439 W for each of 18,688 nodes, less processor and accelerator.
_OPTERON_W, _OPTERON_IDLE_W, _K20X_W, _K20X_IDLE_W = 115.0, 6.4, 235.0, 25.0
_REST_W = 8_209_000 / 18_688 - _OPTERON_W - _K20X_W


@dataclass(frozen=True, kw_only=True)
class PowerRow:
    """One shared pipeline beside a pipeline each, with emulated accelerators.

    Attributes:
        step_ms, members, cores: of both.
        shared_w, own_w: modelled mean power of a member's node.
        less_percent: by which sharing lowers it.
        faster: samples/s of the first over those of the second.
        energy: times that of a pipeline each, for the same samples.
    """

    step_ms: float
    members: int
    cores: int
    shared_w: float
    own_w: float
    less_percent: float
    faster: float
    energy: float


def node_watts(processor: float, accelerator: float) -> float:
    """Mean power where these shares of the cores, and of the accelerator's time, were busy."""
    processor_w = _OPTERON_IDLE_W + (_OPTERON_W - _OPTERON_IDLE_W) * processor
    return _REST_W + processor_w + _K20X_IDLE_W + (_K20X_W - _K20X_IDLE_W) * accelerator


def model_watts(row: PipelineRow) -> float:
    """What a node of each member would draw in a run with emulated steps."""
    steps = row.samples / row.members / row.batch_size
    processor = min(1.0, row.cpu_s / (row.wall_s * row.cores))
    return node_watts(processor, min(1.0, steps * row.step_ms / 1000 / row.wall_s))


def compare_power(shared: PipelineRow, own: PipelineRow) -> PowerRow:
    """The two sides of one configuration."""
    shared_w, own_w = model_watts(shared), model_watts(own)
    faster = shared.samples_per_s / own.samples_per_s
    return PowerRow(
        step_ms=shared.step_ms,
        members=shared.members,
        cores=shared.cores,
        shared_w=shared_w,
        own_w=own_w,
        less_percent=100 * (1 - shared_w / own_w),
        faster=faster,
        energy=shared_w / own_w / faster,
    )
