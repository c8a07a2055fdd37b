"""The communicator over torch.distributed: gloo for CPU tensors, NCCL beside it for CUDA tensors.

The workers of one attempt meet through a file (a torch `FileStore`) that every one of them sees; there is no
TCPStore, which would listen on all addresses. Gloo and NCCL still open TCP sockets between the ranks: they are
bound to one interface by the variables that both read when they begin (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME).

A CUDA member has both backends, so that small messages that live on the CPU need not visit the GPU.
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

from ensemble.comm.communicator import Communicator, CommunicatorError, Op, Pending
from ensemble.comm.traffic import Collective, sent_bytes

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def connect(
    rendezvous: str,
    *,
    rank: int,
    world: int,
    device: torch.device,
    interface: str | None = None,
    rendezvous_timeout_s: float = 300.0,
    timeout_s: float = 1800.0,
) -> Communicator:
    """Meet the other ranks and return the communicator.

    Args:
        rendezvous: `file:///path`, a file that does not exist yet, on a file system that all ranks see; to be
            used once.
        interface: the network interface to bind to, such as "lo"; None leaves the choice to torch.
        rendezvous_timeout_s: how long to wait for the other ranks to come.
        timeout_s: how long a collective may take. A peer that *dies* is known at once; this is for one that
            hangs, and must exceed what a peer may do between two collectives.

    Raises:
        CommunicatorError: not all ranks came, or this process is in a process group already.
    """
    path = _path_of(rendezvous)
    if dist.is_initialized():
        raise CommunicatorError(
            "this process is in a torch.distributed process group already; a member's worker needs a process of "
            "its own: take executor 'local' or 'ray'"
        )
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    on_cuda = device.type == "cuda"
    try:
        store = dist.FileStore(path, world)  # type: ignore[attr-defined]
        _meet(store, rank, world, path, rendezvous_timeout_s)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=device if on_cuda else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, CommunicatorError):
            raise
        raise CommunicatorError(f"rank {rank} of {world} could not join its group at {path}: {error}") from error
    return TorchCommunicator(rank, world, device)


def _path_of(rendezvous: str) -> str:
    parsed = urlparse(rendezvous)
    if parsed.scheme != "file" or not parsed.path:
        raise CommunicatorError(f"a rendezvous is a file:///path, got {rendezvous!r}")
    return unquote(parsed.path)


def _meet(store: Any, rank: int, world: int, path: str, timeout_s: float) -> None:
    """Wait until every rank has signed in; the error names those that did not."""
    store.set(f"here/{rank}", b"1")
    try:
        store.wait([f"here/{peer}" for peer in range(world)], datetime.timedelta(seconds=timeout_s))
    except RuntimeError:
        absent = [peer for peer in range(world) if not store.check([f"here/{peer}"])]
        raise CommunicatorError(
            f"rank {rank} waited {timeout_s:g} s at {path} for the other workers of its member; missing ranks: "
            f"{', '.join(map(str, absent)) or 'none, they came too late'}"
        ) from None


@contextlib.contextmanager
def _peers(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CommunicatorError(f"{what} failed, another worker of this member is lost: {error}") from error


class _Work:
    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        with _peers("all-reduce"):
            self._work.wait()


class TorchCommunicator:
    """A `Communicator` over a process group of torch.distributed; `connect` makes the one of all ranks.

    Args:
        rank, world: in the group.
        device: where the tensors of the member are.
        ranks: of the group, as the default group counts them.
        group: the process group, None for the default one.
    """

    def __init__(
        self, rank: int, world: int, device: torch.device, ranks: Sequence[int] | None = None, group: Any = None
    ) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self._ranks = list(range(world)) if ranks is None else list(ranks)
        self._group = group
        self._sent = 0.0
        self._groups: list[TorchCommunicator] = []

    @property
    def sent_bytes(self) -> float:
        """See `Communicator`."""
        return self._sent + sum(group.sent_bytes for group in self._groups)

    def _count(self, collective: Collective, tensor: torch.Tensor) -> None:
        self._sent += sent_bytes(collective, tensor.nbytes, self.world)

    def all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> None:
        """See `Communicator`. Half-precision sums are gloo's own, in half precision: widen them before."""
        self.start_all_reduce_(tensor, op).wait()

    def start_all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> Pending:
        """See `Communicator`."""
        self._count("all_reduce", tensor)
        with _peers("all-reduce"):
            work = dist.all_reduce(tensor, _OPS[op], group=self._group, async_op=True)
        assert work is not None
        return _Work(work)

    def reduce_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """See `Communicator`."""
        self._count("reduce", tensor)
        with _peers("reduce"):
            dist.reduce(tensor, self._ranks[root], group=self._group)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        share = tensor.new_empty((len(tensor) // self.world, *tensor.shape[1:]))
        self._count("reduce_scatter", tensor)
        with _peers("reduce-scatter"):
            dist.reduce_scatter_tensor(share, tensor.contiguous(), group=self._group)
        return share

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """See `Communicator`."""
        self._count("broadcast", tensor)
        with _peers("broadcast"):
            dist.broadcast(tensor, self._ranks[root], group=self._group)

    def all_gather(self, tensor: torch.Tensor, *, equal: bool = False) -> list[torch.Tensor]:
        """See `Communicator`. Shares of different lengths are padded to the longest for the exchange."""
        with _peers("all-gather"):
            counts = [len(tensor)] * self.world if equal else self._lengths(len(tensor))
            padded = tensor
            if len(tensor) < max(counts):
                padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
                padded[: len(tensor)] = tensor
            shares = [torch.empty_like(padded) for _ in range(self.world)]
            if padded.numel() > 0:
                self._count("all_gather", padded)
                dist.all_gather(shares, padded.contiguous(), group=self._group)
        return [share[:count] for share, count in zip(shares, counts, strict=True)]

    def _lengths(self, own: int) -> list[int]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(lengths, torch.tensor([own]), group=self._group)
        return [int(length) for length in lengths]

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        tensor = tensor.contiguous()
        received = torch.empty_like(tensor)
        self._count("all_to_all", tensor)
        with _peers("all-to-all"):
            dist.all_to_all_single(received, tensor, group=self._group)
        return received

    def group(self, ranks: Sequence[int]) -> TorchCommunicator | None:
        """See `Communicator`."""
        there = [self._ranks[rank] for rank in sorted(ranks)]
        with _peers("the making of a group"):
            group = dist.new_group(there)
        if self.rank not in ranks:
            return None
        made = TorchCommunicator(sorted(ranks).index(self.rank), len(there), self.device, there, group)
        self._groups.append(made)
        return made

    def barrier(self, timeout_s: float) -> None:
        """See `Communicator`."""
        with _peers("barrier"):
            work = dist.all_reduce(torch.zeros(1), group=self._group, async_op=True)
            assert work is not None
            work.wait(datetime.timedelta(seconds=timeout_s))

    def close(self) -> None:
        """See `Communicator`."""
        if self._group is not None:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
