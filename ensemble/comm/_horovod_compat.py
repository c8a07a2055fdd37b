"""The private API of Horovod that this package uses; no other module uses any.

Checked with the versions in `CHECKED_WITH`. With any other, `tests/test_compat.py` fails and lists the names to
look at; `tests/comm/test_comm_horovod.py` needs them in each of its tests of a real Horovod.
"""

from __future__ import annotations

import atexit
from typing import Any

CHECKED_WITH = ("0.28.1",)

# `horovod.torch.mpi_ops._basics` is the object behind `hvd.rank`, `hvd.size` and the rest.


def shut_down(hvd: Any) -> None:
    """Leave, which ends Horovod on all ranks; returns when its background thread has ended.

    `hvd.shutdown`, which is public, also forgets the handles on which other threads wait.

    Unnecessary with: an `hvd.shutdown` that leaves them.
    """
    hvd.mpi_ops._basics.shutdown()


def leave_exit_to_us(hvd: Any) -> None:
    """Let Horovod not be shut down when the interpreter exits, which `hvd.init` asks for: it may wait for ever.

    Unnecessary with: an argument of `hvd.init` for it.
    """
    atexit.unregister(hvd.mpi_ops._basics.shutdown)
