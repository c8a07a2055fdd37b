"""Ranks of one member as processes that begin as copies of this one, so that none imports torch again."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ensemble.train.optimizers import warm_up

#: Where torch is built for CUDA, a backward pass begins threads, and no process forked after it computes another.
CONTEXT: Any = multiprocessing.get_context("forkserver" if torch.backends.cuda.is_built() else "fork")
CONTEXT.set_forkserver_preload(["torch"])


def tell(told: Connection, do: Callable[..., Any], *given: Any) -> None:
    """Send what a function returns."""
    told.send_bytes(json.dumps(do(*given)).encode())


def run_ranks(world: int, do: Callable[..., Any], *given: Any) -> list[Any]:
    """What `do(rank, *given)`, a function of a module, returns in each process; one that dies ends the others."""
    warm_up()  # else each rank imports for itself what torch's first optimizer needs
    said: dict[int, Any] = {}
    going: dict[Any, int] = {}
    processes = []
    for rank in range(world):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        processes.append(CONTEXT.Process(target=tell, args=(theirs, do, rank, *given)))
        processes[-1].start()
        theirs.close()  # else the death of the rank would be no end of the pipe
        going[ours] = rank
    try:
        while going:
            for ready in wait(list(going)):
                said[going.pop(ready)] = json.loads(ready.recv_bytes())  # type: ignore[union-attr]
    except EOFError:
        raise AssertionError(
            f"a rank died, its error is above; others that said something: {sorted(said)}"
        ) from None
    finally:
        for process in processes:
            if len(said) < world:
                process.kill()
            process.join()
    return [said[rank] for rank in range(world)]
