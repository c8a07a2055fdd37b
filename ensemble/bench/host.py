"""One node of the pipelines study: `python -m ensemble.bench.host CONFIG`.

It starts the node's feeder, where the design has one, and the node's members, and ends both when standard input
ends. Run inside a network namespace it is a host of its own.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys

from ensemble.bench.config import Config, say
from pipelines.crew import child_environment
from pipelines.errors import PipelineError
from pipelines.feed import FeederProcess, spawn


def main() -> int:
    """Run the node's processes; the exit status is that of the members' process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    config = Config(**json.loads(sys.argv[1]))
    feeder: FeederProcess | None = None
    if config.shares:
        try:
            feeder = spawn(
                config.pipeline(),
                expect=len(config.here),
                workers=config.prep_workers,
                capacity=config.capacity(),
            )
        except PipelineError as error:
            say("died", -1, f"the feeder of node {config.node}: {' '.join(str(error).split())}")
            return 1
        config = dataclasses.replace(config, address=feeder.address)
    try:
        # Members hear the end of standard input themselves, and say what they say to the study.
        command = [sys.executable, "-P", "-m", "ensemble.bench.readers", config.to_json()]
        return subprocess.run(command, env=child_environment(), check=False).returncode
    finally:
        if feeder is not None:
            reports = feeder.stop()
            say("feeder", config.node, json.dumps(reports[-1] if reports else {}))


if __name__ == "__main__":
    sys.exit(main())
