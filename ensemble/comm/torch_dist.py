"""A communicator over torch.distributed: gloo for CPU tensors, and NCCL for CUDA tensors.

The workers of one attempt meet through a file (a `FileStore`), and bind their sockets to one interface. When a
collective fails, a `PeerFailureDetector` finds the lost ranks: a rank that notices cuts all of its own
connections, so that all notice. With TORCH_NCCL_BLOCKING_WAIT NCCL's `wait` raises when a peer is gone, and does
not end the process.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote, urlparse

import torch
import torch.distributed as dist

from ensemble.comm import _compat
from ensemble.comm.communicator import Collective, CommunicatorError, Op, Pending, count_sent_bytes
from ensemble.comm.peer_failure_detector import GRACE_S, PeerFailureDetector

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
#: Up to so many bytes to its root a reduction is a gather and sums there, above it gloo's ring, which shares the
#: work out over many steps. All-reduce by way of two groups of 4 ranks, this and that, ms: 4 KiB 3.0 and 7.7,
#: 1 MiB 11 and 16, 4 MiB 52 and 32.
GATHER_BYTES = 4 * 2**20
_UNUSED_TAG = 0x6E6F6E65  # of no message
_AT_ONCE = datetime.timedelta(milliseconds=1)


def connect(
    rendezvous: str,
    *,
    rank: int,
    world: int,
    device: torch.device,
    interface: str | None = None,
    rendezvous_timeout_s: float = 300.0,
    timeout_s: float = 1800.0,
    grace_s: float = GRACE_S,
) -> TorchCommunicator:
    """Connect to the other ranks and return the communicator.

    Args:
        rendezvous: `file:///path`, a file that does not exist yet, on a file system that all ranks see; to be
            used once.
        interface: the network interface to bind to, such as "lo"; None leaves the choice to torch.
        rendezvous_timeout_s: how long to wait for the other ranks.
        timeout_s: how long a collective may take. A peer that *dies* is detected at once; this limit is for
            one that hangs, and must exceed what a peer may do between two collectives.
        grace_s: how long the survivors of a failure wait for each other before they report the lost ranks.

    Raises:
        CommunicatorError: some ranks did not connect, or this process is in a process group already.
    """
    if dist.is_initialized():
        raise CommunicatorError(
            "this process is in a torch.distributed process group already; a member's worker needs a process of "
            "its own: take executor 'local' or 'ray'"
        )
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    timeout = datetime.timedelta(seconds=timeout_s)
    on_cuda = device.type == "cuda"
    if on_cuda:
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    with open_rendezvous(rendezvous, rank, world, grace_s) as (store, detector):
        detector.meet(rendezvous_timeout_s, store.path)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timeout,
            device_id=device if on_cuda else None,
        )
    peers = _Peers(detector, timeout)
    peers.add_group(dist.group.WORLD, rank, world)
    return TorchCommunicator(rank, world, device, peers)


@contextlib.contextmanager
def open_rendezvous(
    rendezvous: str, rank: int, world: int, grace_s: float
) -> Iterator[tuple[Any, PeerFailureDetector]]:
    """Open the file by which the ranks meet; a failure in the block becomes a `CommunicatorError`.

    Args:
        rendezvous, rank, world, grace_s: see `connect`.

    Yields:
        The store, and the detector on it.
    """
    parsed = urlparse(rendezvous)
    if parsed.scheme != "file" or not parsed.path:
        raise CommunicatorError(f"a rendezvous is a file:///path, got {rendezvous!r}")
    path = unquote(parsed.path)
    try:
        store = dist.FileStore(path, world)  # type: ignore[attr-defined]
        yield store, PeerFailureDetector(store, rank, world, grace_s=grace_s)
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, CommunicatorError):
            raise
        raise CommunicatorError(f"rank {rank} of {world} could not join its group at {path}: {error}") from error


class _Peers:
    """All process groups of this rank; after a failure it finds the lost ranks."""

    def __init__(self, detector: PeerFailureDetector, timeout: datetime.timedelta) -> None:
        self.failed = False
        self.timeout = timeout
        self._detector = detector
        self._groups: list[tuple[Any, int, int]] = []

    def add_group(self, group: Any, rank: int, world: int) -> None:
        """Add a process group, with this rank in it and its number of ranks."""
        self._groups.append((group, rank, world))

    def leave(self) -> None:
        """Leave normally, unless a collective has failed; peers that still wait for this rank get an error."""
        if not self.failed:
            self._detector.leave()
            self._break_connections()

    def _break_connections(self) -> None:
        """Close the gloo connections of all groups, so that every peer notices the failure.

        A receive that times out closes all connections of a group. One from a peer whose connection is broken
        fails earlier, without closing them: so it is tried with each peer.
        """
        for group, rank, world in self._groups:
            for peer in (peer for peer in range(world) if peer != rank):
                with contextlib.suppress(RuntimeError):  # how a receive ends that is meant to fail
                    group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(_AT_ONCE)

    @contextlib.contextmanager
    def attribute_failure(self, what: str) -> Iterator[None]:
        """Convert a failure of `what` in the block into an error that names the lost ranks."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, CommunicatorError):
                raise
            self.failed = True
            self._detector.report_alive()
            self._break_connections()
            raise self._detector.make_error(what, str(error).partition(" This is typically")[0]) from error


class _Work:
    def __init__(self, work: dist.Work, peers: _Peers) -> None:
        self._work, self._peers = work, peers

    def wait(self) -> None:
        with self._peers.attribute_failure("all-reduce"):
            self._work.wait()


class TorchCommunicator:
    """A `Communicator` over a process group of torch.distributed; `connect` makes the one of all ranks.

    Args:
        rank, world: in the group.
        device: of the member's tensors.
        peers: all of the member.
        ranks: of the group, as numbered in the default group.
        group: the process group, None for the default one.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        device: torch.device,
        peers: _Peers,
        ranks: Sequence[int] | None = None,
        group: Any = None,
    ) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self._ranks = list(range(world)) if ranks is None else list(ranks)
        self._group = group
        self._peers = peers
        self._sent = 0.0
        self._groups: list[TorchCommunicator] = []

    @property
    def sent_bytes(self) -> float:
        """See `Communicator`."""
        return self._sent + sum(group.sent_bytes for group in self._groups)

    def _count_bytes(self, collective: Collective, tensor: torch.Tensor) -> None:
        self._sent += count_sent_bytes(collective, tensor.nbytes, self.world)

    def all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> None:
        """See `Communicator`. Half-precision sums are gloo's own, in half precision: widen them before."""
        self.start_all_reduce_(tensor, op).wait()

    def start_all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> Pending:
        """See `Communicator`."""
        self._count_bytes("all_reduce", tensor)
        with self._peers.attribute_failure("all-reduce"):
            work = dist.all_reduce(tensor, _OPS[op], group=self._group, async_op=True)
        assert work is not None
        return _Work(work, self._peers)

    def reduce_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """See `Communicator`."""
        self._count_bytes("reduce", tensor)
        with self._peers.attribute_failure("reduce"):
            if tensor.device.type == "cpu" and tensor.nbytes * (self.world - 1) <= GATHER_BYTES:
                self._gather_sum(tensor, root)
            else:
                dist.reduce(tensor, self._ranks[root], group=self._group)

    def _gather_sum(self, tensor: torch.Tensor, root: int) -> None:
        """Reduce in one step, for low latency; the root adds in rank order."""
        if self.world == 1:
            return
        parts = [torch.empty_like(tensor) for _ in range(self.world)] if self.rank == root else None
        dist.gather(tensor, parts, dst=self._ranks[root], group=self._group)
        if parts is not None:
            torch.add(parts[0], parts[1], out=tensor)
            for part in parts[2:]:
                tensor.add_(part)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        share = tensor.new_empty((len(tensor) // self.world, *tensor.shape[1:]))
        self._count_bytes("reduce_scatter", tensor)
        with self._peers.attribute_failure("reduce-scatter"):
            dist.reduce_scatter_tensor(share, tensor.contiguous(), group=self._group)
        return share

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """See `Communicator`."""
        self._count_bytes("broadcast", tensor)
        with self._peers.attribute_failure("broadcast"):
            dist.broadcast(tensor, self._ranks[root], group=self._group)

    def all_gather(self, tensor: torch.Tensor, *, equal: bool = False) -> list[torch.Tensor]:
        """See `Communicator`. Shares of different lengths are padded to the longest for the exchange."""
        with self._peers.attribute_failure("all-gather"):
            counts = [len(tensor)] * self.world if equal else self._gather_lengths(len(tensor))
            padded = tensor
            if len(tensor) < max(counts):
                padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
                padded[: len(tensor)] = tensor
            shares = [torch.empty_like(padded) for _ in range(self.world)]
            if padded.numel() > 0:
                self._count_bytes("all_gather", padded)
                dist.all_gather(shares, padded.contiguous(), group=self._group)
        return [share[:count] for share, count in zip(shares, counts, strict=True)]

    def _gather_lengths(self, own: int) -> list[int]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(lengths, torch.tensor([own]), group=self._group)
        return [int(length) for length in lengths]

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        tensor = tensor.contiguous()
        received = torch.empty_like(tensor)
        self._count_bytes("all_to_all", tensor)
        with self._peers.attribute_failure("all-to-all"):
            dist.all_to_all_single(received, tensor, group=self._group)
        return received

    def group(self, ranks: Sequence[int]) -> TorchCommunicator | None:
        """See `Communicator`; of the communicator of all ranks only, for torch makes a group with all of them."""
        if self.world < dist.get_world_size():
            raise CommunicatorError(
                f"ranks {self._ranks} cannot make a group: torch needs all {dist.get_world_size()} ranks for "
                "that, so use the communicator of all ranks, also for compressed gradients"
            )
        members = [self._ranks[rank] for rank in sorted(ranks)]
        with self._peers.attribute_failure("the making of a group"):
            group = dist.new_group(members, timeout=self._peers.timeout)
        if self.rank not in ranks:
            return None
        made = TorchCommunicator(
            sorted(ranks).index(self.rank), len(members), self.device, self._peers, members, group
        )
        self._groups.append(made)
        self._peers.add_group(group, made.rank, made.world)
        return made

    def barrier(self, timeout_s: float) -> None:
        """See `Communicator`."""
        with self._peers.attribute_failure("barrier"):
            work = dist.all_reduce(torch.zeros(1), group=self._group, async_op=True)
            assert work is not None
            work.wait(datetime.timedelta(seconds=timeout_s))

    def close(self) -> None:
        """See `Communicator`."""
        if self._group is None and dist.is_initialized():
            self._peers.leave()
            if self._peers.failed and self.device.type == "cuda":
                _compat.abort_process_groups()  # destroying would wait for lost ranks
            else:
                dist.destroy_process_group()
