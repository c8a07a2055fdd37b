"""Which GPUs of a node a run may use, of those that Ray counts there.

Ray tells a process by CUDA_VISIBLE_DEVICES which GPU it was given, and keeps to itself which others it gave to
whom. Here the run chooses a rank's GPU: so Ray is to leave that variable alone, and a node of whose GPUs some are
taken by others lends none.
"""

from __future__ import annotations

import time
from typing import Any

from ensemble.executors.ray import _compat

#: For actors that are to see all GPUs that their raylet sees, under the numbers by which it does.
SEES_ALL = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
_SETTLE_S = 5.0  # in which Ray learns that the actors of a run which has just ended are gone


def usable(record: dict[str, Any], seen: int) -> tuple[int, str]:
    """How many of the GPUs that an agent sees the run may use, and why not all.

    Args:
        record: of the node, from Ray.
        seen: GPUs that a process on the node sees. Ray counts the first so many of them that it was told of.
    """
    offered = int(record["Resources"].get("GPU", 0))
    if not seen or not offered:
        return 0, "Ray offers none of its GPUs" if seen else ""
    until = time.monotonic() + _SETTLE_S
    while (taken := offered - _free_gpus(record["NodeID"])) > 0 and time.monotonic() < until:
        time.sleep(0.2)
    if taken > 0:
        return 0, f"Ray has given {taken:g} of its {offered} GPUs to others and does not say which: none is used"
    return min(seen, offered), ""


def _free_gpus(ray_id: str) -> float:
    return _compat.free_resources().get(ray_id, {}).get("GPU", 0.0)
