"""What a run asks Ray for: placement groups, each given whole or not at all."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ensemble.schedule.needs import Node
from ensemble.spec.nodes import NODE_ID, Selection


class Bundle(NamedTuple):
    """Resources on one node: so many cores, GiB of memory and GPUs."""

    cpus: float
    memory_gb: float
    gpus: int = 0

    def as_resources(self) -> list[dict[str, float]]:
        """The bundles of a placement group: one a GPU, all cores and memory in the first.

        Ray counts in ten-thousandths of a core and in bytes. Amounts are rounded down: three thirds of a core are
        to fit on one.
        """
        cpus = max(1, math.floor(self.cpus * 10_000 + 1e-4)) / 10_000
        memory = float(math.floor(self.memory_gb * 2**30 + 1e-2))
        first = {"CPU": cpus, "memory": memory, "GPU": float(self.gpus > 0)}
        return [{name: amount for name, amount in first.items() if amount}, *[{"GPU": 1.0}] * (self.gpus - 1)]

    def add(self, other: Bundle) -> Bundle:
        """Both together."""
        return Bundle(self.cpus + other.cpus, self.memory_gb + other.memory_gb, self.gpus + other.gpus)


class RequestPart(NamedTuple):
    """A part of a request: a bundle, on the node with that id of Ray's; None: on any node."""

    bundle: Bundle
    ray_id: str | None = None


class ResourceRequest(NamedTuple):
    """A request for one placement group.

    Attributes:
        bundle: all that is asked for.
        ray_id: Ray's id of the node that is to give it; None: any node.
        parts: of a request that several nodes may meet together; empty: one node gives all of it.
        selections: the different ones of the members that it is for.
        labels: selectors of the labels of nodes that may meet it.
        misfits: Ray's ids of nodes with these labels that may not.
    """

    bundle: Bundle
    ray_id: str | None = None
    parts: tuple[RequestPart, ...] = ()
    selections: tuple[Selection, ...] = ()
    labels: Selection = ()
    misfits: tuple[str, ...] = ()

    def list_parts(self) -> tuple[RequestPart, ...]:
        """What one node each has to give."""
        return self.parts or (RequestPart(self.bundle, self.ray_id),)

    def make_label_selectors(self, avoided: Collection[str] = ()) -> list[dict[str, str]] | None:
        """For each of its bundles, the selectors of the labels of nodes that may give it; None: all nodes may.

        Args:
            avoided: Ray's ids of nodes that may not.
        """
        ids = [part.ray_id for part in self.list_parts() for _ in part.bundle.as_resources()]
        if self.is_pinned:
            return [{NODE_ID: str(ray_id)} for ray_id in ids]
        left_out = sorted({*avoided, *self.misfits})
        selectors = dict(self.labels) | ({NODE_ID: f"!in({','.join(left_out)})"} if left_out else {})
        return [selectors] * len(ids) if selectors else None

    @property
    def is_pinned(self) -> bool:
        """Whether nodes are named: nobody else can meet it, so it is no demand for further nodes."""
        return self.list_parts()[0].ray_id is not None


class Offer(NamedTuple):
    """A node of the cluster.

    Attributes:
        ray_id: Ray's id of it.
        node: with all that Ray could ever give of it.
        free: what nobody holds now, as Ray names it: CPU, memory in bytes, GPU.
        labels: by which Ray finds it, where `node` has fewer; None: those of `node`.
    """

    ray_id: str
    node: Node
    free: Mapping[str, float]
    labels: Mapping[str, str] | None = None
