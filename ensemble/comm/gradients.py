"""Exchanges the gradients of a data-parallel member in fixed buckets, overlapped with the backward pass.

Each rank has the gradient of its part of the sum over the global batch, so the exchange is a SUM. Buckets follow
the parameter list from its end, whatever the first backward pass does, so that a resumed run gets the same bits.
Half precision is summed in fp32; sparse embeddings are exchanged after the buckets (`sparse_gradients`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ensemble.comm.buckets import BucketLayout, assign_buckets
from ensemble.comm.communicator import Communicator, Pending
from ensemble.comm.error_feedback import remaining_error
from ensemble.comm.reductions import ExchangeStep, PlainAllReduce, Reduction, mix_integers
from ensemble.comm.sparse_gradients import sum_sparse_gradients
from ensemble.comm.worker_thread import WorkerThread

#: Default size of a bucket, bytes: large enough to hide latency, small enough that the exchange overlaps.
BUCKET_BYTES = 4 * 2**20
#: Size of the first bucket, bytes: smaller, so that the exchange starts early.
FIRST_BUCKET_BYTES = 2**20


@dataclass
class _Bucket:
    """The parameters of a bucket, and views of their values in its reduction."""

    parameters: list[torch.nn.Parameter]
    reduction: Reduction
    views: list[Tensor]
    waiting_for: set[int] = field(default_factory=set)
    absent: list[int] = field(default_factory=list)
    pending: Pending | None = None


class GradientExchange:
    """Sums the gradients of all ranks into `parameter.grad`; does nothing for one rank.

    A parameter that has a gradient on some ranks counts as zeros on the others. One that has none on any rank
    keeps None, so that an optimizer skips it as it would in one process.

    A step is `with exchange.overlap_backward(): loss.backward()`, then `exchange.finish()` before the optimizer,
    and `exchange.end_step(applied)` after it. A rank without samples leaves out the first.

    Args:
        parameters: those to exchange, in the same order on every rank.
        comm: the ranks.
        sparse: those of `parameters` whose gradients are sparse (`find_sparse_parameters`). A sparse gradient of
            another parameter is exchanged as a dense one.
        compression: options for large parameters (`ensemble.spec.options.COMPRESSIONS`); None for none.
        seed: of the random numbers in encoding.
        revertible: whether a step may be reverted (`end_step(False)`).
        bucket_bytes: size of a bucket.
        first_bucket_bytes: size of the first one, at most `bucket_bytes`.

    Attributes:
        loss_scale: the factor of the gradients; set it before `overlap_backward` and `finish`.
        steps: exchanges so far.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        comm: Communicator,
        *,
        sparse: Sequence[torch.nn.Parameter] = (),
        compression: Mapping[str, Any] | None = None,
        seed: int = 0,
        revertible: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    ) -> None:
        self.loss_scale = 1.0
        self.steps = 0
        self._comm, self._seed, self._revertible = comm, seed, revertible
        self._compression = compression
        self._sizes = min(first_bucket_bytes, bucket_bytes), bucket_bytes
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._thread: WorkerThread | None = None
        self._group: Communicator | None = None
        self._next = 0
        self._listening = False
        self.exchange(parameters, sparse)

    def exchange(
        self, parameters: Sequence[torch.nn.Parameter], sparse: Sequence[torch.nn.Parameter] = ()
    ) -> None:
        """Exchange these parameters from here on, in new buckets; what was left out by compression is dropped."""
        self._remove_buckets()
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        rows = {id(parameter) for parameter in sparse}
        self._sparse = [parameter for parameter in parameters if id(parameter) in rows]
        self._compressions: Counter[str] = Counter()
        if self._comm.world == 1:
            return
        parameters = [parameter for parameter in parameters if id(parameter) not in rows]
        groups = assign_buckets(parameters, self._compression, *self._sizes)
        for number, group in enumerate(groups):
            bucket = self._make_bucket(number, group)
            self._compressions["none" if group.compression is None else group.compression["name"]] += 1
            self._buckets.append(bucket)
            for parameter in group.parameters:
                self._bucket_of[id(parameter)] = bucket
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)
        self._reset()

    def __len__(self) -> int:
        """The number of buckets: messages per step."""
        return len(self._buckets)

    @property
    def bucket_compressions(self) -> dict[str, int]:
        """The number of buckets by compression, "none" included."""
        return dict(self._compressions)

    @contextlib.contextmanager
    def overlap_backward(self) -> Iterator[None]:
        """Start the exchange of each bucket as the backward pass in the block fills it."""
        self._listening = True
        try:
            yield
        finally:
            self._listening = False

    def finish(self) -> None:
        """Exchange the remaining buckets, wait for all, and set `parameter.grad` to the sums."""
        while self._next < len(self._buckets):
            self._launch()
        for bucket in self._buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            _unpack_sums(bucket)
        sum_sparse_gradients(self._sparse, self._comm)
        self.steps += 1
        self._reset()

    def end_step(self, applied: bool) -> None:
        """End the step; where its sums were not applied, error feedback restores the residuals from before it."""
        for bucket in self._buckets:
            bucket.reduction.end_step(applied)

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks, on rank 0; all ranks call it together.

        For each bucket it has the tensors that are equal on all ranks, and lists by rank of the residuals of error
        feedback. They are copied to the CPU one bucket after the other.
        """
        common, own = [], []
        for bucket in self._buckets:
            reduction, shares = bucket.reduction, []
            for tensor in reduction.rank_state():
                gathered = self._comm.all_gather(tensor, equal=True)
                shares.append([share.cpu() for share in gathered] if self._comm.rank == 0 else [])
            own.append(shares)
            common.append([tensor.cpu() for tensor in reduction.shared_state()])
        who = {"world": self._comm.world, "parameters": [self._numbers_of(bucket) for bucket in self._buckets]}
        return {"steps": self.steps, "common": common, "own": own, **who}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load rank 0's `state_dict`, of the same parameters and compression.

        For another number of ranks, the residuals are redistributed (`error_feedback`).
        """
        self.steps = state["steps"]
        if state["world"] != self._comm.world:
            self._redistribute(state)
            return
        for bucket, common, own in zip(self._buckets, state["common"], state["own"], strict=True):
            for tensor, saved in zip(bucket.reduction.shared_state(), common, strict=True):
                tensor.copy_(saved)
            for tensor, of_ranks in zip(bucket.reduction.rank_state(), own, strict=True):
                tensor.copy_(of_ranks[self._comm.rank])

    def _redistribute(self, state: Mapping[str, Any]) -> None:
        sizes = {self._numbers[id(p)]: p.numel() for bucket in self._buckets for p in bucket.parameters}
        residuals = remaining_error(state["own"], state["parameters"], sizes)
        common_of = {
            tuple(places): common for places, common in zip(state["parameters"], state["common"], strict=True)
        }
        for bucket in self._buckets:
            places = self._numbers_of(bucket)
            for tensor, saved in zip(
                bucket.reduction.shared_state(), common_of.get(tuple(places), ()), strict=False
            ):
                tensor.copy_(saved)
            for number, view in zip(places, bucket.views, strict=True):
                if number in residuals:
                    start = view.storage_offset()
                    kept = bucket.reduction.rank_state()[0][start : start + view.numel()]
                    kept.copy_(residuals.pop(number) / self._comm.world)
        if residuals:
            raise RuntimeError(
                f"the checkpoint has residuals of the parameters {sorted(residuals)}, "
                "which this exchange does not compress"
            )

    def _numbers_of(self, bucket: _Bucket) -> list[int]:
        return [self._numbers[id(parameter)] for parameter in bucket.parameters]

    def close(self) -> None:
        """Remove the hooks from the parameters, and end the thread."""
        self._remove_buckets()
        self._group = None
        if self._thread is not None:
            self._thread.close()

    def _remove_buckets(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._buckets.clear()
        self._bucket_of.clear()

    def _make_bucket(self, number: int, group: BucketLayout) -> _Bucket:
        reduction = self._reduction(number, group)
        views = [
            reduction.values[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(group.starts, group.parameters, strict=True)
        ]
        return _Bucket(group.parameters, reduction, views)

    def _reduction(self, number: int, group: BucketLayout) -> Reduction:
        device = group.parameters[0].device
        if group.compression is None:
            return PlainAllReduce(self._comm, group.size, len(group.parameters), group.dtype, device)
        options = dict(group.compression)
        if self._group is None:
            self._group = self._comm.group(range(self._comm.world))
            # Several threads with NCCL may lock up: on CUDA the exchange runs in the calling thread, so a bucket
            # that is compressed does not overlap with the backward pass there.
            self._thread = WorkerThread(torch.get_num_threads()) if device.type == "cpu" else None
        assert self._group is not None
        shared = {
            "number": number,
            "error_feedback": options["error_feedback"],
            "revertible": self._revertible,
            "device": device,
        }
        if options["name"] == "powersgd":
            from ensemble.comm.powersgd import PowerSGD

            shapes = [p.shape for p in group.parameters]
            return PowerSGD(self._group, self._thread, shapes, rank=options["rank"], seed=self._seed, **shared)
        from ensemble.comm.codecs import make_codec
        from ensemble.comm.compressed_all_reduce import CompressedAllReduce

        sizes = [p.numel() for p in group.parameters]
        return CompressedAllReduce(self._group, self._thread, make_codec(options), sizes, **shared)

    def _reset(self) -> None:
        self._next = 0
        for bucket in self._buckets:
            bucket.waiting_for, bucket.pending = {id(p) for p in bucket.parameters}, None

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        if not self._listening:
            return
        bucket = self._bucket_of[id(parameter)]
        if id(parameter) not in bucket.waiting_for:
            raise RuntimeError(
                "a parameter got a second gradient in one backward pass "
                "(re-entrant activation checkpointing does this: use use_reentrant=False)"
            )
        bucket.waiting_for.remove(id(parameter))
        # In bucket order on every rank, in whatever order the gradients are computed.
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting_for:
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        _pack_gradients(bucket)
        bucket.pending = bucket.reduction.start(
            ExchangeStep(mix_integers(self._seed, self.steps), self.loss_scale, bucket.absent)
        )


def _pack_gradients(bucket: _Bucket) -> None:
    """Copy this rank's gradients into the flat buffer; zeros where it has none."""
    present = bucket.reduction.present
    present.fill_(1)
    bucket.absent = []
    for number, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
        grad = parameter.grad
        if grad is None:
            view.zero_()
            present[number] = 0
            bucket.absent.append(number)
        else:
            view.copy_(grad.to_dense())


def _unpack_sums(bucket: _Bucket) -> None:
    # Reading the counts waits on CUDA, and is needed only for parameters without a gradient on this rank.
    counts = bucket.reduction.present.tolist() if bucket.absent else None
    for number, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
        if counts is not None and counts[number] == 0:
            continue
        # The gradient is a view of the buffer, valid until the next exchange.
        parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)


class FusedBroadcast:
    """Broadcasts rank 0's floating-point tensors in a single message.

    Used for weights at the start, and for buffers (running statistics of batch normalization) before each step.
    Values are sent in the widest type among them, fp32 at least, which holds all narrower ones exactly.

    Args:
        tensors: in the same order on every rank; those that are not floating-point are left out.
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
        """Broadcast; all ranks call it together."""
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
