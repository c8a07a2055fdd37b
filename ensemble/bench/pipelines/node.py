"""One node of the pipelines study: `python -m ensemble.bench.pipelines.node CONFIG`.

It starts the node's feeder, where the design has one, and the node's members, and ends both when standard input
ends. In a network namespace it is a host of its own.
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

from ensemble.bench.pipelines.config import Config, send_message
from pipelines import Peers
from pipelines.child_processes import child_environment
from pipelines.errors import PipelineError
from pipelines.feeder.process import FeederProcess, spawn


def main() -> int:
    """Run the node's processes; the exit status is that of the members' process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it
    config = Config(**json.loads(sys.argv[1]))
    feeder: FeederProcess | None = None
    if config.has_shared_feeder:
        try:
            feeder = _start_feeder(config)
        except PipelineError as error:
            send_message("died", -1, f"the feeder of node {config.node}: {' '.join(str(error).split())}")
            return 1
        config = dataclasses.replace(config, address=feeder.address)
    try:
        # Members read standard input themselves, and send their messages directly to the study.
        command = [sys.executable, "-P", "-m", "ensemble.bench.pipelines.members", config.to_json()]
        return subprocess.run(command, env=child_environment(), check=False).returncode
    finally:
        if feeder is not None:
            reports = feeder.stop()
            with contextlib.suppress(BrokenPipeError):  # the study was interrupted
                send_message("feeder", config.node, json.dumps(group_report(reports)))


def _start_feeder(config: Config) -> FeederProcess:
    across: dict[str, Any] = {}
    if config.meeting is not None:
        peers = Peers(config.meeting, config.node, config.nodes, interface=config.interface)
        across = {"peers": peers, "design": config.design}
    return spawn(
        config.pipeline(),
        expect=len(config.local_members),
        workers=config.prep_workers,
        capacity=config.capacity(),
        **across,
    )


def group_report(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A feeder's group, from its reports: bytes sent in all, and its last design."""
    groups = [group for report in reports if (group := report.get("group"))]
    last: dict[str, Any] = next((group for group in reversed(groups) if group["generation"] is not None), {})
    return {**last, "sent_bytes": max((group["sent_bytes"] for group in groups), default=0)}


if __name__ == "__main__":
    sys.exit(main())
