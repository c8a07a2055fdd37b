"""A communicator over Horovod: its Gloo controller, or MPI under `mpirun`.

The workers of one attempt meet through a file (`ensemble.comm.horovod_start`). What Horovod cannot sum in
its type is summed in the next wider one (bf16 in fp32); what is only moved travels as bytes. CUDA tensors go by
way of the CPU.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch

from ensemble.comm import horovod_start
from ensemble.comm.communicator import (
    Collective,
    Communicator,
    CommunicatorError,
    Op,
    SingleRank,
    count_sent_bytes,
)
from ensemble.comm.peer_failure_detector import GRACE_S, PeerFailureDetector
from ensemble.comm.torch_dist import open_rendezvous
from pipelines import PipelineError

Backend = Literal["horovod", "horovod-mpi"]

_NAMES = 16
_SUMMED_IN = {
    torch.bfloat16: torch.float32,
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
}


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
    backend: Backend = "horovod",
) -> HorovodCommunicator:
    """Connect to the other ranks and return the communicator.

    Args:
        rendezvous, rank, world, device, interface, rendezvous_timeout_s, grace_s: see `torch_dist.connect`.
        timeout_s: how long a collective may take; of it whole seconds, at least one, a stopped process or a lost
            host may be silent, also between collectives.
        backend: "horovod-mpi" in processes that `mpirun` started (`mpi_command`), whose ranks are MPI's: the
            interface is a matter of `mpirun` then.

    Raises:
        CommunicatorError: not all ranks came, Horovod is not installed, or it was begun in this process already.
    """
    with open_rendezvous(rendezvous, rank, world, grace_s) as (store, detector):
        # First, for it is what takes long: the others then wait for a rank that is late, not for its imports.
        if horovod_start.import_horovod().is_initialized():
            raise PipelineError("Horovod runs in this process already; a member's worker needs its own")
        detector.meet(rendezvous_timeout_s, store.path)
        if backend == "horovod-mpi":
            started = horovod_start.start_under_mpi(timeout_s)
        else:
            started = horovod_start.start(store, rank=rank, world=world, interface=interface, timeout_s=timeout_s)
        if (started.rank, started.world) != (rank, world):
            raise PipelineError(f"MPI counts this process as rank {started.rank} of {started.world}")
    return HorovodCommunicator(_Peers(started, detector), device, range(world), "all")


def mpi_command(world: int, command: Sequence[str], interface: str | None = "lo") -> list[str]:
    """The command that starts so many processes of `command` under Open MPI, with TCP over an interface.

    TCP is used also between ranks of one host, as by the backends that it is compared with.
    """
    networks = ("btl_tcp_if_include", "oob_tcp_if_include")
    bound = [] if interface is None else [word for name in networks for word in ("--mca", name, interface)]
    as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    return [
        "mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-np", str(world),
        "--mca", "btl", "tcp,self", "--mca", "pml", "ob1", *bound, *command,
    ]  # fmt: skip


class _Peers:
    """Horovod in this process; after a failure it finds the lost ranks."""

    def __init__(self, started: horovod_start.HorovodSession, detector: PeerFailureDetector) -> None:
        self.started = started
        self._detector = detector
        self._failed = self._left = False

    @contextlib.contextmanager
    def attribute_failure(self, what: str, timeout_s: float | None = None) -> Iterator[None]:
        """Convert a failure of `what` in the block into an error that names the lost ranks."""
        try:
            with self.started.limit_time(what, timeout_s):
                yield
        except (ConnectionError, TimeoutError) as error:
            self._failed = True
            raise self._detector.make_error(what, error) from error

    def leave(self) -> None:
        """Leave normally, unless a collective has failed."""
        if not self._failed and not self._left:
            self._detector.leave()
        self._left = True
        self.started.stop()


class _Call:
    """A call of Horovod in progress; the first `wait` returns its result.

    A completed call is kept until its name comes again, but none of its tensors.

    Args:
        lent: the tensor that Horovod works on.
        into: the caller's tensor, which gets the values of `lent` when the call is complete; None for none.
    """

    def __init__(
        self,
        peers: _Peers,
        what: str,
        begin: Callable[[Any], int],
        lent: torch.Tensor,
        into: torch.Tensor | None = None,
    ) -> None:
        self._peers, self._what = peers, what
        self._lent: torch.Tensor | None = lent
        self._into = into
        with peers.attribute_failure(what):
            self._handle: int | None = begin(peers.started.hvd)

    def wait(self, timeout_s: float | None = None) -> Any:
        """See `Pending`."""
        if self._handle is None:
            return None
        with self._peers.attribute_failure(self._what, timeout_s):
            result = self._peers.started.hvd.synchronize(self._handle)
        self._handle, lent, into = None, self._lent, self._into
        self._lent = self._into = None
        if lent is not None and into is not None and lent.data_ptr() != into.data_ptr():
            into.detach().copy_(lent)
        return result


class HorovodCommunicator:
    """A `Communicator` over a process set of Horovod; `connect` makes the one of all ranks.

    Args:
        peers: all of the member.
        device: of the member's tensors.
        ranks: of the process set, in order, as all are counted.
        name: distinguishes the calls of this communicator from those of others over the same ranks.
    """

    def __init__(self, peers: _Peers, device: torch.device, ranks: Sequence[int], name: str) -> None:
        self.device = device
        self._peers = peers
        self._ranks = list(ranks)
        self.rank = self._ranks.index(peers.started.rank)
        self.world = len(self._ranks)
        self._set = peers.started.process_set(self._ranks)
        self._name = name
        self._calls: Counter[str] = Counter()
        self._under_way: dict[str, _Call] = {}
        self._sent = 0.0
        self._groups: list[Communicator] = []
        self._group_count = 0

    @property
    def sent_bytes(self) -> float:
        """See `Communicator`."""
        return self._sent + sum(group.sent_bytes for group in self._groups)

    def _call(
        self,
        what: Collective,
        lent: torch.Tensor,
        begin: Callable[..., Any],
        kind: str = "",
        into: torch.Tensor | None = None,
    ) -> _Call:
        """Start a call of the process set.

        Args:
            lent, into: see `_Call`.
            begin: is given Horovod, the name and the process set.
            kind: the same for calls that Horovod does in the same way, of equal `lent`, on every rank.
        """
        if lent.numel() > horovod_start.MAX_ELEMENTS // (self.world if what == "all_gather" else 1):
            raise ValueError(f"{what} of {lent.numel()} elements is more than Horovod supports: send it in parts")
        self._sent += count_sent_bytes(what, lent.nbytes, self.world)
        name = self._next_name(f"{what} {kind}")
        words = what.replace("_", "-")
        start = partial(begin, name=name, process_set=self._set)
        call = _Call(self._peers, words, start, lent, into)
        self._under_way[name] = call
        return call

    def _next_name(self, what: str) -> str:
        """The same on every rank, and of no call under way.

        Names come again, for Horovod remembers what was agreed on a name: one round between the ranks, not three.
        """
        self._calls[what] += 1
        name = f"{self._name} {what} {self._calls[what] % _NAMES}"
        before = self._under_way.pop(name, None)
        if before is not None:
            before.wait()
        return name

    def all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> None:
        """See `Communicator`. Sums of fp16 are Horovod's own, in fp16: widen them before."""
        self.start_all_reduce_(tensor, op).wait()

    def start_all_reduce_(self, tensor: torch.Tensor, op: Op = "sum") -> _Call:
        """See `Communicator`."""
        lent = _to_summable(tensor)

        def begin(hvd: Any, **how: Any) -> int:
            ops = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}
            handle: int = hvd.allreduce_async_(lent, op=ops[op], **how)
            return handle

        return self._call("all_reduce", lent, begin, f"{op} {_call_key(lent)}", tensor)

    def reduce_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """See `Communicator`; Horovod has none: all get the sum."""
        self.all_reduce_(tensor)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        lent = _to_summable(tensor)
        if not lent.numel():
            return tensor.new_empty((len(tensor) // self.world, *tensor.shape[1:]))
        share: torch.Tensor = self._call(
            "reduce_scatter", lent, lambda hvd, **how: hvd.reducescatter_async(lent, op=hvd.Sum, **how)
        ).wait()
        return share.to(tensor.device, tensor.dtype)

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """See `Communicator`."""
        lent = _as_bytes(tensor)
        if not lent.numel():
            return
        root_rank = self._ranks[root]
        self._call("broadcast", lent, lambda hvd, **how: hvd.broadcast_async_(lent, root_rank, **how)).wait()
        if self.rank != root and lent.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(lent.view(tensor.dtype).view(tensor.shape))

    def all_gather(self, tensor: torch.Tensor, *, equal: bool = False) -> list[torch.Tensor]:
        """See `Communicator`."""
        counts = [len(tensor)] * self.world
        if not equal:
            counts = self._gather(torch.tensor([len(tensor)]), equal=True).view(torch.int64).tolist()
        row = tensor.shape[1:]
        per_row = row.numel() * tensor.itemsize
        if not sum(counts) * per_row:
            return [tensor.new_empty((count, *row)) for count in counts]
        sizes = [count * per_row for count in counts]
        parts = self._gather(tensor, equal=equal).tensor_split(list(itertools.accumulate(sizes))[:-1])
        return [
            part.view(tensor.dtype).view(count, *row).to(tensor.device)
            for part, count in zip(parts, counts, strict=True)
        ]

    def _gather(self, tensor: torch.Tensor, *, equal: bool) -> torch.Tensor:
        """The bytes of all ranks' tensors, one after the other."""
        lent = _as_bytes(tensor)
        gathered: torch.Tensor = self._call(
            "all_gather",
            lent,
            lambda hvd, **how: hvd.allgather_async(lent, **how),
            _call_key(lent) if equal else "uneven",
        ).wait()
        return gathered

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        lent = _as_bytes(tensor)
        if not lent.numel():
            return torch.empty_like(tensor)
        # Horovod shares out the first dimension evenly, bytes here: each rank's part is of so many.
        received: torch.Tensor
        received, _counts = self._call(
            "all_to_all", lent, lambda hvd, **how: hvd.alltoall_async(lent, **how), _call_key(lent)
        ).wait()
        return received.view(tensor.dtype).view(tensor.shape).to(tensor.device)

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """See `Communicator`; of the communicator of all ranks only, for all have to agree on a process set."""
        if self.world < self._peers.started.world:
            raise CommunicatorError("over Horovod groups are made by the communicator of all ranks")
        members = sorted(ranks)
        self._group_count += 1
        if len(members) == 1:
            return SingleRank() if self.rank in members else None
        with self._peers.attribute_failure(
            "the making of a group", max(self._peers.started.timeout_s, horovod_start.MEET_S)
        ):
            if self.rank not in members:
                self._peers.started.process_set(members)
                return None
            made = HorovodCommunicator(self._peers, self.device, members, f"{self._name}.{self._group_count}")
        self._groups.append(made)
        return made

    def barrier(self, timeout_s: float) -> None:
        """See `Communicator`."""
        self.start_all_reduce_(torch.zeros(1)).wait(timeout_s)

    def close(self) -> None:
        """See `Communicator`."""
        if self._name == "all":
            self._peers.leave()


def _to_summable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy that Horovod can sum."""
    return tensor.detach().to("cpu", _SUMMED_IN.get(tensor.dtype, tensor.dtype)).contiguous()


def _call_key(lent: torch.Tensor) -> str:
    return f"{lent.dtype} {lent.numel()}"


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, uint8 [n]; a view where it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
