"""Communication between the workers of one member; never between members.

`connect` (in `torch_dist`) makes a `Communicator`; `GradientExchange` and `FusedBroadcast` are built on it. Only
the protocol is imported here, the rest needs torch.
"""

from __future__ import annotations

from ensemble.comm.communicator import Communicator, CommunicatorError, Op, Pending, SingleRank

__all__ = ["Communicator", "CommunicatorError", "Op", "Pending", "SingleRank"]
