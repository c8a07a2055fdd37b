"""Ranks of one member as processes that begin as copies of this one, so that none imports torch again."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

FORK = multiprocessing.get_context("fork")


def run_ranks(world: int, do: Callable[..., Any], *given: Any) -> list[Any]:
    """What `do(rank, *given)` returns in each process, by way of JSON; one that dies ends the others."""

    def tell(told: Connection, rank: int) -> None:
        told.send_bytes(json.dumps(do(rank, *given)).encode())

    said: dict[int, Any] = {}
    going: dict[Connection, int] = {}
    processes = []
    for rank in range(world):
        ours, theirs = FORK.Pipe(duplex=False)
        processes.append(FORK.Process(target=tell, args=(theirs, rank)))
        processes[-1].start()
        theirs.close()  # else the death of the rank would be no end of the pipe
        going[ours] = rank
    try:
        while going:
            for ready in wait(list(going)):
                said[going.pop(ready)] = json.loads(ready.recv_bytes())  # type: ignore[arg-type, union-attr]
    except EOFError:
        raise AssertionError(f"a rank died, its error is above; the others said {sorted(said)}") from None
    finally:
        for process in processes:
            if len(said) < world:
                process.kill()
            process.join()
    return [said[rank] for rank in range(world)]
