"""One node of the pipelines study: `python -m ensemble.bench.pipelines.node CONFIG`.

It starts the node's feeder, where the design has one, and the node's members, and ends both when standard input
ends. Run inside a network namespace it is a host of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ensemble.bench.pipelines.config import Config, say
from pipelines import Peers
from pipelines.child_processes import child_environment
from pipelines.errors import PipelineError
from pipelines.feeder.process import FeederProcess, spawn


def main() -> int:
    """Run the node's processes; the exit status is that of the members' process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    config = Config(**json.loads(sys.argv[1]))
    feeder: FeederProcess | None = None
    if config.shares:
        try:
            feeder = _feeder(config)
        except PipelineError as error:
            say("died", -1, f"the feeder of node {config.node}: {' '.join(str(error).split())}")
            return 1
        config = dataclasses.replace(config, address=feeder.address)
    try:
        # Members hear the end of standard input themselves, and say what they say to the study.
        command = [sys.executable, "-P", "-m", "ensemble.bench.pipelines.members", config.to_json()]
        return subprocess.run(command, env=child_environment(), check=False).returncode
    finally:
        if feeder is not None:
            reports = feeder.stop()
            with contextlib.suppress(BrokenPipeError):  # the study was interrupted: nobody asks any more
                say("feeder", config.node, json.dumps(group(reports)))


def _feeder(config: Config) -> FeederProcess:
    across: dict[str, Any] = {}
    if config.meeting is not None:
        peers = Peers(config.meeting, config.node, config.nodes, interface=config.interface)
        across = {"peers": peers, "design": config.design, "preparers": config.preparers}
    return spawn(
        config.pipeline(),
        expect=len(config.here),
        workers=config.prep_workers,
        capacity=config.capacity(),
        **across,
    )


def group(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a feeder's reports say of its group: bytes sent in all, and the last design that it had."""
    groups = [said for report in reports if (said := report.get("group"))]
    last: dict[str, Any] = next((said for said in reversed(groups) if said["generation"] is not None), {})
    return {**last, "sent_bytes": max((said["sent_bytes"] for said in groups), default=0)}


if __name__ == "__main__":
    sys.exit(main())
