"""Shows the nodes of a run, from its event log: of one that is running, and of one that has ended."""

from __future__ import annotations

import os
from typing import Any

from ensemble.reporting.sections.nodes import list_nodes
from ensemble.store import RunDir, RunStatus


def describe_nodes(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Describes the nodes of a run: what they have, what the run holds, what failed there, why one is left out.

    Args:
        run_dir: the directory of a run that has started.

    Returns:
        A row for each node, in the order in which they joined; see `ensemble.reporting.sections.nodes.list_nodes`.

    Raises:
        StoreError: there is no run, or its log is unreadable.
    """
    return list_nodes(RunStatus.load(RunDir(run_dir)).state)
