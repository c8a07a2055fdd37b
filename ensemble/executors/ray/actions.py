"""What the model of a cluster has the executor do, and what it is told of agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ensemble.events import Report
from ensemble.executors.ray.agents import Agent


@dataclass(frozen=True)
class StartAgent:
    """Start the agent of a node.

    Attributes:
        record: Ray's record of the node.
        takes_over: the directory of an agent of the node that has ended; None: the first one.
    """

    name: str
    record: dict[str, Any]
    takes_over: str | None = None


@dataclass(frozen=True)
class KillAgent:
    """Kill the agent of a node, perhaps only a thread of which has ended, and listen to it no more."""

    name: str


@dataclass(frozen=True)
class Examine:
    """Find out whether a node lives whose agent has died, and say so by `judge_death`."""

    agent: Agent
    reason: str


Action = StartAgent | KillAgent | Examine


@dataclass(frozen=True)
class Answered:
    """An agent has started: the fields of its node as it sees them, and its directory."""

    described: dict[str, Any]
    directory: str


@dataclass(frozen=True)
class Ended:
    """An agent has ended as it was told to."""


@dataclass(frozen=True)
class Died:
    """An agent has died, or could not start."""

    reason: str


News = Answered | Ended | Died | Sequence[Report]
