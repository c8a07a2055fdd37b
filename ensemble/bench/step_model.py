"""When an exchange of gradients ends that runs beside the backward pass, bucket by bucket; pure."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


def exchange_end(ready: Array, cost: Array) -> float:
    """Seconds from a step's begin until all buckets are exchanged, one by one, each once it is ready:

        end(k) = max(end(k - 1), ready(k)) + cost(k)

    The last that is waited for is some bucket k; from then on the exchange takes the cost of k and all after it.

    Args:
        ready: when each bucket's last gradient is computed, in the order of the exchange.
        cost: of its exchange, in seconds.
    """
    return float((ready + np.cumsum(cost[::-1])[::-1]).max())
