"""The main program of the process that reads records of a run for the page, with limited memory.

It loads the run's declaration, which runs the user's code, after the check of who could have written it
(`RunDir.load_ensemble`), and again for each request: no file stays open that may have been changed since.

A request is a line of JSON: `split`, `task` (its kind), `data` (what the log says of the run's data), `samples`:
[index, digest of the target or None]. It is answered by `{"note": ...}` or `{"error": ...}`, then by
`{"index": ..., "fields": [...]}` or `{"index": ..., "error": ...}` for each sample in order, and `{"end": true}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ensemble.reporting.samples.targets import Wanted, digest_target
from pipelines.ipc.child_processes import end_with_parent

#: CPU-seconds until the kernel ends this process, whatever it does and whoever still waits for it.
CPU_S = 300
NO_MEMORY = "it needs more memory than the process that reads it may take"
UNPROVEN = (
    "Nothing identifies the records of this source (it has no fingerprint): only their targets are compared with "
    "those of the run."
)


def main(descriptor: int, run_dir: str, memory_gb: float) -> None:
    """Serves requests until the other end of the socket is closed."""
    from ensemble.executors.limits import limit_memory

    end_with_parent()
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    limit_memory(memory_gb, "cpu")
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        connection.set_inheritable(False)
        for line in stream:
            request = json.loads(line)
            for answer in _answer(run_dir, request):
                stream.write(json.dumps(answer).encode("ascii") + b"\n")
                stream.flush()


def _answer(run_dir: str, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        yield from _read(run_dir, request)
    except (Exception, SystemExit) as error:  # of the user's code, or of this project
        yield {"error": explain(error)}
    yield {"end": True}


def _read(run_dir: str, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    from ensemble.reporting.samples.fields import describe_record
    from ensemble.store import RunDir
    from ensemble.train.data_identity import check_split
    from pipelines.prepare.sample_maker import SampleMaker

    ensemble = RunDir(run_dir).load_ensemble(takes_settings=True)
    why, is_proven = check_split(request["data"], ensemble, request["split"])
    if why is not None:
        yield {"error": f"{why}: other records are not shown in the place of the run's"}
        return
    yield {"note": "" if is_proven else UNPROVEN}
    maker = SampleMaker(getattr(ensemble, request["split"]).without_randomness())
    for index, digest in request["samples"]:
        wanted = Wanted(index, digest, ensemble.target, request["task"])
        try:
            record = maker.make(index, 0, last=0)
            fields = describe_record(record)
            why = _compare(maker, record, wanted, is_proven=is_proven)
            yield {"index": index, "error": why} if why is not None else {"index": index, "fields": fields}
        except (Exception, SystemExit) as error:
            is_memory = isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError)
            yield {"index": index, "error": NO_MEMORY if is_memory else explain(error)}


def _compare(maker: Any, record: Any, wanted: Wanted, *, is_proven: bool) -> str | None:
    """Why a record may be of another sample than that which was predicted, by its target; None: it is not."""
    found = None
    if wanted.digest is not None:
        with contextlib.suppress(Exception):  # whatever stages raise: then the target is not known
            found = digest_target(maker.make(wanted.index, 0, given=record), wanted.target, wanted.task)
    if found is None or wanted.digest is None or found.split(":")[0] != wanted.digest.split(":")[0]:
        return None if is_proven else "nothing shows that it is the sample that was predicted, so it is not shown"
    if found != wanted.digest:
        return "its target is not that with which the run predicted it: the data have changed, it is not shown"
    return None


def explain(error: BaseException) -> str:
    """What was raised, in one line of at most 500 characters."""
    from ensemble.store import StoreError
    from pipelines.errors import PipelineError

    said = " ".join(str(error).split())[:500]
    return said if isinstance(error, StoreError | PipelineError) else f"{type(error).__name__}: {said}"


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
