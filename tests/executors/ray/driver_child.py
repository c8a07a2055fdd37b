"""A driver to be killed: trains four members on a Ray of its own and says when the first has started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from execute_members import an_ensemble

import ensemble

RATES = (0.1, 0.2, 0.3, 0.4)


def say(event: dict[str, Any]) -> None:
    if event["type"] in ("started", "epoch"):
        print(event["type"], flush=True)


if __name__ == "__main__":
    declared = an_ensemble([{"lr": lr} for lr in RATES], epochs=4)
    ensemble.submit(declared, sys.argv[1], executor="ray", on_event=say).wait()
