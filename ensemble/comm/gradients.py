"""The gradient exchange of a data-parallel member: fixed buckets, fused, overlapped with the backward pass.

Each rank computes the gradient of *its part of the sum* over the global batch (losses are divided by the global
batch's true size before), so the exchange is a plain SUM and every sample weighs alike, however unevenly the
samples lie on the ranks. A rank without any sample takes part with zeros.

Gradients become ready roughly from the last layer to the first. They are fused into flat buckets in that order;
a bucket's all-reduce starts as soon as its last gradient is there, while the backward pass goes on. The buckets
are decided **once, from the parameter list**, not from the order seen in the first backward pass as torch's
DistributedDataParallel does: which values are summed in one message decides in which order a ring adds them,
so a resumed run would get other bits than one that was never stopped.

Half-precision gradients travel and are summed in fp32 (gloo would sum fp16 in fp16: 2048 + 1 + 1 is 2048). With
compression a bucket travels encoded and is summed in fp32 too; parameters of few values are left alone.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ensemble.comm.buckets import ChooseCompression, Group, assign_buckets
from ensemble.comm.communicator import Communicator, Pending
from ensemble.comm.error_feedback import remaining_error
from ensemble.comm.reductions import ExchangeStep, PlainAllReduce, Reduction, mix_integers
from ensemble.comm.worker_thread import WorkerThread

#: Bytes of a bucket: large enough that latency does not count, small enough that the exchange overlaps.
BUCKET_BYTES = 4 * 2**20
#: The first bucket is smaller, so that the exchange begins early.
FIRST_BUCKET_BYTES = 2**20


@dataclass
class _Bucket:
    """Some parameters, their values' places in the reduction's, and which of them have no gradient here."""

    parameters: list[torch.nn.Parameter]
    reduction: Reduction
    views: list[Tensor]
    waiting_for: set[int] = field(default_factory=set)
    absent: list[int] = field(default_factory=list)
    pending: Pending | None = None


class GradientExchange:
    """Sums the gradients of all ranks into `parameter.grad`; with one rank it does nothing at all.

    A parameter that has a gradient on some ranks counts as zeros on the others; one that has none anywhere
    keeps None, so that an optimizer skips it as it would in one process.

    A step is: `with exchange.overlap_backward(): loss.backward()`, `exchange.finish()` before the optimizer, and
    `exchange.end_step(applied)` after it. A rank without samples leaves out the first.

    Args:
        parameters: those that get gradients, in the same order on every rank.
        comm: the ranks.
        compression: what large parameters travel as, as `ensemble.spec.options.COMPRESSIONS` has it; None: as
        they are.
        seed: of what is drawn at random in encoding.
        revertible: whether a step may come to nothing (`end_step(False)`).
        choose: for the compression "auto", what so many values travel as.
        bucket_bytes: size of a bucket.
        first_bucket_bytes: size of the first one; `bucket_bytes` where that is less.

    Attributes:
        loss_scale: what the gradients are multiplied by, the loss scale; to be set before `overlap_backward` and
            `finish`.
        steps: exchanges so far.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        comm: Communicator,
        *,
        compression: Mapping[str, Any] | None = None,
        choose: ChooseCompression | None = None,
        seed: int = 0,
        revertible: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    ) -> None:
        self.loss_scale = 1.0
        self.steps = 0
        self._comm, self._seed, self._revertible = comm, seed, revertible
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._buckets: list[_Bucket] = []
        self._travels: Counter[str] = Counter()
        self._bucket_of: dict[int, _Bucket] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._thread: WorkerThread | None = None
        self._apart: Communicator | None = None
        self._next = 0
        self._listening = False
        if comm.world == 1:
            return
        first = min(first_bucket_bytes, bucket_bytes)
        groups = assign_buckets(parameters, compression, first, bucket_bytes, choose)
        for number, group in enumerate(groups):
            bucket = self._make_bucket(number, group)
            self._travels["none" if group.compression is None else group.compression["name"]] += 1
            self._buckets.append(bucket)
            for parameter in group.parameters:
                self._bucket_of[id(parameter)] = bucket
                hook = parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)
        self._reset()

    def __len__(self) -> int:
        """Messages a step."""
        return len(self._buckets)

    @property
    def bucket_compressions(self) -> dict[str, int]:
        """How many buckets travel as what: a compression's name, or "none"."""
        return dict(self._travels)

    @contextlib.contextmanager
    def overlap_backward(self) -> Iterator[None]:
        """Begin the exchange of each bucket as the backward pass inside fills it."""
        self._listening = True
        try:
            yield
        finally:
            self._listening = False

    def finish(self) -> None:
        """Exchange what is left, wait for all of it and put the sums into `parameter.grad`."""
        while self._next < len(self._buckets):
            self._launch()
        for bucket in self._buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            _take_sums(bucket)
        self.steps += 1
        self._reset()

    def end_step(self, applied: bool) -> None:
        """The step is over; where its sums were not used, error feedback forgets it."""
        for bucket in self._buckets:
            bucket.reduction.end_step(applied)

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs, of all ranks, on rank 0; all call it together.

        For each bucket what is alike on all ranks, and what is each rank's own: the residuals of error feedback, a
        list by rank for each. They go to the CPU one bucket after the other.
        """
        common, own = [], []
        for bucket in self._buckets:
            reduction, shares = bucket.reduction, []
            for tensor in reduction.rank_state():
                gathered = self._comm.all_gather(tensor, equal=True)
                shares.append([share.cpu() for share in gathered] if self._comm.rank == 0 else [])
            own.append(shares)
            common.append([tensor.cpu() for tensor in reduction.shared_state()])
        who = {"world": self._comm.world, "parameters": [self._places(bucket) for bucket in self._buckets]}
        return {"steps": self.steps, "common": common, "own": own, **who}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from rank 0's `state_dict`, with the same parameters and compression.

        With another number of ranks, what those had remembered is shared out among these (`residuals`).
        """
        self.steps = state["steps"]
        if state.get("world", self._comm.world) != self._comm.world:
            self._share_out(state)
            return
        for bucket, common, own in zip(self._buckets, state["common"], state["own"], strict=True):
            for tensor, saved in zip(bucket.reduction.shared_state(), common, strict=True):
                tensor.copy_(saved)
            for tensor, of_ranks in zip(bucket.reduction.rank_state(), own, strict=True):
                tensor.copy_(of_ranks[self._comm.rank])

    def _share_out(self, state: Mapping[str, Any]) -> None:
        sizes = {self._numbers[id(p)]: p.numel() for bucket in self._buckets for p in bucket.parameters}
        left = remaining_error(state["own"], state["parameters"], sizes)
        common_of = {
            tuple(places): common for places, common in zip(state["parameters"], state["common"], strict=True)
        }
        for bucket in self._buckets:
            places = self._places(bucket)
            for tensor, saved in zip(
                bucket.reduction.shared_state(), common_of.get(tuple(places), ()), strict=False
            ):
                tensor.copy_(saved)
            for number, view in zip(places, bucket.views, strict=True):
                if number in left:
                    start = view.storage_offset()
                    kept = bucket.reduction.rank_state()[0][start : start + view.numel()]
                    kept.copy_(left.pop(number) / self._comm.world)
        if left:
            raise RuntimeError(
                f"what is remembered of the parameters {sorted(left)} has no place in this exchange"
            )

    def _places(self, bucket: _Bucket) -> list[int]:
        return [self._numbers[id(parameter)] for parameter in bucket.parameters]

    def close(self) -> None:
        """Take the hooks off the parameters, and let go of the ranks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._buckets.clear()
        self._bucket_of.clear()
        self._apart = None
        if self._thread is not None:
            self._thread.close()

    def _make_bucket(self, number: int, group: Group) -> _Bucket:
        reduction = self._reduction(number, group)
        views = [
            reduction.values[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(group.starts, group.parameters, strict=True)
        ]
        return _Bucket(group.parameters, reduction, views)

    def _reduction(self, number: int, group: Group) -> Reduction:
        device = group.parameters[0].device
        if group.compression is None:
            return PlainAllReduce(self._comm, group.size, len(group.parameters), group.dtype, device)
        options = dict(group.compression)
        if self._apart is None:
            self._apart = self._comm.group(range(self._comm.world))
            # Several threads with NCCL may lock up: on CUDA the exchange runs in the calling thread, so a bucket
            # that is compressed does not overlap with the backward pass there.
            self._thread = WorkerThread(torch.get_num_threads()) if device.type == "cpu" else None
        assert self._apart is not None
        shared = {
            "number": number,
            "error_feedback": options["error_feedback"],
            "revertible": self._revertible,
            "device": device,
        }
        if options["name"] == "powersgd":
            from ensemble.comm.powersgd import PowerSGD

            shapes = [p.shape for p in group.parameters]
            return PowerSGD(self._apart, self._thread, shapes, rank=options["rank"], seed=self._seed, **shared)
        from ensemble.comm.compressed_all_reduce import CompressedAllReduce, make_exchange_codec

        sizes = [p.numel() for p in group.parameters]
        return CompressedAllReduce(self._apart, self._thread, make_exchange_codec(options), sizes, **shared)

    def _reset(self) -> None:
        self._next = 0
        for bucket in self._buckets:
            bucket.waiting_for, bucket.pending = {id(p) for p in bucket.parameters}, None

    def _ready(self, parameter: torch.nn.Parameter) -> None:
        if not self._listening:
            return
        bucket = self._bucket_of[id(parameter)]
        if id(parameter) not in bucket.waiting_for:
            raise RuntimeError(
                "a parameter got a second gradient in one backward pass "
                "(re-entrant activation checkpointing does this: use use_reentrant=False)"
            )
        bucket.waiting_for.remove(id(parameter))
        # In bucket order on every rank, whatever order the gradients came in.
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting_for:
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        _fill(bucket)
        bucket.pending = bucket.reduction.start(
            ExchangeStep(mix_integers(self._seed, self.steps), self.loss_scale, bucket.absent)
        )


def _fill(bucket: _Bucket) -> None:
    """This rank's gradients into the flat buffer, zeros where it has none."""
    present = bucket.reduction.present
    present.fill_(1)
    bucket.absent = []
    for number, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
        grad = parameter.grad
        if grad is None:
            view.zero_()
            present[number] = 0
            bucket.absent.append(number)
        elif grad.is_sparse:
            raise RuntimeError("sparse gradients cannot be exchanged: use sparse=False with more than one worker")
        else:
            view.copy_(grad)


def _take_sums(bucket: _Bucket) -> None:
    # Where this rank has a gradient, somebody has one: only what it lacks needs a look, which on CUDA waits.
    counts = bucket.reduction.present.tolist() if bucket.absent else None
    for number, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
        if counts is not None and counts[number] == 0:
            continue
        # The sum stays where it is until the next exchange fills the buffer again.
        parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)


class FusedBroadcast:
    """Gives every rank the floating-point tensors of rank 0, in a single message.

    Used for weights at the start and for buffers (running statistics of batch normalization) before each step:
    with one message a step however many there are. Values travel in the widest type among them, fp32 at least,
    which holds all narrower ones exactly.

    Args:
        tensors: the same on every rank, in the same order; those that are not floating-point are left out.
        comm: the ranks.
    """

    def __init__(self, tensors: Sequence[Tensor], comm: Communicator) -> None:
        self._comm = comm
        self._tensors = [t for t in tensors if t.is_floating_point()] if comm.world > 1 else []
        self._dtype = torch.float32
        for tensor in self._tensors:
            self._dtype = torch.promote_types(self._dtype, tensor.dtype)

    @torch.no_grad()
    def __call__(self) -> None:
        """Do it."""
        if not self._tensors:
            return
        flat = torch.cat([t.detach().reshape(-1).to(self._dtype) for t in self._tensors])
        self._comm.broadcast_(flat)
        if self._comm.rank == 0:
            return
        start = 0
        for tensor in self._tensors:
            tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
