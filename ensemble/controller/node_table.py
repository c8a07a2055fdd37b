"""The nodes on which a run can place members, and what the cluster could offer beyond that."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ensemble.schedule.explain import explain_beyond_limits, explain_unplaceable
from ensemble.schedule.needs import Need, Node, compute_need, resolve_devices
from ensemble.spec import Identity
from ensemble.store import RunState

log = logging.getLogger(__name__)

_AMOUNT = re.compile(r"[\d.]+ of [\d.]+ GiB")  # in what `Node.no_gpus` says of others


class NodeTable:
    """The nodes of a session.

    Attributes:
        held: on which members can be placed, with what the run holds of them.
        packed: the same, without the memory of the network that members share (`Recipe.base`), once a node. What
            is leased from a cluster (`list_cluster`) is the members' own.
        list_cluster: returns the nodes with all that they could ever offer; None: the run holds all of its nodes.
        changes: how often nodes have come, gone or become others, memory that others take or return apart.
    """

    def __init__(
        self,
        run: RunState,
        nodes: Iterable[Node] = (),
        declared_devices: str = "auto",
        list_cluster: Callable[[], Sequence[Node] | None] = lambda: None,
        limits: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.held, self.list_cluster, self._limits = [node.limit(limits) for node in nodes], list_cluster, limits
        self.changes = 0
        self._run, self._declared_devices = run, declared_devices
        self._said_of_gpus: set[tuple[str, str]] = set()

    @property
    def packed(self) -> list[Node]:
        return self.held if self.list_cluster() is not None else self._without_base(self.held)

    def _without_base(self, nodes: list[Node]) -> list[Node]:
        base = self._run.base
        return nodes if base is None else [node.without_base(base.bytes / 2**30) for node in nodes]

    def change(self, node: Node) -> Node:
        """The run offers more or less of a node than before, or of a new one; returns what it can use of it."""
        node = self._leave_out_broken(node).limit(self._limits)
        by_name = {one.name: one for one in self.held}
        before = by_name.get(node.name)
        by_name[node.name] = node if before is None else replace(node, places=before.places)
        self.held = [one for one in by_name.values() if one.name != node.name or node.cpus or node.gpus]
        self.changes += before is None or before.without_others() != node.without_others()
        return node

    def remove(self, name: str) -> None:
        """No member is placed on a node any more."""
        self.held = [node for node in self.held if node.name != name]
        self.changes += 1

    def leave_out_broken(self) -> None:
        """GPUs have broken, as the log says by now."""
        self.held = [self._leave_out_broken(node) for node in self.held]
        self.changes += 1

    def __contains__(self, name: object) -> bool:
        """Whether members can be placed on the node of this name."""
        return any(node.name == name for node in self.held)

    @property
    def devices(self) -> str:
        """How members are packed; see `ensemble.schedule.needs.resolve_devices`."""
        has_gpus = self._run.has_gpus or any(node.gpus for node in self.list_cluster() or ())
        return resolve_devices(self._declared_devices, has_gpus=has_gpus)

    def list_potential(self) -> Sequence[Node]:
        """The nodes with all that they could ever offer, also what processes of others hold now."""
        cluster = self.list_cluster()
        nodes = [node.without_others() for node in (self.held if cluster is None else cluster)]
        return self._without_base(nodes)

    def explain_unplaceable(self, identity: Identity) -> str | None:
        """Why no node can ever hold a member; None where one can."""
        beyond = explain_beyond_limits(identity, self._limits, self.devices)
        return beyond or explain_unplaceable(identity, self.list_potential(), self.devices)

    def explain_each(self, identities: Iterable[Identity]) -> dict[str, str]:
        """Why no node can ever hold some of them, by member; of members that need the same, one is tried."""
        explained: dict[Need, tuple[str, str | None]] = {}
        reasons: dict[str, str] = {}
        for one in identities:
            need = compute_need(one)
            if need not in explained:
                explained[need] = one.member, self.explain_unplaceable(one)
            first, why = explained[need]
            if why is not None:
                reasons[one.member] = one.member + why.removeprefix(first)
        return reasons

    def can_get_cores(self, cpus: float) -> bool:
        """Whether some node has that many cores that the run does not hold."""
        held = {node.name: node.cpus for node in self.held}
        return any(node.cpus - held.get(node.name, 0.0) >= cpus for node in self.list_potential())

    def has_more(self) -> bool:
        """Whether there are nodes of which the run does not hold everything."""
        held = {node.name: node for node in self.held}
        return any(
            node.name not in held
            or node.cpus > held[node.name].cpus
            or node.memory_gb > held[node.name].free_memory_gb
            or len(node.gpus) > len(held[node.name].gpus)
            or min(held[node.name].gpu_free, default=1.0) < 1.0
            for node in self.list_potential()
        )

    def warn_of_gpus(self, node: str, no_gpus: str) -> None:
        """Warn that a node offers less than its GPUs: once of each GPU and cause, whatever the amounts."""
        causes = {(node, _AMOUNT.sub("", reason)): reason for reason in no_gpus.split("; ") if reason}
        new = [reason for cause, reason in causes.items() if cause not in self._said_of_gpus]
        self._said_of_gpus.update(causes)
        if new:
            log.warning("node %s: %s", node, "; ".join(new))

    def _leave_out_broken(self, node: Node) -> Node:
        broken = self._run.quarantined
        return node.select_gpus(lambda i: node.gpu_parents[i] not in broken) if broken else node
