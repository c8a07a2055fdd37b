"""The feeders of a run: one for each cohort on each node, started with its members, restarted when it dies.

The feeders of a cohort that spans several nodes share one stream (`pipelines.Peers`). The nodes that take part are
fixed at its start: a feeder that is started on another node later prepares for its own node alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.controller.actions import ClearRendezvous, ExpectReaders, StartFeeder, StopFeeder
from ensemble.controller.session_state import SessionState
from ensemble.executors.host import RINGS_SHARE
from ensemble.schedule.needs import Node
from ensemble.schedule.placement import Start
from ensemble.spec import Ensemble, Identity
from ensemble.store import RunDir
from pipelines.providers import import_object

if TYPE_CHECKING:
    from pipelines import Peers

log = logging.getLogger(__name__)

RESTARTS = 3

FeederKey = tuple[str, int]  # (node, cohort)


class SharedStream:
    """The stream that members share, as the ensemble declares it. It reads the data and calls the user's code.

    Attributes:
        sharing: whether there are feeders.
        unshared: why there are none although the ensemble asks for them; None otherwise.
        sample_bytes: of one prepared sample.
        repeated: samples of an epoch where each epoch has the same; 0 where they differ, or the cache keeps them.
    """

    def __init__(self, ensemble: Ensemble, *, spans_nodes: bool = True, is_possible: bool = True) -> None:
        self._ensemble, self.spans_nodes = ensemble, spans_nodes
        self._readers: dict[str, bool] = {}
        self.sharing = is_possible and ensemble.sharing != "independent" and ensemble.train is not None
        self.unshared: str | None = None
        self.sample_bytes, self.repeated, self._batch_unit = 1, 0, 1

    def check(self) -> None:
        """Prepare one sample: learn its size, whether it can be cached, and errors in the data before training."""
        if self.sharing and callable(self._ensemble.train):
            self._find_common()
        if self.sharing:
            self._batch_unit = self._ensemble.stream.batch_unit
        if self.sharing and self._ensemble.capacity is None:
            from pipelines.shm.ring import sample_bytes

            stream = self._ensemble.stream
            self.sample_bytes = sample_bytes(stream.fields)
            self.repeated = len(stream) if stream.repeats and self._ensemble.cache is None else 0
        if self.sharing and self._ensemble.cache is not None:
            import_object("pipelines.cache.content:count_cached_stages")(self._ensemble.stream)

    def _find_common(self) -> None:
        from pipelines.errors import DataOutOfReach, PipelineError, SampleError

        try:
            _ = self._ensemble.stream
        except (SampleError, DataOutOfReach):
            raise
        except PipelineError as error:
            log.warning("nothing is shared, every member prepares its own batches: %s", error)
            self.sharing, self.unshared = False, str(error)

    def is_read_by(self, identity: Identity) -> bool:
        """Whether a member's pipeline begins with the shared one; that of a trial may not."""
        if not self.sharing or not callable(self._ensemble.train):
            return self.sharing
        if identity.member not in self._readers:
            reads = self._ensemble.stream.begins(self._ensemble.pipeline(identity.params))
            if not reads:
                log.warning(
                    "%s prepares its own batches: its pipeline does not begin with the shared one", identity.member
                )
            self._readers[identity.member] = reads
        return self._readers[identity.member]

    def choose_capacity(self, batch_sizes: Sequence[int], memory_gb: float, taken_bytes: int = 0) -> int:
        """The number of samples in a feeder's ring.

        It is what the ensemble declares; else all samples where each epoch has the same; else four of the largest
        batches or what 64 MiB hold (`default_capacity`), within the memory for rings, and at least two batches.

        Args:
            memory_gb: what the node offers to members beside the memory for rings (`RINGS_SHARE` of all), in GiB.
            taken_bytes: of that memory, by the rings of other cohorts.
        """
        from pipelines.order.stream import default_capacity, min_capacity

        largest = max(batch_sizes, default=1)
        least = min_capacity(largest, None, self._batch_unit)
        if self._ensemble.capacity is not None:
            return max(self._ensemble.capacity, least)
        for_rings = memory_gb * 2**30 * RINGS_SHARE / (1 - RINGS_SHARE)
        affordable = math.floor((for_rings - taken_bytes) / max(self.sample_bytes, 1))
        if 0 < self.repeated <= affordable:
            return max(least, self.repeated)
        return max(least, 2 * largest, min(default_capacity(self.sample_bytes, 4 * largest), affordable))


class Feeders:
    """Decides which feeders run; without sharing there are none."""

    def __init__(self, session: SessionState, ensemble: Ensemble, run_dir: RunDir, stream: SharedStream) -> None:
        self._session, self._ensemble, self._run_dir, self._stream = session, ensemble, run_dir, stream
        self._peers: dict[FeederKey, Peers] = {}
        self._addresses: dict[FeederKey, str | None] = {}
        self._capacities: dict[FeederKey, int] = {}
        self._restarts: dict[FeederKey, int] = {}
        self._expected: dict[FeederKey, int] = {}
        self._starts = 0
        self._starting: dict[FeederKey, int] = {}  # the number of the start whose answer is awaited
        self._restarting: set[FeederKey] = set()

    @property
    def is_sharing(self) -> bool:
        return self._stream.sharing

    def is_starting(self, key: FeederKey) -> bool:
        """Whether a feeder was started and has no address yet."""
        return key in self._starting

    def address(self, key: FeederKey | None) -> str | None:
        """The address of a feeder; None where its members prepare their own batches."""
        return None if key is None else self._addresses.get(key)

    def keep_all(self, nodes: Sequence[Node]) -> bool:
        """Whether rings on these nodes hold all samples, each prepared once: their readers wait for nobody."""
        repeated = self._stream.repeated
        memory_gb = min((node.memory_gb for node in nodes), default=0.0)
        return 0 < repeated <= self._stream.choose_capacity((), memory_gb)

    def start_early(self, cohort: int, nodes: Sequence[Node]) -> None:
        """Start a cohort's feeder while members are measured, if one ring will hold all samples."""
        if len(nodes) == 1 and self.keep_all(nodes) and (nodes[0].name, cohort) not in self._addresses:
            self._start_alone((nodes[0].name, cohort), nodes[0])

    def assign(self, start: Start, together: Sequence[Start], readers: set[str]) -> list[FeederKey]:
        """The (node, cohort) of the feeders of a member that starts now; they are started if they do not run yet.

        Args:
            together: all members that start now.
            readers: those with epochs left to read; a new feeder waits for these before it begins.
        """
        if start.cohort is None or not self._shares(start):
            return []
        nodes = {node.name: node for node in self._session.nodes.held}
        own = list(start.placement.ranks_by_node)
        missing = [name for name in own if (name, start.cohort) not in self._addresses]
        if missing:
            cohort = [one for one in together if one.cohort == start.cohort and self._shares(one)]
            new = start.cohort not in {number for _, number in self._addresses}
            span = sorted({name for one in cohort for name in one.placement.ranks_by_node}) if new else missing
            if new and len(span) > 1:
                self._introduce(start.cohort, [nodes[name] for name in span])
            # Equal on all nodes, because nodes send samples from one ring into the same slots of another.
            capacity = self._stream.choose_capacity(
                [*(one.placement.identity.batch_size for one in cohort), self._ensemble.largest("batch_size")],
                min(nodes[name].memory_gb for name in span),
                max(map(self._count_ring_bytes, span)),
            )
            for name in span:
                here = (name, start.cohort)
                self._capacities[here] = capacity
                members = [one.placement.member for one in cohort if one.placement.count_ranks(name)]
                self._start(here, len(readers.intersection(members)))
        return [(name, start.cohort) for name in own]

    def assign_late(self, members: Sequence[Identity], cohort: int, node: Node) -> FeederKey | None:
        """The feeder for running members of a node that leave another cohort; it is started and waits for them."""
        key = (node.name, cohort)
        if not self._stream.sharing:
            return None
        if key not in self._addresses:
            self._start_alone(key, node, members)
        return key

    def _start_alone(self, key: FeederKey, node: Node, members: Sequence[Identity] = ()) -> None:
        """Start a feeder that shares its stream with no other node, for running members, if there are any."""
        batch_sizes = [*(identity.batch_size for identity in members), self._ensemble.largest("batch_size")]
        self._capacities[key] = self._stream.choose_capacity(
            batch_sizes, node.memory_gb, self._count_ring_bytes(node.name)
        )
        self._start(key, len(members), late=bool(members))

    def _count_ring_bytes(self, node: str) -> int:
        """What the rings of a node's feeders take."""
        return self._stream.sample_bytes * sum(self._capacities[key] for key in self._addresses if key[0] == node)

    def _introduce(self, cohort: int, nodes: Sequence[Node]) -> None:
        """Connect the feeders of a cohort on several nodes, unless each node is to prepare for itself."""
        if self._ensemble.sharing == "node" or not self._stream.spans_nodes:
            return
        unreached = next((node.name for node in nodes if node.interface is None), None)
        if unreached is not None:
            log.warning(
                "stream group %d: nodes share no samples, as no network interface of node %s has its address",
                cohort,
                unreached,
            )
            return
        from pipelines import Peers

        meeting = self._run_dir.feeders(cohort)
        self._session.actions.append(ClearRendezvous(cohort))  # of a controller that was killed
        for number, node in enumerate(nodes):
            assert node.interface is not None
            self._peers[node.name, cohort] = Peers(str(meeting), number, len(nodes), node.interface)

    def _shares(self, start: Start) -> bool:
        identity = start.placement.identity
        member = self._session.run.members.get(identity.member)
        return not (member is not None and member.is_alone) and self._stream.is_read_by(identity)

    def restart(self, node: str, cohort: int, expect: int, detail: str, *, started: bool = True) -> None:
        """Restart a feeder that exited, if it had begun and members read there; meanwhile these prepare their own
        batches.
        """
        key = (node, cohort)
        if self._addresses.get(key) is None:
            return
        where, detail = {"node": node, "cohort": cohort}, detail or "no reason given"
        log.warning("the feeder of stream group %d on node %s ended: %s", cohort, node, detail)
        self._session.log("feeder_lost", **where, detail=detail)
        if not expect:
            return
        done = self._restarts[key] = self._restarts.get(key, 0) + 1
        if not started or done > RESTARTS:
            self._end_sharing(
                key, f"it could not start: {detail}" if not started else f"lost {done} times: {detail}"
            )
            return
        self._start(key, expect)
        self._restarting.add(key)

    def _end_sharing(self, key: tuple[str, int], why: str) -> None:
        """Do not replace this feeder: its members prepare their own batches."""
        self._addresses[key] = None
        log.warning(
            "stream group %d on node %s has no feeder, its members prepare their own batches: %s",
            key[1],
            key[0],
            why,
        )
        self._session.log("sharing_ended", node=key[0], cohort=key[1], detail=why)

    def expect_at_most(self, readers: Mapping[tuple[str, int], int]) -> None:
        """Lower the number of members for which each feeder waits, because some fail before they connect."""
        for key, expected in self._expected.items():
            if key in self._addresses and readers.get(key, 0) < expected:
                self._expected[key] = readers.get(key, 0)
                self._session.actions.append(ExpectReaders(*key, self._expected[key]))

    def stop_unneeded(self, needed: set[tuple[str, int]]) -> None:
        """Stop all feeders but the needed (node, cohort) and those that share a stream with one of them.

        A node that is being drained, which is no node of the session any more, keeps the needed ones only.
        """
        cohorts, usable = {cohort for _, cohort in needed}, {node.name for node in self._session.nodes.held}
        for key in [key for key in self._addresses if key not in needed]:
            if key in self._peers and key[1] in cohorts and key[0] in usable:
                continue
            is_starting = self._starting.pop(key, None) is not None
            self._restarting.discard(key)
            if self._addresses.pop(key) is not None or is_starting:
                self._session.actions.append(StopFeeder(*key))
        for cohort in {cohort for _, cohort in self._peers} - cohorts:
            self._peers = {key: peers for key, peers in self._peers.items() if key[1] != cohort}
            self._session.actions.append(ClearRendezvous(cohort))

    def forget_node(self, node: str) -> None:
        """A node is lost or was given back: its feeders are gone, and start anew if it comes back."""
        for key in [key for key in self._addresses if key[0] == node]:
            del self._addresses[key]
            self._starting.pop(key, None)
            self._restarting.discard(key)

    @property
    def running(self) -> set[FeederKey]:
        """(node, cohort) of the feeders that were started and not stopped."""
        return set(self._addresses)

    def _start(self, key: FeederKey, expected: int, *, late: bool = False) -> None:
        self._expected[key], self._addresses[key] = expected, None
        self._starts += 1
        self._starting[key] = self._starts
        start = StartFeeder(
            *key, expected, self._capacities[key], self._peers.get(key), late=late, number=self._starts
        )
        self._session.actions.append(start)

    def handle_ready(self, event: Mapping[str, Any]) -> FeederKey:
        """Handle `feeder_ready`, which has the feeder's address, or the error why it has none; returns its (node,
        cohort).

        The answer to a start that was stopped since, or whose node is lost, says nothing about a feeder that runs.
        """
        key = event["node"], event["cohort"]
        if self._starting.get(key) != event["number"]:
            return key
        del self._starting[key]
        restarted = key in self._restarting
        self._restarting.discard(key)
        if event["error"] is not None:
            self._end_sharing(key, event["error"])
        else:
            self._addresses[key] = event["address"]
            if restarted and event["address"] is not None:
                log.warning(
                    "stream group %d on node %s has a new feeder; members return to it at its present sample",
                    key[1],
                    key[0],
                )
                self._session.log("feeder_restarted", node=key[0], cohort=key[1], restarts=self._restarts[key])
        return key
