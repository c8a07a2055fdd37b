"""How the feeders of several nodes meet, as a user declares it; `pipelines.multinode` does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipelines.checks import check_integer, check_interface, check_path, check_seconds, shorten_repr
from pipelines.errors import PipelineError

DesignName = Literal["node", "single", "multi", "all"]
DESIGNS: tuple[DesignName, ...] = ("node", "single", "multi", "all")


@dataclass(frozen=True)
class Peers:
    """How a node's feeder reaches those of the other nodes.

    Attributes:
        directory: a path that all nodes see, for this stream alone; it is made with mode 0700.
        node: number of this node, 0 to `nodes` - 1.
        nodes: how many there are.
        interface: the network interface that reaches the other nodes ("eth0"); by default the loopback.
        timeout_s: the longest time of a transfer, after which its group ends; a node that dies is noticed at once.
    """

    directory: str
    node: int
    nodes: int
    interface: str = "lo"
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        nodes = check_integer("Peers.nodes", self.nodes, 1)
        # Whether this host has the interface is checked by its feeder: this may be another host.
        if not isinstance(self.interface, str) or not self.interface:
            raise PipelineError(f"Peers.interface must be a name such as 'eth0', got {self.interface!r}")
        for name, value in (
            ("directory", check_path("Peers.directory", self.directory)),
            ("nodes", nodes),
            ("node", check_integer("Peers.node", self.node, 0, nodes - 1)),
            ("timeout_s", check_seconds("Peers.timeout_s", self.timeout_s, above=True)),
        ):
            object.__setattr__(self, name, value)


def check_peers(peers: object, design: object, preparers: object) -> int | None:
    """Check the arguments with which a feeder on this host meets others; returns `preparers`."""
    if design not in (*DESIGNS, "auto"):
        raise PipelineError(f"there is no design {design!r}; the designs are {', '.join(DESIGNS)} and auto")
    if peers is not None and not isinstance(peers, Peers):
        raise PipelineError(f"peers must be a pipelines.Peers or None, got {shorten_repr(peers)}")
    if peers is not None:
        check_interface(peers.interface)
    if preparers is None:
        return None
    if peers is None:
        raise PipelineError(f"preparers={shorten_repr(preparers)} is for several nodes: give peers= too")
    return check_integer("preparers", preparers, 1)
