"""Communication between the workers of one member; never between members.

`connect` (in `torch_dist`) makes a `Communicator`; `GradientExchange` and `FusedBroadcast` are built on it. Only
the protocol is imported here, the rest needs torch.
"""

from __future__ import annotations

from ensemble.comm.communicator import Alone, Communicator, CommunicatorError, Op, Pending

__all__ = ["Alone", "Communicator", "CommunicatorError", "Op", "Pending"]
